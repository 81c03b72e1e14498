"""verl: log-probabilities and entropies of labels without logits (`use_fused_kernels` with the backend "triton").

with tpbench.integrations.verl.patched():
    trainer.fit()
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from tpbench.integrations.patches import Patch, check_version, columns_of_rank, linear_loss_of

VERSIONS = ("0.9.1", "0.9.1")


def patched() -> Patch:
    """Replace `linear_cross_entropy` until the patch is undone, in verl's modules that are imported by then.

    A worker of Ray is a process of its own. It imports the module that `external_lib` of verl's configuration names:
    let that module call this function.
    """
    check_version("verl", *VERSIONS)
    from verl.utils.kernel import linear_cross_entropy as module

    theirs, patch = module.linear_cross_entropy, Patch()
    for name, each in list(sys.modules.items()):
        if name.startswith("verl.") and vars(each).get("linear_cross_entropy") == theirs:
            patch.replace(each, "linear_cross_entropy", linear_cross_entropy)
    return patch


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float | Tensor = 1.0, reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return log-probabilities and entropies, (rows,) fp32 each, with verl's arguments. A label of -100 has zeros.

    With a group the gradient of the hidden states must be summed over its ranks, as that of verl's function. The
    temperature may be a tensor with a number for each row.
    """
    if reduction != "none":
        raise ValueError(f"reduction must be 'none', got {reduction!r}")
    columns, rows = {}, hidden.flatten(0, -2)
    size = 1 if dist_process_group is None else dist_process_group.size()
    if size > 1:
        columns = columns_of_rank(dist_process_group, size * len(weight))
        if rows.requires_grad:
            rows = rows.view_as(rows)
            rows.register_hook(lambda gradient: gradient / size)  # the kernels have summed it already
    temperature = temperature.flatten() if isinstance(temperature, Tensor) else temperature
    loss_of = linear_loss_of(loss="logprob", **columns)
    return loss_of(rows, weight, labels.flatten(), temperature=temperature)
