"""fast_linear: a language model's head and its cross-entropy, for a vocabulary that is sharded across ranks."""

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.api.linear_loss import IGNORED, LinearLoss, Output, Shard, Step, variant


def _trains_from_labels(problem: LinearLoss, tp_size: int) -> str | None:
    """Return why the variant cannot run a problem, or None. Such a cell is skipped with this reason."""
    if problem.loss != "cross_entropy":
        return f"it has no {problem.loss}"
    return None if problem.trains else "it always computes gradients"


@variant("all logits at once, in torch", workload="linear_loss", unsupported_reason=_trains_from_labels)
def fast_linear(problem: LinearLoss, shard: Shard) -> Step:
    """Prepare an iteration. This part is not timed: allocate buffers and compile here."""
    # shard.hidden: (tokens, hidden). shard.weight: (local vocab, hidden). shard.labels: (tokens,), of the whole vocab.
    assert shard.labels is not None
    counts = shard.labels != IGNORED
    number = counts.sum().clamp(min=1)
    label = shard.labels - shard.vocab_start
    held = (label >= 0) & (label < shard.columns)
    column = label.where(held, torch.zeros_like(label))[:, None]

    def over_ranks(values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if shard.group is not None:  # None: one rank holds the whole vocabulary
            dist.all_reduce(values, operation, group=shard.group)
        return values

    def run() -> Output:
        """Run one iteration. tpbench times it, and compares its result with a float64 oracle."""
        logits = (shard.hidden @ shard.weight.t()).float()
        largest = over_ranks(logits.max(1).values, dist.ReduceOp.MAX)
        exponentials = (logits - largest[:, None]).exp()
        total = over_ranks(exponentials.sum(1), dist.ReduceOp.SUM)
        of_label = over_ranks(logits.gather(1, column)[:, 0].where(held, torch.zeros_like(total)), dist.ReduceOp.SUM)
        row_loss = (total.log() + largest - of_label).where(counts, torch.zeros_like(total))
        grad = exponentials / total[:, None]
        grad.scatter_add_(1, column, -held.float()[:, None])
        grad *= (counts / number)[:, None]
        grad = grad.to(shard.hidden.dtype)
        return Output(
            loss=row_loss.sum() / number,
            row_loss=row_loss,
            grad_hidden=over_ranks(grad @ shard.weight, dist.ReduceOp.SUM),
            grad_weight=grad.t() @ shard.hidden,
        )

    # The bytes that this rank sends in an iteration are a column of the row.
    sent = 3 * 4 * problem.tokens + 2 * shard.hidden.nbytes * (shard.tp_size - 1) // shard.tp_size
    return Step(run, bytes_communicated=0 if shard.group is None else sent)
