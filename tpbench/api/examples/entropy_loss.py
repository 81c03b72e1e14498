"""fast_tp: cross-entropy over a vocabulary that is sharded across ranks. Start here and make it faster."""

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.api import IGNORED, EntropyLoss, Output, Shard, Step, variant


def _only_cross_entropy(problem: EntropyLoss, tp_size: int) -> str | None:
    """Return why the variant cannot run a problem, or None. Such a cell is skipped with this reason."""
    return None if problem.loss == "cross_entropy" else f"it has no {problem.loss}"


# All arguments are optional.
@variant("three all-reduces in plain torch", unsupported_reason=_only_cross_entropy)
def fast_tp(problem: EntropyLoss, shard: Shard) -> Step:
    """Prepare an iteration. This part is not timed: allocate buffers and compile here, but do not read the logits."""
    # shard.logits: (tokens, local vocab). shard.target: labels (tokens,), of the whole vocabulary.
    counts = shard.target != IGNORED
    number = counts.sum().clamp(min=1)
    label = shard.target - shard.vocab_start
    held = (label >= 0) & (label < shard.logits.shape[1])
    column = label.where(held, torch.zeros_like(label))[:, None]

    def over_ranks(values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if shard.group is not None:  # None: one rank holds the whole vocabulary
            dist.all_reduce(values, operation, group=shard.group)
        return values

    def run() -> Output:
        """Run one iteration. tpbench times it, and compares its result with a float64 oracle."""
        logits = shard.logits.float() * problem.logits_scale
        largest = over_ranks(logits.max(1).values, dist.ReduceOp.MAX)
        exponentials = (logits - largest[:, None]).exp()
        total = over_ranks(exponentials.sum(1), dist.ReduceOp.SUM)
        of_label = over_ranks(logits.gather(1, column)[:, 0].where(held, torch.zeros_like(total)), dist.ReduceOp.SUM)
        row_loss = (total.log() + largest - of_label).where(counts, torch.zeros_like(total))
        grad = exponentials / total[:, None]
        grad.scatter_add_(1, column, -held.float()[:, None])
        grad *= (counts * problem.logits_scale / number)[:, None]
        return Output(loss=row_loss.sum() / number, row_loss=row_loss, grad=grad.to(shard.logits.dtype))

    # The bytes that this rank sends in an iteration are a column of the row.
    return Step(run, bytes_communicated=0 if shard.group is None else 3 * 4 * shard.tokens)
