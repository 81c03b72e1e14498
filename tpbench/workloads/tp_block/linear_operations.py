"""The four operations of tensor-parallel linears, each a product or two and a collective or two, under a schedule.

p ranks; x, y and their gradients are matrices of rows by features, weights this rank's (out, in) part of W.
"""

from __future__ import annotations

from torch import Tensor

from tpbench.workloads.tp_block.schedule import Schedule


def column_forward(schedule: Schedule, shard: Tensor, weight: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """x's shard (rows / p, in) to the gathered x (rows, in), to `keep` or not, and y = x W^T (rows, out / p)."""
    return schedule.gather_matmul(shard, weight.t(), keep=keep)


def column_backward(
    schedule: Schedule, grad: Tensor, weight: Tensor, kept: Tensor, gathered: bool
) -> tuple[Tensor, Tensor]:
    """y's gradient (rows, out / p) to those of x's shard and of the weight. `kept`: x, gathered or this rank's shard.

    The weight's product lies between the scatter's begin and its end, and hides what is still under way.
    """
    whole = (lambda: kept) if gathered else schedule.gather(kept)
    finish = schedule.matmul_scatter(grad, weight)
    grad_weight = grad.t() @ whole()
    return finish(), grad_weight


def row_forward(schedule: Schedule, x: Tensor, weight: Tensor) -> Tensor:
    """x (rows, in / p) to this rank's shard (rows / p, out) of y = sum over ranks of x W^T."""
    return schedule.matmul_scatter(x, weight.t(), awaited=True)()


def row_backward(schedule: Schedule, grad_shard: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of y's shard (rows / p, out) to those of x and of the weight."""
    grad, grad_x = schedule.gather_matmul(grad_shard, weight, keep=False)
    return grad_x, grad.t() @ x
