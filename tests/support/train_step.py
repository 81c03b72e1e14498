"""Tiny models, and what a variant and one process alone make of them, for the tests of this workload."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support.ranks import Rank
from tpbench.measure.session import Context
from tpbench.workloads.train_step import WORKLOAD, TrainStep
from tpbench.workloads.train_step.batches import Batch, micro_batch
from tpbench.workloads.train_step.trainer import Place, Trainer

TINY = {
    "model": "tiny", "architecture": "qwen3", "hidden_size": 32, "ffn_size": 64, "layers": 2, "heads": 4,
    "kv_heads": 2, "head_dim": 8, "vocab": 96, "batch_size": 2, "seq_length": 16, "dtype": "float32",
    "learning_rate": 1e-2, "max_grad_norm": 0.5,
}  # fmt: skip

_pristine: dict[str, Any] = {}
_contexts: dict[tuple[int, int], Context] = {}


def problem(**fields: Any) -> TrainStep:
    """A small model of the Qwen3 kind."""
    return TrainStep(**{**TINY, **fields})


def context(here: Rank, tp_size: int) -> Context:
    """This rank in the row-major (dp, tp) mesh, as the worker makes it."""
    dp_size = here.world_size // tp_size
    if (here.world_size, tp_size) not in _contexts:
        dp_rank, tp_rank = divmod(here.rank, tp_size)
        replicas = [[dp * tp_size + tp for tp in range(tp_size)] for dp in range(dp_size)]
        tp_groups = [dist.new_group(ranks) for ranks in replicas]
        dp_groups = [dist.new_group(list(ranks)) for ranks in zip(*replicas, strict=True)]
        _contexts[here.world_size, tp_size] = Context(
            here.rank, here.world_size, tp_rank, tp_size, dp_rank, dp_size, tp_groups[dp_rank], dp_groups[tp_rank],
            here.device,
        )  # fmt: skip
    return _contexts[here.world_size, tp_size]


@dataclass
class Trace:
    """What training left behind, the whole model's, on this rank."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    """Of the last step, before clipping, by the plain model's names."""
    weights: dict[str, Tensor]
    """After the last step."""


def train(trainer: Trainer, cell: TrainStep, here: Context, steps: int, batches: Any = None) -> Trace:
    """Some steps; the loss is the mean over replicas."""
    trace = Trace([], [], {}, {})
    for step in range(steps):
        mine = batches(step) if batches else replica(cell, here, step)
        loss = trainer.accumulate(mine)
        if here.dp_size > 1:
            dist.all_reduce(loss, group=here.dp_group)
        trace.losses.append(float(loss) / here.dp_size)
        if step == steps - 1:
            trace.gradients = {name: whole(gradient(each), name, cell, here) for name, each in named(trainer.model)}
        trace.norms.append(float(trainer.update()))
    trace.weights = {name: whole(each.detach(), name, cell, here) for name, each in named(trainer.model)}
    return trace


def replica(cell: TrainStep, here: Context, step: int) -> list[Batch]:
    return [micro_batch(cell, step, micro, here.dp_rank, here.dp_size, here.device) for micro in range(cell.accumulate)]


def alone(cell: TrainStep, here: Context, steps: int) -> Trace:
    """One process, everybody's micro-batches."""
    from tpbench.workloads.train_step.replicas import alone as prepare

    single = replace(cell, train_loss="torch")
    one = Context(0, 1, 0, 1, 0, 1, None, None, here.device)  # type: ignore[arg-type]

    def everybody(step: int) -> list[Batch]:
        return [
            micro_batch(cell, step, micro, dp_rank, here.dp_size, here.device)
            for micro in range(cell.accumulate)
            for dp_rank in range(here.dp_size)
        ]

    return train(prepare(single, Place(one)), single, one, steps, everybody)


def prepared(name: str, cell: TrainStep, here: Context) -> Trainer:
    if name == "autotp":
        forget_groups(here)
    trainer: Trainer = WORKLOAD.variants[name].prepare(cell, Place(here))
    return trainer


def forget_groups(here: Context | Rank) -> None:
    """DeepSpeed takes a process to have one mesh for good; the processes of these tests have several."""
    os.environ["LOCAL_RANK"] = str(here.rank)
    from deepspeed.utils import groups

    if not _pristine:
        _pristine.update({name: value for name, value in vars(groups).items() if name.isupper() or name == "mpu"})
    vars(groups).update(copy.deepcopy(_pristine))


def named(model: Any) -> list[tuple[str, Tensor]]:
    return [(name.removeprefix("module."), each) for name, each in model.named_parameters()]


def gradient(parameter: Tensor) -> Tensor:
    """Where the variant keeps it: ZeRO in a partition of its own."""
    if hasattr(parameter, "_hp_mapping") or getattr(parameter, "_z3_optimizer", None) is not None:
        from deepspeed.utils import safe_get_full_grad

        found: Tensor = safe_get_full_grad(parameter)
        return found
    assert parameter.grad is not None
    return parameter.grad


def shapes(cell: TrainStep) -> dict[str, torch.Size]:
    from tpbench.workloads.train_step.models import build

    return {name: each.shape for name, each in build(cell).named_parameters()}


def whole(value: Tensor, name: str, cell: TrainStep, here: Context) -> Tensor:
    """All shards of it, in fp32 on the CPU: a shard that another rank pickled would come back to that rank's GPU."""
    if isinstance(value, DTensor):
        return value.full_tensor().float().cpu().clone()
    value, right = value.detach().float().cpu().clone(), shapes(cell)[name]
    for dimension, (mine, all_) in enumerate(zip(value.shape, right, strict=True)):
        if mine != all_:
            parts: list[Any] = [None] * here.tp_size  # of sizes that may differ
            dist.all_gather_object(parts, value, group=here.tp_group)
            value = torch.cat(parts, dimension)
    assert value.shape == right, (name, value.shape, right)
    return value


def worst(got: dict[str, Tensor], right: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error of a tensor, and whose it is."""
    assert set(got) == set(right), set(got) ^ set(right)
    return max((float((got[name] - each).norm() / each.norm().clamp(min=1e-6)), name) for name, each in right.items())


def compare(here: Rank, name: str, tp_size: int, fields: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """How far a variant is from one process alone, over some steps."""
    cell, place = problem(**fields), context(here, tp_size)
    right, got = alone(cell, place, steps), train(prepared(name, cell, place), cell, place, steps)
    return {
        "loss": max(abs(a / b - 1) for a, b in zip(got.losses, right.losses, strict=True)),
        "norm": max(abs(a / b - 1) for a, b in zip(got.norms, right.norms, strict=True)),
        "gradient": worst(got.gradients, right.gradients),
        "weight": worst(got.weights, right.weights),
        "losses": right.losses,
        "norms": right.norms,
    }
