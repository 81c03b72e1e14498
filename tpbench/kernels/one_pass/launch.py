"""Launch of a prepared call."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from tpbench.kernels.one_pass import workspace as memory
from tpbench.kernels.one_pass.parameters import Mailbox, Scales
from tpbench.kernels.one_pass.plan import Prepared

LOG2_E = math.log2(math.e)


def launch(
    prepared: Prepared, logits: Tensor, target: Tensor, grad: Tensor | None, row_loss: Tensor, total: Tensor | None,
    workspace: memory.Workspace, *, logits_scale: float, temperature: float, z_loss: float, grad_scale: float,
    loss_scale: float, inverse_count: Tensor | None = None,
) -> Any:  # fmt: skip
    """Queue the kernel on the current stream. It stores row_loss and, where they are not None, grad and total.

    inverse_count: (1,) fp32, 1 / the rows that count. It is needed if they are counted and `total` is None.
    Returns the compiled kernel.
    """
    workspace.reserve(prepared.words)
    total = inverse_count if total is None else total
    k = logits_scale * LOG2_E
    return prepared.kernel(
        prepared.programs,
        (
            logits, target, logits if grad is None else grad, row_loss, row_loss if total is None else total,
            workspace.words, workspace.peers, workspace.control, workspace.failed,
        ),
        prepared.integers,
        (k, k / temperature, z_loss, grad_scale * logits_scale, loss_scale),
        (prepared.rank, workspace.half // prepared.row_words, workspace.half, int(memory.WAIT_LIMIT_S * 1e9)),
        arrange=_parameters,
    )  # fmt: skip


def _parameters(pointers: Any, integers: Any, scales: Any, more_integers: Any) -> tuple[Any, ...]:
    """Arrange the arguments as the parameters of the kernels."""
    return (*pointers[:5], Mailbox(*pointers[5:]), *integers, Scales(*scales), *more_integers)
