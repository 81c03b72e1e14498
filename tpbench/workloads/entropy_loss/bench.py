"""The entropy loss on a rank: its shard, its unavoidable bytes, and the comparison with the float64 oracle."""

from typing import ClassVar

import torch
from torch import Tensor

from tpbench.measure.session import Context, Costs, Verdict
from tpbench.workloads.differences import Compared, Comparison, rounding
from tpbench.workloads.entropy_loss.inputs import Output, Shard, make_shard
from tpbench.workloads.entropy_loss.problem import WORKLOAD, EntropyLoss
from tpbench.workloads.losses import bytes_of_rows
from tpbench.workloads.losses.inputs import EDGE_LOGIT, edges
from tpbench.workloads.losses.oracle import Blocks, LossOracle, set_policy_rows
from tpbench.workloads.operation import TOLERANCES
from tpbench.workloads.sizes import ITEM_BYTES

LOSS_TOLERANCE = 2.0**-16
"""Tolerance of losses in fp32. Errors of fp32 sums of 10^5 terms and of logarithms are about 2^-20. A count that is off
by one in 4096 rows is an error of 2^-12."""

ARITHMETIC = 2.0**-20
"""The error of arithmetic in fp32 (exponentials, logarithms, long sums), relative to what is added."""

ELEMENT_ARITHMETIC = 2.0**-17
"""The largest error of an element by arithmetic in fp32, relative to the sum of its absolute terms. An exponential of a
difference d of logits has about |d| * 2^-23, and d is below 64 up to a scale of 4 (beyond it: `LossOracle.steep`)."""

LOGITS_DTYPE_TOLERANCE = {
    "bfloat16": (2.0**-5, 2.0**-4),
    "float16": (2.0**-8, 2.0**-6),
    "float32": (LOSS_TOLERANCE, TOLERANCES["float32"]),
}
"""Tolerances (loss, gradient) for compute_dtype=logits. torch then rounds log p itself to the dtype: near 12, for 2^17
columns, by up to 2^-5 in bf16, as is the relative error of p. Measured with torch 2.11 on a GPU, 2^15 and 2^17 columns:
loss 1.7e-2 (bf16) and 2.2e-3 (fp16), gradient 2.8e-2 (bf16)."""

LOGITS_DTYPE_ELEMENT = {"bfloat16": 2.0**-3, "float16": 2.0**-6, "float32": 2.0**-14}
LOGITS_DTYPE_LEAST = 2.0**-40
"""For compute_dtype=logits, the largest error of an element, relative to the sum of its absolute terms. A log p between
-16 and -32, rounded to bf16, is wrong by up to 2^-4, as are p and the log q of a target. Elements below the least part
of their row's largest terms may have any smaller error: their log p is below -32."""


