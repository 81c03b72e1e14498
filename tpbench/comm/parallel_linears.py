"""Column- and row-parallel linears, forward and backward, under a schedule of their products and collectives.

Activations and their gradients are (rows, features) matrices, sharded along the rows between two linears, in the order
of the group's ranks. A weight is this rank's (out, in) part of W. p is the number of ranks. All linears, of any
workload, can run under a new child of `Schedule`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tpbench.comm.collectives import exchanged, gather_rows, scatter_rows, windows_of

Pending: TypeAlias = Callable[[], Tensor]
"""A result that may not be complete yet. Call it once: it returns the result, ready for the current stream."""


class Schedule(ABC):
    """The all-gather and reduce-scatter of tensor parallelism with their products, over `size` ranks.

    All methods are collective. Shards are equal runs of rows, in the order of the group's ranks. All tensors are
    contiguous matrices of one dtype, except `matrix`, which may be a transposed view. Products run in one piece before
    or after their collective. Children define the two collectives, or override the products with their collectives.
    """

    rank: int
    """The rank in the group, not in the world."""
    size: int
    group: dist.ProcessGroup | None = None
    """The group, or None if the schedule does not communicate."""

    @abstractmethod
    def gather(self, shard: Tensor) -> Pending:
        """All-gather (rows, columns) shards to (size * rows, columns). Valid until the next gather of any kind."""

    def scatter(self, partial: Tensor) -> Tensor:
        """Reduce-scatter a (rows, n) matrix: return this rank's (rows / size, n) of the sum over ranks."""
        raise NotImplementedError

    def gather_matmul(self, shard: Tensor, matrix: Tensor, *, keep: bool = True) -> tuple[Pending, Tensor]:
        """All-gather shards and multiply them by this rank's matrix (columns, n). Return both results.

        Call for the gathered tensor at once or never: it may take a copy. `keep`: it stays valid. Otherwise it is valid
        until the next gather of any kind.
        """
        whole = self.gather(shard)()
        return lambda: whole, whole @ matrix

    def matmul_scatter(self, whole: Tensor, matrix: Tensor, *, awaited: bool = False) -> Pending:
        """Multiply whole (rows, k) by matrix (k, n), and reduce-scatter the sum over ranks to (rows / size, n).

        `awaited`: the caller waits for the result at once and has no other work to overlap.
        """
        summed = self.scatter(whole @ matrix)
        return lambda: summed

    def junction(
        self, x: Tensor, row: Tensor, residual: Tensor, norm: Tensor, eps: float, column: Tensor, *, keep: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return s = residual + row_parallel(x) and column_parallel(RMSNorm(s)), with weights `row` and `column`.

        Differentiable; the gradient of the RMSNorm's weight is that by this rank's rows. `keep`: `save_gathered`.
        """
        summed, normed = self.between(row_parallel(x, row, self), residual, norm, eps)
        return summed, column_parallel(normed, column, self, save_gathered=keep)

    def between(self, part: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return s = residual + part, and RMSNorm(s) with the weight: a junction between its linears."""
        summed = residual + part
        return summed, functional.rms_norm(summed, weight.shape, weight, eps)


class LocalSchedule(Schedule):
    """One process with the whole of every tensor: no communication."""

    rank, size = 0, 1

    def gather(self, shard: Tensor) -> Pending:
        return lambda: shard

    def scatter(self, partial: Tensor) -> Tensor:
        return partial


class SequentialSchedule(Schedule):
    """All-gather, product, reduce-scatter, one after the other. It can be compiled."""

    group: dist.ProcessGroup

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.memory: Any = windows_of.get(group)

    def gather(self, shard: Tensor) -> Pending:
        whole = gather_rows(shard, self.group)
        return lambda: whole

    def scatter(self, partial: Tensor) -> Tensor:
        return scatter_rows(partial, self.group)


def column_parallel(shard: Tensor, weight: Tensor, schedule: Schedule, *, save_gathered: bool = True) -> Tensor:
    """Return y = all_gather(x) W^T, (rows, out / p), of this rank's shard of x, (rows / p, in). Differentiable.

    `save_gathered`: keep the gathered x for the backward pass. Otherwise gather x again.
    """
    return _ColumnParallel.apply(shard, weight, schedule, save_gathered)


def row_parallel(x: Tensor, weight: Tensor, schedule: Schedule) -> Tensor:
    """Return a shard of y = reduce_scatter(x W^T), (rows / p, out), of x (rows, in / p). Differentiable."""
    return _RowParallel.apply(x, weight, schedule)


def with_summed_gradient(weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a tensor that is whole on every rank, for use on this rank's part: its gradient is summed over ranks."""
    return exchanged(weight, group, lambda whole, _: whole.view_as(whole), sum_over_ranks)


def sum_over_ranks(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the ranks' tensors."""
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def column_backward(
    schedule: Schedule, grad: Tensor, weight: Tensor, kept: Tensor, gathered: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x's shard (rows / p, in) and of the weight, given y's gradient (rows, out / p).

    `kept`: the x of the forward pass, gathered or only this rank's shard. The weight's product hides what is left of
    the reduce-scatter, between its start and its end.
    """
    whole = (lambda: kept) if gathered else schedule.gather(kept)
    finish = schedule.matmul_scatter(grad, weight)
    grad_weight = grad.t() @ whole()
    return finish(), grad_weight


def row_backward(schedule: Schedule, grad_shard: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (rows, in / p) and of the weight, given that of y's shard (rows / p, out)."""
    grad, grad_x = schedule.gather_matmul(grad_shard, weight, keep=False)
    return grad_x, grad().t() @ x


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, weight: Tensor, schedule: Schedule, save_gathered: bool) -> Tensor:
        gathered, product = schedule.gather_matmul(shard.contiguous(), weight.t(), keep=save_gathered)
        ctx.save_for_backward(gathered() if save_gathered else shard, weight)
        ctx.schedule, ctx.gathered = schedule, save_gathered
        return product

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kept, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        return *column_backward(ctx.schedule, grad, weight, kept.contiguous(), ctx.gathered), None, None


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, schedule: Schedule) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.schedule = schedule
        return schedule.matmul_scatter(x.contiguous(), weight.t(), awaited=True)()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return *row_backward(ctx.schedule, grads[0].contiguous(), x, weight), None
