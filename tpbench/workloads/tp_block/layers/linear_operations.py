"""Forward and backward of column- and row-parallel linears under a schedule: products with their collectives.

Activations and their gradients are (rows, features) matrices; a weight is this rank's (out, in) part of W. p is the
number of ranks.
"""

from __future__ import annotations

from torch import Tensor

from tpbench.workloads.tp_block.schedules.base import Schedule


def column_forward(schedule: Schedule, shard: Tensor, weight: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """Gather x and multiply it by a column-parallel weight.

    `shard`: this rank's (rows / p, in) of x. Returns the gathered x (rows, in) and y = x W^T (rows, out / p). The
    gathered x stays valid only if `keep` is set.
    """
    return schedule.gather_matmul(shard, weight.t(), keep=keep)


def column_backward(
    schedule: Schedule, grad: Tensor, weight: Tensor, kept: Tensor, gathered: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x's shard (rows / p, in) and of the weight, given y's gradient (rows, out / p).

    `kept`: the x of the forward pass, gathered or only this rank's shard. The weight's product runs between the start
    and the end of the reduce-scatter, and so hides the rest of its communication.
    """
    whole = (lambda: kept) if gathered else schedule.gather(kept)
    finish = schedule.matmul_scatter(grad, weight)
    grad_weight = grad.t() @ whole()
    return finish(), grad_weight


def row_forward(schedule: Schedule, x: Tensor, weight: Tensor) -> Tensor:
    """Return this rank's (rows / p, out) of y, the sum over ranks of x W^T, given x (rows, in / p)."""
    return schedule.matmul_scatter(x, weight.t(), awaited=True)()


def row_backward(schedule: Schedule, grad_shard: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (rows, in / p) and of the weight, given that of y's shard (rows / p, out)."""
    grad, grad_x = schedule.gather_matmul(grad_shard, weight, keep=False)
    return grad_x, grad.t() @ x
