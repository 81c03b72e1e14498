"""What a step of the block must cost, and how far a result may be from the right one. Without torch."""

from __future__ import annotations

from tpbench.workloads.sizes import ITEM_BYTES
from tpbench.workloads.tp_block.problem import TpBlock

TOLERANCE = {"bfloat16": 2.0**-4, "float32": 2.0**-14, "float64": 2.0**-38}
"""Largest accepted error of a row, ||row - expected|| / ||expected||.

In bf16 about a dozen tensors between input and output are rounded one after the other. Each rounding errs by up to
2^-9, and by more where terms cancel: a row errs by about 2^-7, the worst of many rows by 2^-6. A lost or doubled
partial sum, chunk or gather is an error of order 1. fp32 and fp64 err by about 2^-18 and 2^-46."""


def flops(problem: TpBlock, size: int) -> int:
    """Return the floating-point operations of a rank: two products in the backward pass for each in the forward pass.

    Causal attention counts half of its square. What its backward pass computes again does not count.
    """
    attention = 0
    if problem.part == "block":
        attention = 2 * 2 * problem.tokens**2 * problem.head_dim * problem.heads // size // 2
    return 3 * max(1, problem.layers) * (2 * problem.tokens * _linear_weights(problem, size) + attention)


def bytes_moved(problem: TpBlock, size: int) -> int:
    """Return the unavoidable bytes through the memory of one of `size` ranks.

    Input, weights and the output's gradient are read once. The output and the other gradients are written once. A
    training step reads and writes each weight and its two states of AdamW; gradients of weights need not be stored.
    """
    weights = _linear_weights(problem, size) + problem.hidden * len(problem.norms)
    first, last = problem.linears[0], problem.linears[-1]
    ends = problem.tokens * (first.in_features + sum(last.out_features)) // size
    item = ITEM_BYTES[problem.dtype]
    if problem.layers:
        return 2 * item * (3 * problem.layers * weights + ends)
    return 2 * item * (weights + ends)


def bytes_sent(problem: TpBlock, size: int, *, least: bool = False) -> int:
    """Return the bytes that one of `size` ranks sends.

    Each linear gathers or scatters a (tokens, hidden) matrix in the forward pass and one in the backward pass. A rank
    sends the fraction (size - 1) / size of it. Column-parallel linears without `save_gathered` gather their input
    again; `least` does not count these. All-reduces of the norms' gradients count twice their size.
    """
    columns = sum(linear.kind == "column" for linear in problem.linears)
    again = 0 if problem.save_gathered or least else columns
    matrices = (2 * len(problem.linears) + again) * problem.tokens
    per_block = (matrices + 2 * len(problem.norms)) * problem.hidden * ITEM_BYTES[problem.dtype] * (size - 1) // size
    return max(1, problem.layers) * per_block


def _linear_weights(problem: TpBlock, size: int) -> int:
    """The elements of a rank's part of all linear weights."""
    return sum(rows * columns for rows, columns in (linear.local_shape(size) for linear in problem.linears))
