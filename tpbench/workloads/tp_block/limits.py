"""Limits of what a stored row may show: tolerances of the errors and unavoidable bytes. Without torch."""

from __future__ import annotations

from tpbench.workloads.item_bytes import ITEM_BYTES
from tpbench.workloads.tp_block.measurement import costs
from tpbench.workloads.tp_block.problem import TpBlock

TOLERANCE = {"bfloat16": 2.0**-4, "float32": 2.0**-14, "float64": 2.0**-38}
"""Largest accepted error of a row, ||row - expected|| / ||expected||.

In bf16 about a dozen tensors between input and output are rounded one after the other. Each rounding errs by up to
2^-9, and by more where terms cancel: a row errs by about 2^-7, the worst of many rows by 2^-6. A lost or doubled
partial sum, chunk or gather is an error of order 1. fp32 and fp64 err by about 2^-18 and 2^-46."""


def error_limits(problem: TpBlock) -> dict[str, float]:
    """Return the largest error of a correct row, by column. Training steps (layers=N) have no error of an output."""
    names = ("loss_error", "grad_error") if problem.layers else ("loss_error", "grad_error", "output_error")
    return dict.fromkeys(names, TOLERANCE[problem.dtype])


def bytes_moved(problem: TpBlock, tp_size: int) -> int:
    """Return the unavoidable bytes through a rank's memory."""
    return costs.bytes_moved(problem, tp_size, ITEM_BYTES[problem.dtype])
