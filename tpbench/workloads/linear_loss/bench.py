"""The linear loss on a rank: its shard, its counted costs, the comparison with the oracle, the products alone."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from tpbench.measure.clock import do_nothing
from tpbench.measure.ranks import gather_number
from tpbench.measure.session import Context, Costs, Verdict
from tpbench.workloads.linear_loss.inputs import Output, Shard, make_shard
from tpbench.workloads.linear_loss.oracle import Oracle, bytes_moved
from tpbench.workloads.linear_loss.problem import WORKLOAD, LinearLoss

MOST_ROWS = 8192
"""Rows of a product. More rows are worked on in chunks, so that the logits of any number of tokens fit."""

WORKLOAD.inputs(make_shard)


@WORKLOAD.costs
def costs(problem: LinearLoss, rank: Context) -> Costs:
    """Return the unavoidable costs of a rank with the most columns.

    For training, the floor is the time of the products, then one pass of the loss: each logit is read once and its
    gradient is written once. A product and that pass need each other's results. The sum of the hidden states' gradients
    over ranks does not count, because the product of the weight's gradient hides it. Without gradients, the floor is
    the time of the products, or that of reading their factors if it is longer.
    """
    columns = -(-problem.vocab // rank.tp_size)
    flops = problem.products * 2 * problem.tokens * problem.hidden * columns
    return Costs(bytes_moved(problem, rank.tp_size), 0, flops, consecutive=problem.trains)


@WORKLOAD.check(Output)
def check(problem: LinearLoss, shard: Shard, output: Output, rank: Context) -> Verdict:
    """Compare an output with the oracle."""
    return Oracle(problem, shard).compare(output)


@WORKLOAD.details
def details(problem: LinearLoss, shard: Shard, session: Any, rank: Context) -> dict[str, Any]:
    """Return columns about the products alone, timed alternately with the step. Collective."""
    products = Products(problem, shard)
    step_ms = session.columns.get("device_ms") or session.columns["time_ms"]
    iterations = _iterations(max(gather_number(step_ms, rank)), rank.device.type)
    timed = ((session.step, session.restore), (products.run, do_nothing))
    step, alone = session.stopwatch.interleaved_ms(*timed, iterations=iterations)
    own_step, own_alone = session.stopwatch.blocks_ms(*timed, iterations=iterations)
    outputs = sum(products.bytes_of_outputs) / 2**30
    return {
        "products_ms": median(alone),
        "over_products": median(step) / median(alone),
        "over_products_alone": median(own_step) / median(own_alone),
        "tflops": session.costs.flops / step_ms / 1e9,
        "above_outputs_gib": max(gather_number(session.columns["peak_gib"] - outputs, rank)),
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
