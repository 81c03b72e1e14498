"""Limits of what a stored row may show: tolerances of the errors. Without torch."""

from __future__ import annotations

from tpbench.workloads.embedding_grad.problem import EmbeddingGrad

TOLERANCE = {"bfloat16": 2.0**-6, "float16": 2.0**-9, "float32": 2.0**-20}
"""Largest allowed error of a row of the mean, by norm, relative to that row.

A sum over W ranks that is rounded after each addition errs by about sqrt(W) times half a unit in the last place (2^-9,
2^-12, 2^-25). The tolerances allow 8, 8 and 32 times that half unit.
"""


def error_limits(problem: EmbeddingGrad) -> dict[str, float]:
    """Return the largest error of a correct row, by column."""
    return {"grad_error": TOLERANCE[problem.dtype]}
