"""The embedding gradient on a rank: its inputs, costs and iteration, its check, and the time of each phase."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpbench.comm.collectives import gather_objects
from tpbench.measure.audit import Inputs
from tpbench.measure.session import Context, Costs, Verdict
from tpbench.measure.timers import Stopwatch
from tpbench.workloads.differences import Compared, Comparison, rounding
from tpbench.workloads.embedding_grad.exchanges import Exchange, ExchangeContext, sequence
from tpbench.workloads.embedding_grad.exchanges.counted import CountedCollectives, measure_link_rates
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs, leaving
from tpbench.workloads.embedding_grad.problem import WORKLOAD, EmbeddingGrad
from tpbench.workloads.embedding_grad.training_step import ForwardIndex, OtherParameters, StandIn, TrainingStep
from tpbench.workloads.hashing import CHUNK
from tpbench.workloads.step import Step


@WORKLOAD.inputs
def inputs(problem: EmbeddingGrad, rank: Context) -> ExchangeContext:
    """Return this rank's gradient and collectives, and measure the rates of the links. Collective."""
    gradient = EmbeddingGradInputs(problem, rank)
    comm, stopwatch = CountedCollectives(rank.dp_group, rank.dp_rank, rank.dp_size), Stopwatch(rank)
    rates = rank.once("link rates", lambda: measure_link_rates(gradient, comm, stopwatch))
    other_work = None
    if problem.overlap_ms:
        stand_in = StandIn(problem.overlap_ms, rank.device, stopwatch)
        index = None if problem.index == "none" else ForwardIndex(gradient)
        other_work = TrainingStep(problem, stand_in, OtherParameters(gradient), index, rank.device)
    return ExchangeContext(gradient, comm, stopwatch, rates, other_work)


@WORKLOAD.costs
def costs(problem: EmbeddingGrad, context: ExchangeContext, rank: Context) -> Costs:
    """Return the unavoidable bytes of the busiest rank, and the time of those that cross the wire."""
    gradient = context.inputs
    moved, on_wire = unavoidable_bytes(gradient.counts, gradient.merged_rows, gradient.row_bytes)
    wire_ms = on_wire / context.link_rates["link_gb_per_s"] / 1e6
    return Costs(moved, on_wire, wire_ms=wire_ms, wire_beside_memory=True)


@WORKLOAD.step(Exchange)
def step(problem: EmbeddingGrad, context: ExchangeContext, exchange: Exchange, rank: Context) -> Step[Tensor]:
    """Return one exchange, beside the rest of a training step if there is one."""
    gradient, comm, other = context.inputs, context.comm, context.other_work
    iterate = sequence(exchange.phases) if other is None else other.with_exchange(exchange.phases)
    overwritten = gradient.grad[:0] if exchange.overwrites is None else exchange.overwrites
    saved = overwritten.clone()

    def run() -> Callable[[], Tensor]:
        comm.reset()
        iterate()
        return exchange.result

    def save() -> None:
        saved.copy_(overwritten)

    restore = None if exchange.overwrites is None else partial(overwritten.copy_, saved)
    inputs = Inputs([gradient.grad], lambda seed: [gradient.with_seed(seed)], problem.seed, save)
    return Step(run, lambda: sum(comm.sent_bytes), exchange.columns, restore, release=exchange.release, inputs=inputs)


@WORKLOAD.check(Tensor)
def check(problem: EmbeddingGrad, context: ExchangeContext, mean: Tensor, rank: Context) -> Verdict:
    """Compare a rank's slice of the mean gradient with the oracle. Collective."""
    gradient, comm, other = context.inputs, context.comm, context.other_work
    verdict, wrong = compare(gradient, mean), None
    sent_bytes = gather_objects(comm.sent_bytes, comm.group)  # by sender, then by receiver
    if other is not None and other.index is not None:
        wrong = next(filter(None, gather_objects(other.index.complaint(), comm.group)), None)
    columns = {
        **verdict.columns,
        **context.link_rates,
        "density": gradient.density,
        "rank_bytes_sent": [sum(sizes) for sizes in sent_bytes],
        "rank_bytes_received": [sum(sizes) for sizes in zip(*sent_bytes, strict=True)],
    }
    return Verdict(columns, verdict.wrong or wrong)


@WORKLOAD.details
def details(problem: EmbeddingGrad, context: ExchangeContext, session: Any, rank: Context) -> dict[str, Any]:
    """Measure each phase alone, and the time beyond the rest of a training step. Collective."""
    stopwatch, phases, other = session.stopwatch, session.prepared.phases, context.other_work
    best_ms = session.step_ms
    columns = {"exchange_gb_per_s": session.costs.bytes_communicated / best_ms / 1e6}
    session.restore()
    if other is not None:
        columns["stand_in_ms"] = alone_ms = stopwatch.ms(other.stand_in.run)
        if problem.other_mib:
            columns["others_ms"] = alone_ms = stopwatch.ms(other.with_exchange(()))
        columns["exposed_ms"] = best_ms - alone_ms
        if other.index is not None:
            columns["index_ms"] = stopwatch.ms(other.index.run_alone, on_host=True)
    session.restore()
    sequence(phases)()  # each phase below reuses what the earlier ones produced here
    for phase in phases:
        columns[f"{phase.name}_ms"] = stopwatch.ms(phase.run, session.restore, on_host=phase.on_host)
    return columns


