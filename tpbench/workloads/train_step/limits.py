"""Limits of what a stored row may show: tolerances of the errors. Without torch."""

from __future__ import annotations

from tpbench.workloads.train_step.problem import NORM_GROWTH, TrainStep

LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-3, "float16": 2e-3}
"""Relative tolerance of each compared step's loss, by dtype. Sums over shards round differently; after an update in
bf16, weights do too."""

NORM_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2, "float16": 2e-2}
"""Relative tolerance of the first step's gradient norm, by dtype. Each later step multiplies it by NORM_GROWTH."""


def error_limits(problem: TrainStep) -> dict[str, float]:
    """Return the largest error of a correct row, by column: of the first three steps."""
    return {"loss_error": LOSS_TOLERANCE[problem.dtype], "grad_error": NORM_TOLERANCE[problem.dtype] * NORM_GROWTH**2}
