"""Limits of what a stored row may show: tolerances of the errors and unavoidable bytes. Without torch."""

from __future__ import annotations

from tpbench.workloads.entropy_loss.problem import EntropyLoss
from tpbench.workloads.item_bytes import ITEM_BYTES

LOSS_TOLERANCE = 2.0**-16
"""Tolerance of losses that are computed in fp32 from logits of any dtype. Errors of fp32 sums of 10^5 terms and of fp32
logarithms are about 2^-20. A count that is off by one in 4096 rows is an error of 2^-12."""

GRADIENT_TOLERANCE = {"bfloat16": 2.0**-6, "float16": 2.0**-9, "float32": 2.0**-15}
"""Tolerance of a row's gradient, by norm. Rounding an exact gradient to bf16 or fp16 has an error of at most 2^-8 or
2^-11, half a unit in the last place. Four times that allows one more rounding (for example of an upstream scale) and
the arithmetic before it. In fp32 that arithmetic, exponentials and long sums, has an error of about 2^-20."""

LOGITS_DTYPE_TOLERANCE = {
    "bfloat16": (2.0**-5, 2.0**-4),
    "float16": (2.0**-8, 2.0**-6),
    "float32": (LOSS_TOLERANCE, GRADIENT_TOLERANCE["float32"]),
}
"""Tolerances (loss, gradient) for compute_dtype=logits. torch then rounds log p itself to the dtype. For 2^17 columns
log p is near 12, so its absolute error in bf16 is up to 2^-5. The relative error of p = exp(log p) is as large, and
that of a difference of two such numbers is larger. Measured with torch 2.11 on a GPU, 2^15 and 2^17 columns: loss
1.7e-2 (bf16) and 2.2e-3 (fp16), gradient 2.8e-2 (bf16). In fp16 at such sizes, gradients of the two-logit losses are
about 1e-9, smaller than the rounding of subnormal numbers (error 0.07 to 0.34). A user would need a loss scale, and the
oracle reports them as wrong."""


def tolerances(problem: EntropyLoss) -> tuple[float, float]:
    """Return the tolerances of loss and gradient."""
    if problem.compute_dtype == "logits":
        return LOGITS_DTYPE_TOLERANCE[problem.dtype]
    return LOSS_TOLERANCE, GRADIENT_TOLERANCE[problem.dtype]


def error_limits(problem: EntropyLoss) -> dict[str, float]:
    """Return the largest error of a correct row, by column."""
    loss, gradient = tolerances(problem)
    return {"loss_error": loss, "grad_error": gradient}


def bytes_moved(problem: EntropyLoss, tp_size: int) -> int:
    """Return the bytes of a rank with the most columns: each input is read once, the gradient is written once."""
    columns = -(-problem.vocab // tp_size)
    matrix = problem.tokens * columns * ITEM_BYTES[problem.dtype]
    return 2 * matrix + 8 * problem.tokens if problem.from_labels else 3 * matrix
