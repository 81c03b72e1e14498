"""Single forward and backward operations of a linear on random numbers, to time them alone under any schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from tpbench.comm import parallel_linears
from tpbench.comm.parallel_linears import Schedule
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.layers.sharded_linear import ShardedLinear

Operation: TypeAlias = Callable[[Schedule], None]
"""Runs one operation of a linear under a schedule."""


def forward(inputs: BlockInputs, linear: ShardedLinear) -> Operation:
    """Return a linear's forward operation."""
    weight, x, keep = inputs.weights[linear.name], _activations(inputs, linear), inputs.problem.save_gathered

    def run(schedule: Schedule) -> None:
        if linear.kind == "row":
            parallel_linears.row_forward(schedule, x, weight)
        else:
            parallel_linears.column_forward(schedule, x, weight, keep)

    return run


def backward(inputs: BlockInputs, linear: ShardedLinear) -> Operation:
    """Return a linear's backward operation."""
    weight, x = inputs.weights[linear.name], _activations(inputs, linear)
    saved, rows = inputs.problem.save_gathered, inputs.problem.tokens
    by_row = linear.kind == "row"
    grad = _random(inputs, *((rows // inputs.size, linear.out_features[0]) if by_row else (rows, weight.shape[0])))
    kept = x.repeat(inputs.size, 1) if saved and not by_row else x

    def run(schedule: Schedule) -> None:
        if by_row:
            parallel_linears.row_backward(schedule, grad, x, weight)
        else:
            parallel_linears.column_backward(schedule, grad, weight, kept, saved)

    return run


def _activations(inputs: BlockInputs, linear: ShardedLinear) -> Tensor:
    """Random numbers in the size and dtype of a linear's input."""
    rows = inputs.problem.tokens // (inputs.size if linear.kind == "column" else 1)
    return _random(inputs, rows, linear.local_shape(inputs.size)[1])


def _random(inputs: BlockInputs, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device=inputs.device).to(inputs.dtype)
