"""fsdp, fsdp_dtensor and fsdp_dtensor_async: FSDP2 over replicas, DTensor with sequence parallelism within them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tpbench.context import Context
from tpbench.workloads.train_step import losses, models
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.trainer import Place, TorchTrainer
from tpbench.workloads.train_step.weights import fill


class UnknownArchitecture(TypeError):
    """A parameter that the plan does not name."""


def fsdp_dtensor(problem: TrainStep, place: Place) -> TorchTrainer:
    """The (dp, tp) mesh; with one tensor-parallel rank plain FSDP2."""
    context = place.context
    model = models.build(problem)
    models.place_buffers(model, context.device)
    device_mesh = mesh(context)
    if context.tp_size > 1:
        shard_tensors(problem, model, device_mesh["tp"])
    if problem.compile:
        models.compile_layers(model)
    shard_replicas(model, device_mesh["dp"], context.device, problem.seed)
    loss = losses.whole(problem)
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    if context.tp_size > 1 and problem.vocab_parallel:
        if problem.train_loss == "torch":
            around = losses.loss_parallel
        else:
            start = context.tp_rank * -(-problem.vocab // context.tp_size)
            loss = losses.ours(context.tp_group, start, problem.vocab)

    @contextlib.contextmanager
    def last_micro(last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last)
        yield

    return TorchTrainer(problem, model, context, loss, last_micro=last_micro, around=around)


def fsdp_dtensor_async(problem: TrainStep, place: Place) -> TorchTrainer:
    """The same with inductor's micro-pipelined products: all-gathers and reduce-scatters in pieces through symmetric
    memory (copies between peers, no multicast) beside the products that need them."""
    import torch._inductor.config
    import torch.distributed._symmetric_memory as symmetric

    torch._inductor.config._micro_pipeline_tp = True
    symmetric.enable_symm_mem_for_group(place.context.tp_group.group_name)
    return fsdp_dtensor(replace(problem, compile=True), place)


def mesh(context: Context) -> DeviceMesh:
    """(dp, tp), row-major: tensor-parallel ranks are neighbours."""
    ranks = torch.arange(context.world_size).view(context.dp_size, context.tp_size)
    return DeviceMesh.from_group(
        [context.dp_group, context.tp_group], context.device.type, ranks, mesh_dim_names=("dp", "tp")
    )


def shard_tensors(problem: TrainStep, model: Any, tp: DeviceMesh) -> None:
    """Megatron's column and row sharding with sequence parallelism (arXiv:2205.05198), as DTensor plans.

    Between attention and feed-forward each rank holds a shard of the sequence. Raises UnknownArchitecture for a model
    whose modules are not named as Llama's and Qwen's are.
    """
    sequence, everything = Shard(1), Replicate()
    vocab_parallel = problem.vocab_parallel
    parallelize_module(
        model,
        tp,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=everything, output_layouts=sequence),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(
                input_layouts=sequence,
                output_layouts=Shard(-1) if vocab_parallel else everything,
                use_local_output=not (vocab_parallel and problem.train_loss == "torch"),
            ),
        },
    )
    for layer in model.model.layers:
        plan: dict[str, Any] = {
            "input_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": sequence},
                desired_input_kwarg_layouts={"hidden_states": everything},
            ),
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(output_layouts=sequence),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(everything,)),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=sequence),
        }
        if hasattr(layer.self_attn, "q_norm"):
            # Of each head's queries and keys, (batch, sequence, heads of this rank, head_dim): a plain weight here
            # would get the gradient of this rank's heads alone.
            plan["self_attn.q_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
            plan["self_attn.k_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
        parallelize_module(layer, tp, plan)
    if problem.tied:
        model.lm_head.weight = model.model.embed_tokens.weight  # parallelize_module unties
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise UnknownArchitecture(
                f"the tensor-parallel plan does not know {name} of {problem.model} ({problem.architecture}); it covers "
                "decoders whose modules are named as Llama's and Qwen3's"
            )


def shard_replicas(model: Any, dp: DeviceMesh, device: torch.device, seed: int) -> None:
    """Make each part's weights and shard them over replicas before the next part's exist, so that no rank ever holds
    more than its shards and one part."""
    embedding, head = model.model.embed_tokens, model.lm_head
    tied = head.weight is embedding.weight
    names = {module: f"{name}." for name, module in model.named_modules()}

    def make(module: nn.Module) -> None:
        module.to_empty(device=device)
        fill(module, names[module], seed)

    for layer in model.model.layers:
        buffers_stay(layer)
        make(layer)
        fully_shard(layer, mesh=dp)
    make(embedding)
    make(model.model.norm)
    if tied:
        head.weight = embedding.weight
    else:
        make(head)
        fully_shard(embedding, mesh=dp)
        # Needed last in the forward pass and first in the backward: not freed in between.
        fully_shard([model.model.norm, head], mesh=dp, reshard_after_forward=False)
    fully_shard(model, mesh=dp)


def buffers_stay(module: nn.Module) -> None:
    """A layer with buffers would lose them."""
    if next(module.buffers(), None) is not None:
        raise UnknownArchitecture(f"{type(module).__name__} holds buffers, for which there are no initial values")
