"""What a rank does with the embedding gradient: make the inputs, run the exchange, ask the oracle, time the phases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from tpbench.measure.session import Context, Costs, Verdict
from tpbench.measure.stopwatch import Stopwatch
from tpbench.workloads import Variant
from tpbench.workloads.embedding_grad import crossover, links, oracle, traffic
from tpbench.workloads.embedding_grad.exchange import Exchange, sequence
from tpbench.workloads.embedding_grad.inputs import Inputs
from tpbench.workloads.embedding_grad.overlap import Overlap, StandIn
from tpbench.workloads.embedding_grad.problem import EmbeddingGrad
from tpbench.workloads.embedding_grad.wire import Wire


@dataclass(frozen=True)
class Place:
    """What a variant is prepared with."""

    inputs: Inputs
    wire: Wire
    stopwatch: Stopwatch


class EmbeddingGradSession:
    """A variant on this rank's gradient."""

    def __init__(
        self, problem: EmbeddingGrad, variant: Variant, context: Context, inputs: Inputs | None = None
    ) -> None:
        self.problem, self.inputs = problem, inputs or Inputs(problem, context)
        self.wire = Wire(context.dp_group, context.dp_rank, context.dp_size)
        self.stopwatch = Stopwatch(context)
        self.links = links.measure(self.inputs, self.wire, self.stopwatch)
        self.exchange: Exchange = variant.prepare(problem, Place(self.inputs, self.wire, self.stopwatch))
        self.saved = None if self.exchange.writes is None else self.exchange.writes.clone()
        self.stand_in: StandIn | None = None
        self.iterate = sequence(self.exchange.phases)
        if problem.overlap_ms:
            self.stand_in = StandIn(problem.overlap_ms, context.device, self.stopwatch)
            self.iterate = Overlap(self.exchange.phases, problem.transfers, self.stand_in, context.device).run
        self.costs = costs(self.inputs, self.links, self.exchange.formula())

    def step(self) -> None:
        """One exchange, beside the stand-in where there is one."""
        self.wire.reset()
        self.iterate()

    def release(self) -> None:
        """Free the last exchange's memory."""
        self.exchange.release()

    def restore(self) -> None:
        """The gradient as the backward pass left it."""
        if self.exchange.writes is not None and self.saved is not None:
            self.exchange.writes.copy_(self.saved)

    def check(self) -> Verdict:
        """Compare the last step's slice with the oracle, and the bytes that were sent with the formula."""
        known = self.exchange.known_rows()
        errors = oracle.compare(self.inputs, self.exchange.result())
        self.restore()
        oracle.demand_no_lost_rows(self.inputs, known)
        sent = self._everyones_bytes()
        rank_sent, formula = [sum(each) for each in sent], self.exchange.formula()
        self.costs = costs(self.inputs, self.links, rank_sent)
        wrong = errors.complaint(self.problem.dtype)
        if rank_sent != formula:
            wrong = f"{f'{wrong} and ' if wrong else ''}ranks sent {rank_sent} bytes, by the formula {formula}"
        columns = {
            **asdict(errors),
            **asdict(self.links),
            **self.exchange.facts(),
            "density": self.inputs.density,
            "duplicate_rate": self.inputs.duplicate_rate,
            "rank_bytes_sent": rank_sent,
            "rank_bytes_received": [sum(each) for each in zip(*sent, strict=True)],
        }
        return Verdict(columns, wrong)

    def details(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Each phase alone, what is left exposed beside the stand-in, and the crossover by the formula."""
        found: dict[str, Any] = {"predicted_crossover": self._predicted(columns["copy_gb_per_s"])}
        best_ms = columns.get("device_ms") or columns["time_ms"]
        found["exchange_gb_per_s"] = self.costs.bytes_communicated / best_ms / 1e6
        if self.stand_in is not None:
            found["stand_in_ms"] = self.stopwatch.ms(self.stand_in.run)
            found["exposed_ms"] = best_ms - found["stand_in_ms"]
        self.restore()
        sequence(self.exchange.phases)()  # each phase below finds what those before it made
        for phase in self.exchange.phases:
            found[f"{phase.name}_ms"] = self.stopwatch.ms(phase.run, self.restore, on_host=phase.on_host)
        early = [phase for phase in self.exchange.phases if phase.after != "backward"]
        late = [phase for phase in self.exchange.phases if phase.after == "backward"]
        if early:
            sequence(early)()
            found["late_wall_ms"] = self.stopwatch.ms(sequence(late), self.restore, on_host=True)
            found["early_wall_ms"] = self.stopwatch.ms(sequence(early), on_host=True)
        return found

    def _predicted(self, copy_gb_per_s: float) -> float:
        owners = self.inputs.owners
        size = (owners.table_rows, self.inputs.row_bytes, owners.world_size)
        return crossover.predicted(*size, copy_gb_per_s=copy_gb_per_s, **asdict(self.links))

    def _everyones_bytes(self) -> list[list[int]]:
        """Bytes of the last step by sender and receiver."""
        everyone = [torch.empty(self.wire.world_size, dtype=torch.int64) for _ in range(self.wire.world_size)]
        dist.all_gather(everyone, torch.tensor(self.wire.to_peer), group=self.wire.group)
        return [each.tolist() for each in everyone]


def costs(inputs: Inputs, measured: links.Links, sent: list[int]) -> Costs:
    """Each touched row read once, each merged row written once, on the rank where that is most; the rows that are
    others' over the wire."""
    each = zip(map(sum, inputs.counts), inputs.merged_rows, strict=True)
    moved = max(touched * (inputs.row_bytes + traffic.ID_BYTES) + merged * inputs.row_bytes for touched, merged in each)
    crossing = traffic.busiest(inputs.counts) * (inputs.row_bytes + traffic.ID_BYTES)
    return Costs(bytes_moved=moved, bytes_communicated=max(sent), wire_ms=measured.wire_ms(crossing))


def setup(problem: EmbeddingGrad, variant: Variant, context: Context) -> EmbeddingGradSession:
    """The session of one cell on this rank."""
    return EmbeddingGradSession(problem, variant, context)
