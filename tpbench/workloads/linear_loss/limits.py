"""Limits of what a stored row may show: tolerances of the errors and unavoidable bytes. Without torch."""

from __future__ import annotations

from tpbench.workloads.item_bytes import ITEM_BYTES
from tpbench.workloads.linear_loss.problem import LinearLoss

LOSS_TOLERANCE = {"bfloat16": 2.0**-5, "float16": 2.0**-8, "float32": 2.0**-14}
"""Tolerance of a row's loss, relative to the larger of it and 1. A logit of 8 in bf16 has a rounding error of 2^-6."""

ENTROPY_TOLERANCE = {"bfloat16": 2.0**-3, "float16": 2.0**-6, "float32": 2.0**-12}
"""Tolerance of a row's entropy, likewise. A logit's error counts p * |log p + entropy| times, which may exceed 1.
Measured in bf16 on a GPU, with 2^17 columns and logits rounded once: 0.043."""

GRADIENT_TOLERANCE = {"bfloat16": 2.0**-4, "float16": 2.0**-7, "float32": 2.0**-12}
"""Tolerance of the gradients of a row of hidden states and of the weight, by norm. A probability's relative error is
the absolute error of its logit. The logits' gradient, partial sums over ranks and the result are rounded too."""


def gradient_factor(problem: LinearLoss) -> int:
    """Return the factor on the gradients' tolerance: 2 if a logit's error counts more than once.

    A teacher's logits are rounded too, and errors count |log p - log q| times. Measured for reverse_kl in bf16, with
    2^17 columns and several signs of the inputs: 0.051 to 0.070. With 2^12 columns rounded logits alone, all else
    exact, give 0.038 to 0.047. In the gradient of an entropy, errors count |log p + entropy| times.
    """
    entropy_has_gradient = problem.loss == "logprob" and problem.entropy
    return 2 if entropy_has_gradient or not problem.from_labels else 1


def error_limits(problem: LinearLoss) -> dict[str, float]:
    """Return the largest error of a correct row, by column."""
    limits = {"loss_error": LOSS_TOLERANCE[problem.dtype]}
    if problem.entropy:
        limits["entropy_error"] = ENTROPY_TOLERANCE[problem.dtype]
    if problem.trains:
        gradient = GRADIENT_TOLERANCE[problem.dtype] * gradient_factor(problem)
        limits |= dict.fromkeys(("grad_error", "hidden_grad_error", "weight_grad_error"), gradient)
    return limits


def bytes_moved(problem: LinearLoss, tp_size: int) -> int:
    """Return the bytes of a rank with the most columns.

    In mode=train each logit is read once and its gradient is written once. A gradient needs the maximum and the sum of
    its whole row, so the logits have to be stored before. A teacher's logits are read once. In mode=forward no logit
    needs to be stored. Only the hidden states and the weight are read, and those of the teacher.
    """
    columns = -(-problem.vocab // tp_size)
    models = 1 if problem.from_labels else 2
    if problem.trains:
        return (1 + models) * problem.tokens * columns * ITEM_BYTES[problem.dtype]
    return models * (problem.tokens + columns) * problem.hidden * ITEM_BYTES[problem.dtype]
