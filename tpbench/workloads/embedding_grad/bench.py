"""The embedding gradient on a rank: its inputs, costs and iteration, its check, and the time of each phase."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tpbench.comm.collectives import gather_objects
from tpbench.measure.audit import GeneratedInputs
from tpbench.measure.clock import Stopwatch
from tpbench.measure.session import Context, Costs, Verdict
from tpbench.suggestions import unknown
from tpbench.workloads.embedding_grad import oracle
from tpbench.workloads.embedding_grad.exchanges import Exchange, ExchangeContext, sequence
from tpbench.workloads.embedding_grad.exchanges.collectives import CountedCollectives, LinkRates, measure_link_rates
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs, busiest
from tpbench.workloads.embedding_grad.problem import PHASES, WORKLOAD, EmbeddingGrad
from tpbench.workloads.embedding_grad.training_step import OtherWork, TrainingStep
from tpbench.workloads.step import Step, WrongReturn


@dataclass(frozen=True)
class MeasuredContext(ExchangeContext):
    """The arguments of a variant, with what the session needs besides."""

    link_rates: LinkRates
    other_work: OtherWork | None
    """The rest of a training step. None: an iteration is the exchange alone."""


@WORKLOAD.inputs
def inputs(problem: EmbeddingGrad, rank: Context) -> MeasuredContext:
    """Return this rank's gradient and collectives, and measure the rates of the links. Collective."""
    gradient = EmbeddingGradInputs(problem, rank)
    comm, stopwatch = CountedCollectives(rank.dp_group, rank.dp_rank, rank.dp_size), Stopwatch(rank)
    rates = measure_link_rates(gradient, comm, stopwatch)
    other_work = OtherWork(gradient, stopwatch) if problem.overlap_ms else None
    return MeasuredContext(gradient, comm, stopwatch, rates, other_work)


@WORKLOAD.costs
def costs(problem: EmbeddingGrad, context: MeasuredContext, rank: Context) -> Costs:
    """Return the unavoidable bytes of the busiest rank, and the time of those that cross the wire."""
    gradient = context.inputs
    moved, on_wire = unavoidable_bytes(gradient.counts, gradient.merged_rows, gradient.row_bytes)
    return Costs(moved, on_wire, wire_ms=on_wire / context.link_rates["link_gb_per_s"] / 1e6)


@WORKLOAD.step(Exchange)
def step(problem: EmbeddingGrad, context: MeasuredContext, exchange: Exchange, rank: Context) -> Step[Any]:
    """Return one exchange, beside the rest of a training step if there is one.

    A change of the inputs takes the numbers of another seed in the same rows, for the oracle too.
    """
    for phase in exchange.phases:
        if (name := getattr(phase, "name", None)) not in PHASES:
            message = f"{type(exchange).__name__}: {unknown('phase of an exchange', str(name), PHASES)}"
            raise WrongReturn(type(exchange).__init__, message)
    iterate, gradient = iteration(problem, context, exchange), context.inputs
    saved: Tensor | None = None

    def run() -> Callable[[], Tensor]:
        context.comm.reset()
        iterate()
        return exchange.result

    def gradient_of(seed: int) -> list[Tensor]:
        grad = torch.zeros_like(gradient.grad)
        gradient.problem = replace(problem, seed=seed)
        gradient.fill(grad)
        return [grad]

    def save() -> None:
        nonlocal saved
        saved = None if exchange.overwrites is None else exchange.overwrites.clone()

    def restore() -> None:
        if exchange.overwrites is not None and saved is not None:
            exchange.overwrites.copy_(saved)

    save()
    changing = GeneratedInputs([gradient.grad], problem.seed, gradient_of, save)
    sent = context.comm
    return Step(run, lambda: sum(sent.sent_bytes), exchange.columns, restore, release=exchange.release, inputs=changing)


def iteration(problem: EmbeddingGrad, context: MeasuredContext, exchange: Exchange | None) -> Callable[[], None]:
    """Return an iteration with the exchange, or without it."""
    phases = () if exchange is None else exchange.phases
    other = context.other_work
    if other is None:
        return sequence(phases)
    return TrainingStep(problem, phases, other.stand_in, other.parameters, other.index, context.inputs.device).run


@WORKLOAD.check(Tensor)
def check(problem: EmbeddingGrad, context: MeasuredContext, mean: Tensor, rank: Context) -> Verdict:
    """Compare a rank's slice of the mean gradient with the oracle. Collective."""
    gradient, comm, other = context.inputs, context.comm, context.other_work
    errors = oracle.compare(gradient, mean)
    sent_bytes = gather_objects(comm.sent_bytes, comm.group)  # by sender, then by receiver
    wrong = errors.complaint(problem.dtype)
    if other is not None and other.index is not None:
        wrong = next(filter(None, [wrong, *gather_objects(other.index.complaint(), comm.group)]), None)
    columns = {
        "grad_error": errors.grad_error,
        "grad_norm": errors.grad_norm,
        **context.link_rates,
        "density": gradient.density,
        "duplicate_rate": gradient.duplicate_rate,
        "rank_bytes_sent": [sum(sizes) for sizes in sent_bytes],
        "rank_bytes_received": [sum(sizes) for sizes in zip(*sent_bytes, strict=True)],
    }
    return Verdict(columns, wrong)


@WORKLOAD.details
def details(problem: EmbeddingGrad, context: MeasuredContext, session: Any, rank: Context) -> dict[str, Any]:
    """Measure each phase alone, by wall clock those that need no gradient and those that do, and the time beyond the
    rest of a training step. Collective."""
    stopwatch, phases, other = session.stopwatch, session.prepared.phases, context.other_work
    best_ms = session.columns.get("device_ms") or session.columns["time_ms"]
    columns = {"exchange_gb_per_s": session.costs.bytes_communicated / best_ms / 1e6}
    session.restore()
    if other is not None:
        columns["stand_in_ms"] = alone_ms = stopwatch.ms(other.stand_in.run)
        if problem.other_mib:
            columns["others_ms"] = alone_ms = stopwatch.ms(iteration(problem, context, None))
        columns["exposed_ms"] = best_ms - alone_ms
        if other.index is not None:
            columns["index_ms"] = stopwatch.ms(other.index.run_alone, on_host=True)
    session.restore()
    sequence(phases)()  # each phase below reuses what the earlier ones produced here
    for phase in phases:
        columns[f"{phase.name}_ms"] = stopwatch.ms(phase.run, session.restore, on_host=phase.on_host)
    early = [phase for phase in phases if phase.after != "backward"]
    late = [phase for phase in phases if phase.after == "backward"]
    if early:
        sequence(early)()
        columns["late_wall_ms"] = stopwatch.ms(sequence(late), session.restore, on_host=True)
        columns["early_wall_ms"] = stopwatch.ms(sequence(early), on_host=True)
    return columns


def unavoidable_bytes(counts: Sequence[Sequence[int]], merged_rows: Sequence[int], row_bytes: int) -> tuple[int, int]:
    """Return the bytes that the busiest rank must move through its memory, and those that it must send or receive.

    Each touched row is read once and each merged row is written once. Rows that other ranks own cross the wire, while
    other rows may be read and written. Row numbers do not count: an exchange of the whole table sends none.

    `counts`: touched rows, by the rank that touched them and then by owner. `merged_rows`: touched rows of each owner.
    """
    moved = max(sum(touched) + merged for touched, merged in zip(counts, merged_rows, strict=True))
    return moved * row_bytes, busiest(counts) * row_bytes
