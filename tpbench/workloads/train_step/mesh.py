"""fsdp, fsdp_dtensor and fsdp_dtensor_async: FSDP2 over replicas, DTensor with sequence parallelism within them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tpbench.comm.symmetric_buffers import enable_symmetric_memory
from tpbench.measure.session import Context
from tpbench.workloads.train_step import losses, models
from tpbench.workloads.train_step.models import UnknownArchitecture
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.tensor_parallel import (
    ColumnLinear,
    RowLinear,
    ShardedEmbedding,
    ShardedHead,
    ShardNorm,
    Tokens,
    compute_locally,
    replicated,
    sum_gradients,
)
from tpbench.workloads.train_step.trainer import Place, TorchTrainer
from tpbench.workloads.train_step.weights import fill


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

    shared = replicated(model)

    @contextlib.contextmanager
    def last_micro(last: bool) -> Iterator[None]:
        if context.dp_size > 1:
            model.set_requires_gradient_sync(last)
        yield
        if last and shared:
            sum_gradients(shared, context.tp_group)

    return TorchTrainer(problem, model, context, loss, last_micro=last_micro, around=around)


def fsdp_dtensor_async(problem: TrainStep, place: Place) -> TorchTrainer:
    """The same with inductor's micro-pipelined products: all-gathers and reduce-scatters in pieces through symmetric
    memory (copies between peers, no multicast) beside the products that need them."""
    import torch._inductor.config

    from tpbench.workloads.train_step.round_trips import WithoutRoundTrips

    torch._inductor.config.post_grad_custom_pre_pass = WithoutRoundTrips()
    torch._inductor.config._micro_pipeline_tp = True
    enable_symmetric_memory(place.context.tp_group)
    return fsdp_dtensor(problem, place)


def mesh(context: Context) -> DeviceMesh:
    """(dp, tp), row-major: tensor-parallel ranks are neighbours."""
    ranks = torch.arange(context.world_size).view(context.dp_size, context.tp_size)
    return DeviceMesh.from_group(
        [context.dp_group, context.tp_group], context.device.type, ranks, mesh_dim_names=("dp", "tp")
    )


def shard_tensors(problem: TrainStep, model: Any, tp: DeviceMesh) -> None:
    """Megatron's column and row sharding with sequence parallelism (arXiv:2205.05198), as parameters that are DTensors.

    Between attention and feed-forward each rank holds a share of the tokens. Raises UnknownArchitecture for a model
    whose modules are not named as Llama's and Qwen's are.
    """
    try:
        _replace_parts(problem, model, tp)
    except AttributeError as error:
        raise UnknownArchitecture(_unknown(problem, str(error))) from None
    for part in (model.model.embed_tokens, *model.model.layers, model.model.norm, model.lm_head):
        compute_locally(part)
    if problem.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise UnknownArchitecture(_unknown(problem, name))


def _replace_parts(problem: TrainStep, model: Any, tp: DeviceMesh) -> None:
    tokens = Tokens(tp.get_group(), problem.seq_length)
    model.model.embed_tokens = ShardedEmbedding(model.model.embed_tokens, tp, tokens)
    model.lm_head = ShardedHead(
        model.lm_head, tp, whole=not problem.vocab_parallel, as_dtensor=problem.train_loss == "torch"
    )
    model.model.norm = ShardNorm(model.model.norm, tp, tokens)
    for layer in model.model.layers:
        attention, feed_forward = layer.self_attn, layer.mlp
        layer.input_layernorm = ShardNorm(layer.input_layernorm, tp, tokens)
        attention.q_proj = ColumnLinear(attention.q_proj, tp)
        attention.k_proj = ColumnLinear(attention.k_proj, tp)
        attention.v_proj = ColumnLinear(attention.v_proj, tp)
        attention.o_proj = RowLinear(attention.o_proj, tp, tokens)
        if hasattr(attention, "q_norm"):
            # Of each head's queries and keys: a rank has its heads alone.
            attention.q_norm = ShardNorm(attention.q_norm, tp)
            attention.k_norm = ShardNorm(attention.k_norm, tp)
        layer.post_attention_layernorm = ShardNorm(layer.post_attention_layernorm, tp, tokens)
        feed_forward.gate_proj = ColumnLinear(feed_forward.gate_proj, tp)
        feed_forward.up_proj = ColumnLinear(feed_forward.up_proj, tp)
        feed_forward.down_proj = RowLinear(feed_forward.down_proj, tp, tokens)


def _unknown(problem: TrainStep, what: str) -> str:
    return (
        f"the tensor-parallel plan does not know {what} of {problem.model} ({problem.architecture}); it covers "
        "decoders whose modules are named as Llama's and Qwen3's"
    )


def shard_replicas(model: Any, dp: DeviceMesh, device: torch.device, seed: int) -> None:
    """Make each part's weights and shard them over replicas before the next part's exist, so that no rank ever holds
    more than its shards and one part. One replica has nothing to shard, and none of FSDP's work for the host."""
    embedding, head = model.model.embed_tokens, model.lm_head
    tied = head.weight is embedding.weight
    names = {module: f"{name}." for name, module in model.named_modules()}

    def make(module: nn.Module) -> None:
        module.to_empty(device=device)
        fill(module, names[module], seed)

    def shard(modules: Any, **options: Any) -> None:
        if dp.size() > 1:
            fully_shard(modules, mesh=dp, **options)

    for layer in model.model.layers:
        buffers_stay(layer)
        make(layer)
        shard(layer)
    make(embedding)
    make(model.model.norm)
    if tied:
        head.weight = embedding.weight
    else:
        make(head)
        shard(embedding)
        # Needed last in the forward pass and first in the backward: not freed in between.
        shard([model.model.norm, head], reshard_after_forward=False)
    shard(model)


def buffers_stay(module: nn.Module) -> None:
    """A layer with buffers would lose them."""
    if next(module.buffers(), None) is not None:
        raise UnknownArchitecture(f"{type(module).__name__} holds buffers, for which there are no initial values")