def unavoidable_bytes(counts: Sequence[Sequence[int]], merged_rows: Sequence[int], row_bytes: int) -> tuple[int, int]:
    """Return the bytes that the busiest rank must move through its memory, and those that it must send or receive.

    Each touched row is read once and each merged row is written once. Rows that other ranks own cross the wire, while
    other rows may be read and written. Row numbers do not count: an exchange of the whole table sends none.

    `counts`: touched rows, by the rank that touched them and then by owner. `merged_rows`: touched rows of each owner.
    """
    moved = max(sum(touched) + merged for touched, merged in zip(counts, merged_rows, strict=True))
    on_wire = max(*leaving(counts), *leaving(list(zip(*counts, strict=True))))
    return moved * row_bytes, on_wire * row_bytes


NAME = "the mean gradient"

TOLERANCE = {"bfloat16": 2.0**-6, "float16": 2.0**-9, "float32": 2.0**-20}
"""Largest allowed error of a row of the mean, by norm, relative to that row.

A sum over W ranks that is rounded after each addition errs by about sqrt(W) times half a unit in the last place (2^-9,
2^-12, 2^-25). The tolerances allow 8, 8 and 32 times that half unit.
"""


def compare(inputs: EmbeddingGradInputs, result: Tensor) -> Verdict:
    """Compare this rank's slice of the mean with the oracle: the columns grad_error and grad_norm. Collective.

    The error is the largest ||row - expected|| / ||expected||. Rows of several ranks may cancel to less than the sum's
    rounding errors, so that ||expected|| counts as that of orthogonal rows at least. A row that no rank touched must be
    exactly zero.

    What a row's norm doesn't show is judged without a column. Each element may err by one rounding of the sum of
    absolute terms for each term, and one for the division. Rounding errors average out in the gain
    <got, expected> / <expected, expected> of a row, of a column and of this rank's slice (`allowed_gain`).
    """
    problem = inputs.problem
    mean = Compared(result, tuple(inputs.own_slice.shape), inputs.grad.dtype, "grad_error")
    limits, gather = {"grad_error": TOLERANCE[problem.dtype]}, partial(gather_objects, group=inputs.group)
    comparison = Comparison({NAME: mean}, limits, gather, inputs.device, problem.dtype)
    first_row, squares = inputs.bounds[inputs.rank], 0.0
    allowed = partial(allowed_gain, torch.finfo(inputs.grad.dtype).eps / 2, inputs.world_size)
    touched = 0
    of_columns = torch.zeros(3, problem.width, dtype=torch.float64, device=inputs.device)
    step = max(1, CHUNK[inputs.device.type] // problem.width)
    for start in range(0, inputs.rows_per_rank, step):
        stop = min(start + step, inputs.rows_per_rank)
        expected, terms = mean_gradient(inputs, first_row + start, first_row + stop)
        squares += float(expected.square().sum())
        if NAME in comparison.got:
            got = result[start:stop].double()
            comparison.rows(NAME, got, expected, 0.0, start, least=terms.squares.sum(1).sqrt())
            rounded = (terms.ranks + 1)[:, None] * rounding(terms.absolute, inputs.grad.dtype, times=1)
            bounds = torch.where(terms.ranks[:, None] > 0, rounded, 0.0)
            comparison.bounds(NAME, expected, bounds, got=got, first_row=start)
            sums = torch.stack(((got - expected) * expected, expected.square(), terms.squares))
            of_rows = sums.sum(2)
            comparison.gains(NAME, "row", of_rows, of_rows[2], allowed(problem.width), first=start)
            of_columns += sums.sum(1)
            touched += int((terms.ranks > 0).sum())
    if NAME in comparison.got and touched:
        comparison.gains(NAME, "column", of_columns, of_columns[2], allowed(touched))
        of_slice = of_columns.sum(1)
        comparison.gains(NAME, "this rank's slice", of_slice, of_slice[2], allowed(touched * problem.width))
    verdict = comparison.verdict()
    verdict.columns["grad_norm"] = math.sqrt(sum(gather(squares)))
    return verdict


class Terms(NamedTuple):
    """What rows of the mean are sums of, in units of the mean."""

    ranks: Tensor
    """The number of ranks that touched each row, (rows,)."""
    absolute: Tensor
    """The sum of absolute terms of each element, (rows, width)."""
    squares: Tensor
    """The sum of squared terms of each element, (rows, width): the square that it has if terms are orthogonal."""


def mean_gradient(inputs: EmbeddingGradInputs, start: int, stop: int) -> tuple[Tensor, Terms]:
    """Return rows [start, stop) of the mean over ranks, (stop - start, width) float64, and their terms. All are zero in
    the padding."""
    ranks = len(inputs.touched)
    total = torch.zeros(stop - start, inputs.problem.width, dtype=torch.float64, device=inputs.device)
    terms = Terms(total.new_zeros(stop - start), torch.zeros_like(total), torch.zeros_like(total))
    for rank, touched in enumerate(inputs.touched):
        low, high = torch.searchsorted(touched, torch.tensor([start, stop])).tolist()
        rows, values = touched[low:high], inputs.gradient_rows(rank, touched[low:high]).double() / ranks
        # The rows of one rank are distinct, so that these additions have no race.
        at = (rows - start).to(inputs.device)
        total[at] += values
        terms.ranks[at] += 1
        terms.absolute[at] += values.abs()
        terms.squares[at] += values.square()
    return total, terms


def allowed_gain(unit: float, ranks: int, elements: int) -> float:
    """Return how far the gain of so many elements may be from 1, if each is rounded at most `ranks` times.

    unit: the largest relative error of one rounding. A usual error is 0.4 of it, and errors are independent: the limit
    is ten standard deviations, and a sixteenth of a unit for what doesn't average out.
    """
    return unit * (4 * math.sqrt(ranks / elements) + 1 / 16)
