"""fast_block: a transformer block whose linears run under your own schedule of products and collectives."""

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.api.tp_block import BlockContext, Pending, PlainSchedule, PreparedBlock, TpBlock, prepare, variant


class FastSchedule(PlainSchedule):
    """All-gather, product, reduce-scatter, one after the other. A faster schedule overlaps them.

    To overlap them, override `gather_matmul` and `matmul_scatter`, which have the products, too.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Prepare the schedule. This part is not timed: allocate buffers and streams here."""
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def gather(self, shard: Tensor) -> Pending:
        """All-gather (rows, columns) shards to (size * rows, columns)."""
        whole = shard.new_empty(self.size * shard.shape[0], shard.shape[1])
        dist.all_gather_into_tensor(whole, shard.contiguous(), group=self.group)
        return lambda: whole

    def scatter(self, partial: Tensor) -> Tensor:
        """Reduce-scatter a (rows, n) matrix: return this rank's (rows / size, n) of the sum over ranks."""
        own = torch.empty_like(partial[: partial.shape[0] // self.size])
        dist.reduce_scatter_tensor(own, partial.contiguous(), group=self.group)
        return own


def _several_ranks(problem: TpBlock, tp_size: int) -> str | None:
    """Return why the variant cannot run a problem, or None. Such a cell is skipped with this reason."""
    return None if tp_size > 1 else "with tp_size=1 there is no communication"


@variant("products and collectives in turn", workload="tp_block", unsupported_reason=_several_ranks)
def fast_block(problem: TpBlock, context: BlockContext) -> PreparedBlock:
    """Build this rank's part of the block. tpbench times forward and backward, and compares both with an oracle."""
    return prepare(context, FastSchedule(context.inputs.group))
