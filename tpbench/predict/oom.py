"""For a sweep: the cells that are not worth starting, because they would run out of memory."""

from __future__ import annotations

from collections.abc import Mapping

from tpbench.predict.cells import Size
from tpbench.predict.memory import verdict
from tpbench.predict.model import VariantModel


def predicted_oom(models: Mapping[str, VariantModel], head: str, size: Size, free_gib: float) -> str | None:
    """Why a cell is predicted to run out of memory, or None: it fits, may fit, or nothing is known of it.

    `models`: of `tpbench.predict.model.models`. `head`: the variant with its options, as a report's column has it.
    `free_gib`: memory that each rank may use. Only what does not fit with the whole error bar counts.
    """
    model = models.get(head)
    if model is None or size.loss not in model.fits["peak_gib"].losses:
        return None
    needed = model(size).peak_gib
    if verdict(size, needed, free_gib) != "OOM":
        return None
    return (
        f"predicted to run out of memory: {size.inputs_gib + needed.value:.3g} GiB (error {needed.error:.1%}), "
        f"{free_gib:.3g} GiB free"
    )
