"""Variants without DeepSpeed: FSDP2 over replicas, with DTensors and sequence parallelism within them, and DDP."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from tpbench.measure.session import Context
from tpbench.workloads.train_step.model import models
from tpbench.workloads.train_step.model.models import decoder_layers, make_parts, place_buffers
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.sharding import by_dtensor, by_modules
from tpbench.workloads.train_step.training.losses import loss_of
from tpbench.workloads.train_step.training.trainer import TorchTrainer


def fsdp_dtensor(problem: TrainStep, context: Context, sharding: ModuleType = by_modules) -> TorchTrainer:
    """Train on the (dp, tp) mesh: FSDP2 over replicas, and tensor-parallel ranks by the module `sharding`.

    `by_modules` has tpbench's sharded modules, and `by_dtensor` torch's `parallelize_module`. With one tensor-parallel
    rank this is plain FSDP2.
    """
    model = models.build(problem)
    place_buffers(model, context.device)
    ranks = torch.arange(context.world_size).view(context.dp_size, context.tp_size)  # those of tp are neighbours
    groups = [context.dp_group, context.tp_group]
    mesh = DeviceMesh.from_group(groups, context.device.type, ranks, mesh_dim_names=("dp", "tp"))
    if context.tp_size > 1:
        sharding.shard(problem, model, mesh["tp"])
    shard_over_replicas(model, mesh["dp"], context.device, problem.seed)
    sharded_logits = context.tp_size > 1 and problem.vocab_parallel
    vocab_start = context.tp_rank * -(-problem.vocab // context.tp_size)
    shard = (context.tp_group, vocab_start) if sharded_logits else ()
    loss = loss_of(problem, model, *shard, hidden_sharded=sharded_logits and sharding is by_modules)
    reduce_gradients = sharding.gradient_reduction(model, context.tp_group) if context.tp_size > 1 else None

    @contextlib.contextmanager
    def during_micro_batch(last: bool) -> Iterator[None]:
        if context.dp_size > 1:
            model.set_requires_gradient_sync(last)
        # torch's loss of sharded logits exchanges some numbers per row instead of logits.
        with loss_parallel() if sharded_logits and problem.train_loss == "torch" else contextlib.nullcontext():
            yield
        if last and reduce_gradients:
            reduce_gradients()

    return TorchTrainer(problem, model, context, loss, during_micro_batch)


def dtensor_tp(problem: TrainStep, context: Context) -> TorchTrainer:
    """Train as `fsdp_dtensor`, with torch's `parallelize_module` in place of tpbench's sharded modules."""
    return fsdp_dtensor(problem, context, by_dtensor)


def shard_over_replicas(model: Any, dp: DeviceMesh, device: torch.device, seed: int) -> None:
    """Make the weights of one part of the model at a time, and shard them over the replicas.

    A rank holds no decoder layer but one as a whole. With one replica FSDP is not applied: there is nothing to shard,
    and FSDP would cost host time.
    """
    if dp.size() == 1:
        make_parts(model, device, seed)
        return
    layers, embedding = list(decoder_layers(model)), model.get_input_embeddings()
    make_parts(model, device, seed, lambda part: fully_shard(part, mesh=dp) if part in layers else None)
    if model.lm_head.weight is not embedding.weight:
        fully_shard(embedding, mesh=dp)
        # The forward pass needs these last and the backward pass first, so they are not freed in between.
        fully_shard([model.get_submodule(model.parts.norm), model.lm_head], mesh=dp, reshard_after_forward=False)
    fully_shard(model, mesh=dp)


def ddp(problem: TrainStep, context: Context) -> TorchTrainer:
    """Train with torch's DistributedDataParallel. Gradients are averaged only in the last micro-batch of a step."""
    model = models.build(problem)
    models.materialise(model, context.device, problem.seed)
    loss = loss_of(problem, model)
    devices = [context.device.index] if context.device.type == "cuda" else None
    wrapped = DistributedDataParallel(
        model, device_ids=devices, process_group=context.dp_group, gradient_as_bucket_view=True
    )

    def during_micro_batch(last: bool) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else wrapped.no_sync()

    return TorchTrainer(problem, wrapped, context, loss, during_micro_batch)
