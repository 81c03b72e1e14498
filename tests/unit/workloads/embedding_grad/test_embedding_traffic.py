"""Order of the exchange among the transfers of other parameters, and the index of the forward pass."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.embedding_grad import LoggedStream, context, problem
from tpbench.workloads.embedding_grad.exchanges.base import Phase
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs
from tpbench.workloads.embedding_grad.training_step.beside_exchange import KINDS
from tpbench.workloads.embedding_grad.training_step.traffic_iteration import TrafficIteration

TEXT = problem(distribution="zipf_bigram", overlap_ms=1.0, table_rows=997, tokens=30)


class Log:
    """Passes, other parameters and an index that write what they do into one list."""

    count = 2

    def __init__(self) -> None:
        self.lines: list[str] = []

    def phase(self, name: str, **more: Any) -> Phase:
        return Phase(name, lambda: self.lines.append(name), **more)

    def forward(self, part: float = 1.0) -> None:
        self.lines.append(f"forward {part}")

    def backward(self, part: float = 1.0) -> None:
        self.lines.append(f"backward {part}")

    def gather(self, number: int) -> Any:
        return self._started(f"gather {number}")

    def scatter(self, number: int) -> Any:
        return self._started(f"scatter {number}")

    def _started(self, name: str) -> Any:
        self.lines.append(name)
        return type("Work", (), {"wait": lambda work: self.lines.append(f"{name} ends")})()


GATHERS = ["gather 0", "gather 1"]
SCATTERS = ["scatter 0", "scatter 1", "scatter 0 ends", "scatter 1 ends"]
GATHERS_END = [*GATHERS, "gather 0 ends", "gather 1 ends"]
EARLY = ["counts", "ids"]
LATE = ["values", "merge"]


@pytest.mark.parametrize(
    ("order", "lines"),
    [
        (
            "passes",
            [
                *GATHERS, "gather 0 ends", "forward 0.5", "gather 1 ends", "forward 0.5", *EARLY,
                "backward 0.5", "scatter 0", "backward 0.5", "scatter 1", "scatter 0 ends", "scatter 1 ends", *LATE,
            ],
        ),
        ("first", ["forward 1.0", *EARLY, "backward 1.0", *LATE, *SCATTERS, *GATHERS_END]),
        ("between", ["forward 1.0", *EARLY, "backward 1.0", *SCATTERS, *LATE, *GATHERS_END]),
        ("last", ["forward 1.0", *EARLY, "backward 1.0", *SCATTERS, *GATHERS_END, *LATE]),
    ],
)  # fmt: skip
def test_the_exchange_has_its_place_among_other_transfers(order: str, lines: list[str]) -> None:
    log: Any = Log()
    phases = [log.phase("counts", after="batch"), log.phase("ids", after="forward")]
    phases += [log.phase("values"), log.phase("merge")]
    cell = problem(overlap_ms=1.0, other_mib=1.0, other_count=2, transfer_order=order)
    TrafficIteration(cell, phases, log, log, None, torch.device("cpu")).run()
    assert log.lines == lines


@pytest.mark.parametrize(
    ("order", "between_backward_and_end"),
    [
        (
            "passes",
            [
                "others waits for compute", "scatter 0", "backward 0.5", "others waits for compute", "scatter 1",
                "scatter 0 ends", "scatter 1 ends", "exchange waits for compute", "values",
            ],
        ),
        ("first", ["exchange waits for compute", "values", "others waits for compute", *SCATTERS, *GATHERS_END]),
        (
            "between",
            [
                "exchange waits for compute", "others waits for compute", *SCATTERS, "exchange waits for others",
                "values", *GATHERS_END,
            ],
        ),
        (
            "last",
            [
                "exchange waits for compute", "others waits for compute", *SCATTERS, *GATHERS_END,
                "exchange waits for others", "values",
            ],
        ),
    ],
)  # fmt: skip
def test_streams_wait_for_the_transfers_before_theirs(
    order: str, between_backward_and_end: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No device is involved: streams log the host's calls."""
    log: Any = Log()
    compute = LoggedStream(log.lines, "compute")
    streams = iter([LoggedStream(log.lines, "exchange"), LoggedStream(log.lines, "others")])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(streams))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    phases = [log.phase("ids", after="forward"), log.phase("values")]
    cell = problem(overlap_ms=1.0, other_mib=1.0, other_count=2, transfer_order=order)
    TrafficIteration(cell, phases, log, log, None, torch.device("cuda")).run()
    backward = next(number for number, line in enumerate(log.lines) if line.startswith("backward"))
    assert log.lines[:2] == ["exchange waits for compute", "others waits for compute"]
    assert log.lines[backward - 2 : backward] == ["exchange waits for compute", "ids"]
    assert log.lines[backward + 1 : -2] == between_backward_and_end
    assert log.lines[-2:] == ["compute waits for exchange", "compute waits for others"]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_forward_pass_gets_the_index_of_each_step(kind: str) -> None:
    index = KINDS[kind](EmbeddingGradInputs(replace(TEXT, index=kind), context(rank=1)))
    for _ in range(4):
        index.begin_forward()
        index.prepare_next_step()
        assert index.complaint() is None
    index.expected = index.expected.clone()
    index.expected[0, 3] += 1
    assert index.complaint() == "1 rows of the forward pass's index are wrong"


def test_an_early_index_is_of_the_tokens_before_the_forward_pass() -> None:
    """The index is hashed during the step before: tokens that come later must not change it."""
    inputs = EmbeddingGradInputs(replace(TEXT, index="early"), context())
    early, late = KINDS["early"](inputs), KINDS["late"](inputs)
    for index in (early, late):
        index.tokens = index.tokens + 1
        index.begin_forward()
    assert early.complaint() is None
    assert late.complaint() is not None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"index": "early", "overlap_ms": 1.0}, "index=early needs overlap_ms and distribution=zipf_bigram"),
        ({"index": "late", "distribution": "zipf_bigram"}, "index=late needs overlap_ms"),
        ({"other_mib": 1.0}, "other_mib=1.0 needs overlap_ms"),
        ({"transfer_order": "last", "overlap_ms": 1.0}, "transfer_order=last needs other_mib"),
    ],
)
def test_options_that_need_others_say_so(fields: dict[str, object], said: str) -> None:
    assert any(said in each for each in problem(**fields).check(1, 2))