class Oracle(LossOracle):
    """The correct result of one problem."""

    BLOCK: ClassVar = {"cpu": 2**17, "cuda": 2**21}
    """About ten float64 temporaries of a block exist at once: 160 MiB on a GPU. On a CPU they fit into the cache."""

    def logits(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        target = self.shard.target[rows].double() if self.problem.matrices == 2 else None
        return self.shard.logits[rows].double(), target

    def limits(self) -> dict[str, float]:
        dtype, steep = self.problem.dtype, self.steep
        loss, gradient = LOSS_TOLERANCE * steep, max(TOLERANCES[dtype], TOLERANCES["float32"] * steep)
        if self.problem.compute_dtype == "logits":
            loss, gradient = (tolerance * steep for tolerance in LOGITS_DTYPE_TOLERANCE[dtype])
        return {"loss_error": loss, "grad_error": gradient, "entropy_error": loss}

    def gradients(self, output: Output) -> dict[str, Compared]:
        logits = self.shard.logits
        return {"grad": Compared(output.grad, tuple(logits.shape), logits.dtype, "grad_error")}

    def compare_gradients(self, comparison: Comparison, output: Output, blocks: Blocks) -> None:
        """Record the errors of whole rows, of all ranks' columns, and judge each element.

        Errors below half the smallest number of the dtype don't count, nor do those of fp32 where the terms of a row
        cancel. The bound of an element is two roundings to the dtype, and the arithmetic of its terms: the label's
        element has almost the whole norm of a row, whose error would allow any error of the softmax. A sign of total
        variation that the arithmetic may change moves its element by p, and those of its row by p times that.
        """
        dtype = self.shard.logits.dtype
        kind = torch.finfo(dtype)
        slack = kind.smallest_normal * kind.eps / 2
        # With compute_dtype=logits, terms that cancel are rounded to the dtype before.
        arithmetic = max(ARITHMETIC, kind.eps if self.problem.compute_dtype == "logits" else 0.0) * self.steep
        for rows, right, (slopes, shares) in blocks:
            terms = slopes.add_(shares)
            if "grad" in comparison.got:
                got = output.grad[rows].double() * output.grad_factor
                allowed, errors = rounding(right, dtype).add_(self._arithmetic(terms)), terms * arithmetic
                if self.signs is not None:
                    p, gap = self.signs
                    undecided = p.where(gap.abs() < 2 * ELEMENT_ARITHMETIC * self.steep, 0.0)
                    moved = undecided.add_(p * self.sum(undecided.sum(-1))[:, None]) * (self.scale * self.inverse_count)
                    allowed, errors = allowed.add_(moved), errors.add_(moved, alpha=2.0)
                least = self.sum(errors.square().sum(-1)).sqrt() / comparison.limits["grad_error"]
                comparison.rows("grad", got, right, slack, rows.start, least=least, over_ranks=self.sum)
                comparison.bounds("grad", right, allowed, got=got, first_row=rows.start)

    def _arithmetic(self, terms: Tensor) -> Tensor:
        """Return how far the arithmetic of a correct variant may move elements before they are rounded."""
        largest = self.maximum(terms.amax(-1))[:, None]
        if self.problem.compute_dtype != "logits":
            # Against a top k, other columns may get the rounding errors of a sum over the k, times their p.
            bound = (terms + largest if self.problem.top_k else terms) * (ELEMENT_ARITHMETIC * self.steep)
            return bound.add_(64 * self.steep * torch.finfo(torch.float32).smallest_normal)  # a flushed probability
        kind = torch.finfo(self.shard.logits.dtype)
        subnormal = 16 * kind.smallest_normal * kind.eps * self.steep
        relative = LOGITS_DTYPE_ELEMENT[self.problem.dtype] * self.steep
        return (terms * relative).add_(largest * LOGITS_DTYPE_LEAST + subnormal)


@WORKLOAD.inputs
def inputs(problem: EntropyLoss, context: Context) -> Shard:
    """Return this rank's inputs. Collective, because those of a policy loss follow the log-probabilities."""
    shard = make_shard(problem, context)
    set_policy_rows(problem, shard, Oracle)
    return shard


@WORKLOAD.refresh
def refresh(problem: EntropyLoss, shard: Shard, rank: Context) -> None:
    """Give the first and last column of each shard a large logit in some rows, and a large target logit in others."""
    targets = [] if problem.matrices == 1 else [(shard.target, problem.target_scale)]
    for which, (logits, scale) in enumerate([(shard.logits, problem.scale), *targets]):
        for row, column in edges(shard, problem.tokens, which):
            logits[row, column] = EDGE_LOGIT / scale
    set_policy_rows(problem, shard, Oracle)


@WORKLOAD.costs
def costs(problem: EntropyLoss, rank: Context) -> Costs:
    """Return the bytes of a rank with the most columns: logits of rows that count are read, the gradient is written."""
    columns = -(-problem.vocab // rank.tp_size)
    rows = problem.tokens + problem.matrices * round(problem.tokens * (1.0 - problem.ignored))
    return Costs(rows * columns * ITEM_BYTES[problem.dtype] + bytes_of_rows(problem), bytes_communicated=0)


@WORKLOAD.check(Output)
def check(problem: EntropyLoss, shard: Shard, output: Output, rank: Context) -> Verdict:
    return Oracle(problem, shard).compare(output)
