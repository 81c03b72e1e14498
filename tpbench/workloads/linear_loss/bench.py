"""The linear loss on a rank: make the shard, run the variant, compare with the oracle, time the products beside it."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from tpbench.measure.clock import Stopwatch, do_nothing
from tpbench.measure.ranks import gather_number
from tpbench.measure.rates import compute_ms, gemm_tflops
from tpbench.measure.session import Context, Costs, Verdict
from tpbench.workloads import Variant
from tpbench.workloads.linear_loss.inputs import Output, Shard, make_shard
from tpbench.workloads.linear_loss.oracle import Oracle, bytes_moved
from tpbench.workloads.linear_loss.problem import WORKLOAD, LinearLoss
from tpbench.workloads.step import StepSession

MOST_ROWS = 8192
"""Rows of a product. More rows are worked on in chunks, so that the logits of any number of tokens fit."""


class LinearLossSession(StepSession[Output]):
    """A variant on this rank's shard."""

    def __init__(self, problem: LinearLoss, variant: Variant, context: Context, tflops: float | None = None) -> None:
        self.problem, self.context = problem, context
        self.shard = make_shard(problem, context)
        self.stopwatch = Stopwatch(context)
        self.tflops = tflops or gemm_tflops(self.shard.hidden.dtype, context.device, self.stopwatch)
        inputs = self.inputs_of(self.shard)
        super().__init__(variant, variant.prepare(problem, self.shard), Output, inputs)

    @property
    def costs(self) -> Costs:
        """Counted costs. The bytes that a variant sends may be known only after a step."""
        return costs(self.problem, self.context.tp_size, self.bytes_communicated, self.tflops)

    def check(self) -> Verdict:
        """Compare the output of the last step with the oracle, then free it."""
        verdict = Oracle(self.problem, self.shard).compare(self.take_output())
        verdict.columns.update({"gemm_tflops": self.tflops, **self.columns_of_variant(WORKLOAD)})
        return verdict

    def details(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return columns about the products alone, timed alternately with the step. Collective."""
        products = Products(self.problem, self.shard)
        step_ms = columns.get("device_ms") or columns["time_ms"]
        slowest_ms = max(gather_number(step_ms, self.context))
        iterations = _iterations(slowest_ms, self.context.device.type)
        step, alone = self.stopwatch.interleaved_ms(
            (self.step, self.restore), (products.run, do_nothing), iterations=iterations
        )
        own_step, own_alone = self.stopwatch.blocks_ms(
            (self.step, self.restore), (products.run, do_nothing), iterations=iterations
        )
        outputs = sum(products.bytes_of_outputs) / 2**30
        return {
            "products_ms": median(alone),
            "over_products": median(step) / median(alone),
            "over_products_alone": median(own_step) / median(own_alone),
            "tflops": self.costs.flops / step_ms / 1e9,
            "above_outputs_gib": max(gather_number(columns["peak_gib"] - outputs, self.context)),
        }


class Products:
    """The matrix products of a problem alone, the time that every implementation is compared with.

    They are those of logits, hidden states' gradient and weight's gradient, with their operands in
    place.
    """

    def __init__(self, problem: LinearLoss, shard: Shard) -> None:
        self.problem, self.shard = problem, shard
        self.rows = min(problem.tokens, MOST_ROWS)
        hidden = shard.hidden
        self.hidden = hidden.repeat(-(-self.rows // len(hidden)), 1)[: self.rows].contiguous()
        self.logits = torch.empty(self.rows, shard.columns, dtype=hidden.dtype, device=hidden.device)
        self.grad = self.logits
        if problem.trains:
            # Probabilities of this shard, like those in a step: the power of a product depends on its numbers.
            torch.mm(self.hidden, shard.weight.t(), out=self.logits)
            self.grad = torch.softmax(self.logits, dim=1)
        trained = (self.hidden, shard.weight) if problem.trains else ()
        self.outputs = tuple(torch.empty_like(factor) for factor in trained)

    @property
    def bytes_of_outputs(self) -> tuple[int, ...]:
        """Bytes of the gradients that a step of a variant allocates: hidden states, and weight without main_grad."""
        if not self.problem.trains:
            return ()
        weight = 0 if self.problem.main_grad else self.shard.weight.nbytes
        return (self.shard.hidden.nbytes, weight)

    def run(self) -> None:
        """Queue the products of all rows."""
        weight = self.shard.weight
        for first in range(0, self.problem.tokens, self.rows):
            rows = slice(0, min(self.rows, self.problem.tokens - first))
            torch.mm(self.hidden[rows], weight.t(), out=self.logits[rows])
            if self.shard.teacher is not None:
                torch.mm(self.hidden[rows], self.shard.teacher[1].t(), out=self.logits[rows])
            if self.problem.trains:
                hidden_grad, weight_grad = self.outputs
                torch.mm(self.grad[rows], weight, out=hidden_grad[rows])
                torch.mm(self.grad[rows].t(), self.hidden[rows], out=weight_grad)


def _iterations(step_ms: float, device: str) -> int:
    """Return how many iterations of a step take about 3 s, within limits. The products are timed as often."""
    fewest, most = {"cuda": (6, 40), "cpu": (1, 1)}[device]
    return max(fewest, min(most, int(3000 / step_ms)))


def costs(problem: LinearLoss, tp_size: int, bytes_communicated: int, tflops: float) -> Costs:
    """Return the costs of a rank with the most columns.

    For training, the floor is the time of the products, then one pass of the loss: each logit is read once and its
    gradient is written once. A product and that pass need each other's results. The sum of the hidden states' gradients
    over ranks does not count, because the product of the weight's gradient hides it. Without gradients, the floor is
    the time of the products, or that of reading their factors if it is longer.
    """
    columns = -(-problem.vocab // tp_size)
    flops = problem.products * 2 * problem.tokens * problem.hidden * columns
    return Costs(
        bytes_moved=bytes_moved(problem, tp_size),
        bytes_communicated=bytes_communicated,
        flops=flops,
        compute_ms=compute_ms(flops, tflops),
        consecutive=problem.trains,
    )


def setup(problem: LinearLoss, variant: Variant, context: Context, tflops: float | None = None) -> LinearLossSession:
    """Return the session of one cell on this rank.

    tflops: the rate of large products in TFLOP/s. None: it is measured, which is collective.
    """
    return LinearLossSession(problem, variant, context, tflops)
