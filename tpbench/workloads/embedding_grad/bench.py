"""Run of the embedding gradient on one rank: inputs, exchange, oracle, and the time of each phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tpbench.comm.collectives import gather_objects
from tpbench.measure.audit import GeneratedInputs
from tpbench.measure.clock import Stopwatch
from tpbench.measure.session import Context, Costs, Verdict
from tpbench.suggestions import unknown
from tpbench.workloads import Variant
from tpbench.workloads.embedding_grad import oracle
from tpbench.workloads.embedding_grad.exchanges import Exchange, ExchangeContext, Phase, sequence
from tpbench.workloads.embedding_grad.exchanges.collectives import CountedCollectives, measure_link_rates
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs, busiest
from tpbench.workloads.embedding_grad.problem import PHASES, WORKLOAD, EmbeddingGrad
from tpbench.workloads.embedding_grad.training_step import ForwardIndex, OtherParameters, StandIn, TrainingStep
from tpbench.workloads.step import WrongReturn, checked_columns, count, require


class EmbeddingGradSession:
    """A variant on this rank's gradient. Variants from outside this package are audited."""

    fresh = keeps_output = False
    costs = Costs(bytes_moved=0, bytes_communicated=0)
    """Of the last checked iteration."""

    def __init__(
        self, problem: EmbeddingGrad, variant: Variant, context: Context, inputs: EmbeddingGradInputs | None = None
    ) -> None:
        self.problem, self.variant, self.inputs = problem, variant, inputs or EmbeddingGradInputs(problem, context)
        self.comm = CountedCollectives(context.dp_group, context.dp_rank, context.dp_size)
        self.stopwatch = Stopwatch(context)
        self.link_rates = measure_link_rates(self.inputs, self.comm, self.stopwatch)
        self.trusted, self.audited = variant.place is None, variant.place is not None
        self.audited_inputs = GeneratedInputs([self.inputs.grad], problem.seed, self._gradient_of, self.save)
        prepared = variant.prepare(problem, ExchangeContext(self.inputs, self.comm, self.stopwatch))
        self.exchange: Exchange = require(prepared, Exchange, variant, "the function")
        for phase in self.exchange.phases:
            if require(phase, Phase, variant, "the exchange's phases").name not in PHASES:
                raise WrongReturn(variant, f"{variant.name}: {unknown('phase of an exchange', phase.name, PHASES)}")
        self.has_result = False
        self.saved: Tensor | None = None
        self.save()
        self.iterate = sequence(self.exchange.phases)
        self.index = None if problem.index == "none" else ForwardIndex(self.inputs)
        self.stand_in: StandIn | None = None
        if problem.overlap_ms:
            self.stand_in = StandIn(problem.overlap_ms, context.device, self.stopwatch)
            beside = (self.stand_in, OtherParameters(self.inputs), self.index, context.device)
            self.iterate = TrainingStep(problem, self.exchange.phases, *beside).run
            self.without_exchange = TrainingStep(problem, (), *beside).run

    def step(self) -> None:
        """Run one exchange, beside the stand-in if there is one."""
        self.comm.reset()
        self.iterate()
        self.has_result = True

    def outputs(self) -> list[Tensor]:
        """Return this rank's slice of the mean gradient, if a step has computed it."""
        return [self.exchange.result()] if self.has_result else []

    def release(self) -> None:
        """Free the last exchange's memory."""
        if not self.keeps_output:
            self.exchange.release()
            self.has_result = False

    def _gradient_of(self, seed: int) -> list[Tensor]:
        """The numbers of another seed in the same rows, for the oracle too."""
        grad = torch.zeros_like(self.inputs.grad)
        self.inputs.problem = replace(self.problem, seed=seed)
        self.inputs.fill(grad)
        return [grad]

    def save(self) -> None:
        """Save what the exchange overwrites."""
        self.saved = None if self.exchange.overwrites is None else self.exchange.overwrites.clone()

    def restore(self) -> None:
        """Restore the gradient that the backward passes left, or change it if every iteration gets fresh inputs."""
        if self.fresh:
            self.audited_inputs.change()
        if self.exchange.overwrites is not None and self.saved is not None:
            self.exchange.overwrites.copy_(self.saved)

    def check(self) -> Verdict:
        """Compare the last step's slice with the oracle. Collective."""
        errors = oracle.compare(self.inputs, self.exchange.result())
        sent_bytes = gather_objects(self.comm.sent_bytes, self.comm.group)  # by sender, then by receiver
        rank_sent = [count(sum(sizes), self.variant) for sizes in sent_bytes]
        inputs = self.inputs
        moved, on_wire = unavoidable_bytes(inputs.counts, inputs.merged_rows, inputs.row_bytes)
        wire_ms = on_wire / self.link_rates["link_gb_per_s"] / 1e6
        self.costs = Costs(moved, max(rank_sent), wire_ms=wire_ms, wire_beside_memory=True)
        wrong = errors.complaint(self.problem.dtype)
        if self.index is not None:
            wrong = next(filter(None, [wrong, *gather_objects(self.index.complaint(), self.comm.group)]), None)
        columns = {
            "grad_error": errors.grad_error,
            "grad_norm": errors.grad_norm,
            **self.link_rates,
            **checked_columns(self.exchange.columns, self.variant, WORKLOAD),
            "density": self.inputs.density,
            "duplicate_rate": self.inputs.duplicate_rate,
            "rank_bytes_sent": rank_sent,
            "rank_bytes_received": [sum(sizes) for sizes in zip(*sent_bytes, strict=True)],
        }
        return Verdict(columns, wrong)

    def details(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Measure each phase alone and the time beyond the stand-in. Collective."""
        details: dict[str, Any] = {}
        self.restore()
        best_ms = columns.get("device_ms") or columns["time_ms"]
        details["exchange_gb_per_s"] = self.costs.bytes_communicated / best_ms / 1e6
        if self.stand_in is not None:
            details["stand_in_ms"] = alone_ms = self.stopwatch.ms(self.stand_in.run)
            if self.problem.other_mib:
                details["others_ms"] = alone_ms = self.stopwatch.ms(self.without_exchange)
            details["exposed_ms"] = best_ms - alone_ms
        if self.index is not None:
            details["index_ms"] = self.stopwatch.ms(self.index.run_alone, on_host=True)
        self.restore()
        return details | self._phase_details()

    def _phase_details(self) -> dict[str, float]:
        """Measure each phase alone, and by wall clock those that need no gradient and those that do."""
        details: dict[str, float] = {}
        phases = self.exchange.phases
        sequence(phases)()  # each phase below reuses what the earlier ones produced here
        for phase in phases:
            details[f"{phase.name}_ms"] = self.stopwatch.ms(phase.run, self.restore, on_host=phase.on_host)
        early = [phase for phase in phases if phase.after != "backward"]
        late = [phase for phase in phases if phase.after == "backward"]
        if early:
            sequence(early)()
            details["late_wall_ms"] = self.stopwatch.ms(sequence(late), self.restore, on_host=True)
            details["early_wall_ms"] = self.stopwatch.ms(sequence(early), on_host=True)
        return details


def unavoidable_bytes(counts: Sequence[Sequence[int]], merged_rows: Sequence[int], row_bytes: int) -> tuple[int, int]:
    """Return the bytes that the busiest rank must move through its memory, and those that it must send or receive.

    Each touched row is read once and each merged row is written once. Rows that other ranks own cross the wire, while
    other rows may be read and written. Row numbers do not count: an exchange of the whole table sends none.

    `counts`: touched rows, by the rank that touched them and then by owner. `merged_rows`: touched rows of each owner.
    """
    moved = max(sum(touched) + merged for touched, merged in zip(counts, merged_rows, strict=True))
    return moved * row_bytes, busiest(counts) * row_bytes


setup = EmbeddingGradSession
"""The worker calls `setup(problem, variant, context)`."""
