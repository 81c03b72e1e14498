"""linear_tp and linear_unfused: the kernels of this project."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist

from tpbench.kernels import LinearHow, entropy_loss, linear_entropy_loss
from tpbench.workloads.linear_loss.inputs import IGNORED, Shard
from tpbench.workloads.linear_loss.output import Output, Step
from tpbench.workloads.linear_loss.problem import LinearLoss
from tpbench.workloads.ring_bytes import bytes_of_all_reduce


def _options(problem: LinearLoss, shard: Shard) -> dict[str, Any]:
    return {
        "loss": problem.loss,
        "group": shard.group,
        "vocab_start": shard.vocab_start,
        "vocab_size": shard.vocab_size,
        "ignore_index": IGNORED,
        "temperature": problem.temperature,
        "entropy": problem.entropy,
        "exchange": problem.exchange,
    }


def prepare(problem: LinearLoss, shard: Shard) -> Step:
    """Prepare a call of `tpbench.kernels.linear_entropy_loss`."""
    last: LinearHow | None = None
    target: Any = shard.labels if shard.teacher is None else shard.teacher
    main_grad = torch.zeros_like(shard.weight, dtype=torch.float32) if problem.main_grad else None
    workspace: Any = "auto" if problem.logits_gib is None else problem.logits_gib

    def run() -> Output:
        nonlocal last
        result = linear_entropy_loss(
            shard.hidden, shard.weight, target, grad=problem.trains, weight_grad=main_grad,
            hidden_sharded=problem.sequence_parallel, workspace_gib=workspace, **_options(problem, shard),
        )  # fmt: skip
        last = result.how
        return Output(result.loss, result.row_loss, result.entropy, result.grad_hidden, result.grad_weight)

    def columns() -> dict[str, Any]:
        return {} if last is None else {"chunks": last.chunks, "chunk_rows": last.chunk_rows}

    def clear() -> None:
        assert main_grad is not None
        main_grad.zero_()

    restore = None if main_grad is None else clear
    return Step(run, lambda: 0 if last is None else last.bytes_sent, columns, restore)


def prepare_unfused(problem: LinearLoss, shard: Shard) -> Step:
    """Prepare the products of all rows around a call of `tpbench.kernels.entropy_loss`."""
    sent = 0

    def run() -> Output:
        nonlocal sent
        logits = shard.hidden @ shard.weight.t()
        target: Any = shard.labels if shard.teacher is None else shard.teacher[0] @ shard.teacher[1].t()
        grad: Literal["in_place", "none"] = "in_place" if problem.trains else "none"
        result = entropy_loss(logits, target, grad=grad, **_options(problem, shard))
        sent = result.how.bytes_sent
        if not problem.trains:
            return Output(result.loss, result.row_loss, result.entropy)
        grad_hidden = logits @ shard.weight
        if shard.group is not None:
            dist.all_reduce(grad_hidden, group=shard.group)
            sent += bytes_of_all_reduce(grad_hidden.nbytes, shard.tp_size)
        return Output(result.loss, result.row_loss, result.entropy, grad_hidden, logits.t() @ shard.hidden)

    return Step(run, lambda: sent)
