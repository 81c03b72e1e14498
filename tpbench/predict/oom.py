"""Find the cells of a sweep that are predicted to run out of memory."""

from __future__ import annotations

from collections.abc import Mapping

from tpbench.predict.model import VariantModel
from tpbench.workloads.cost_model import ProblemSize


def predicted_oom(models: Mapping[str, VariantModel], label: str, size: ProblemSize, free_gib: float) -> str | None:
    """Return why a cell is predicted to run out of memory, or None if it fits, may fit, or cannot be predicted.

    Args:
        models: the result of `tpbench.predict.model.models`.
        label: the variant with its options, as reports name it.
        size: the problem.
        free_gib: memory that each rank may use. A cell runs out only if the whole error bar lies above it, or if a
            measured cell of the variant with the same need ran out.
    """
    model = models.get(label)
    if model is None or size.kind not in model.fits["peak_gib"].kinds:
        return None
    predicted = model(size)
    if predicted.memory_outcome(free_gib) != "OOM":
        return None
    if reason := predicted.memory_reason(free_gib):
        return f"expected to run out of memory: {reason}"
    return (
        f"predicted to run out of memory: {predicted.needed_gib:.3g} GiB (error {predicted.peak_gib.error:.1%}), "
        f"{free_gib:.3g} GiB free"
    )
