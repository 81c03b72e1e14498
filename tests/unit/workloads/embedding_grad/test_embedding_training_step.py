"""Order of the exchange, the passes and other transfers in a training step; the index of its forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.embedding_grad import context, problem
from tpbench.workloads.embedding_grad.exchanges import Phase
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs
from tpbench.workloads.embedding_grad.training_step import ForwardIndex, TrainingStep

TEXT = problem(distribution="zipf_bigram", overlap_ms=1.0, table_rows=997, tokens=30)


class Log:
    """Passes and other parameters that write what they do into one list."""

    def __init__(self, count: int) -> None:
        self.lines: list[str] = []
        self.count = count

    def forward(self, part: int = 0, parts: int = 1) -> None:
        self.lines.append(f"forward {part + 1} of {parts}")

    def backward(self, part: int = 0, parts: int = 1) -> None:
        self.lines.append(f"backward {part + 1} of {parts}")

    def gather(self, number: int) -> Any:
        return self._started(f"gather {number}")

    def scatter(self, number: int) -> Any:
        return self._started(f"scatter {number}")

    def _started(self, name: str) -> Any:
        self.lines.append(name)
        return type("Work", (), {"wait": lambda work: self.lines.append(f"{name} ends")})()


class LoggedStream:
    """CUDA stream that logs the host's calls. No device is involved."""

    def __init__(self, lines: list[str], name: str) -> None:
        self.lines, self.name = lines, name

    def wait_stream(self, other: LoggedStream) -> None:
        self.lines.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.lines.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        return self.lines[-1]

    def synchronize(self) -> None:
        self.lines.append(f"host waits for {self.name}")


def step_of(log: Log, device: str, **fields: Any) -> Callable[[], None]:
    others: Any = log
    points = {"counts": "batch", "ids": "forward", "values": "backward"}
    phases: list[Any] = [Phase(name, lambda name=name: log.lines.append(name), at) for name, at in points.items()]
    cell = problem(overlap_ms=1.0, other_mib=float(log.count > 0), **fields)
    return TrainingStep(cell, others, others, None, torch.device(device)).with_exchange(phases)


GATHERS = ["gather 0", "gather 1", "gather 0 ends", "gather 1 ends"]
SCATTERS = ["scatter 0", "scatter 1", "scatter 0 ends", "scatter 1 ends"]
TO_EXCHANGE, TO_OTHERS = "exchange waits for compute", "others waits for compute"
AFTER = "exchange waits for others"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("order", "lines"),
    [
        (
            "passes",
            [
                "gather 0", "gather 1", "gather 0 ends", "forward 1 of 2", "gather 1 ends", "forward 2 of 2", "counts",
                "exchange waits for forward 2 of 2", "ids", "backward 1 of 2", TO_OTHERS, "scatter 0",
                "backward 2 of 2", TO_OTHERS, "scatter 1", "scatter 0 ends", "scatter 1 ends", TO_EXCHANGE, "values",
            ],
        ),
        ("first", [TO_EXCHANGE, TO_OTHERS, "values", *SCATTERS, *GATHERS]),
        ("between", [TO_EXCHANGE, TO_OTHERS, *SCATTERS, AFTER, "values", *GATHERS]),
        ("last", [TO_EXCHANGE, TO_OTHERS, *SCATTERS, *GATHERS, AFTER, "values"]),
    ],
)  # fmt: skip
def test_the_exchange_has_its_place_among_other_transfers(
    order: str, lines: list[str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(2)
    patch_streams(log, monkeypatch)
    step_of(log, device, transfer_order=order)()
    passes = ["forward 1 of 1", "counts", "exchange waits for forward 1 of 1", "ids", "backward 1 of 1"]
    expected = [*([] if order == "passes" else passes), *lines]
    if device == "cpu":
        assert log.lines == [line for line in expected if "waits for" not in line]
    else:
        ends = ["compute waits for exchange", "compute waits for others"]
        assert log.lines == [TO_EXCHANGE, TO_OTHERS, *expected, *ends]


def patch_streams(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = iter([LoggedStream(log.lines, "exchange"), LoggedStream(log.lines, "others")])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(streams))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: LoggedStream(log.lines, "compute"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


EVENT = "exchange waits for forward 1 of 1"


def test_without_other_transfers_both_passes_are_queued_first(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(0)
    patch_streams(log, monkeypatch)
    step_of(log, "cuda")()
    passes = [TO_EXCHANGE, "forward 1 of 1", "backward 1 of 1"]
    lines = ["counts", EVENT, "ids", TO_EXCHANGE, "values"]
    assert log.lines == [*passes, *lines, "compute waits for exchange"]


@pytest.mark.parametrize("kind", ["early", "late", "device"])
def test_the_forward_pass_gets_the_index_of_each_step(kind: str) -> None:
    index: Any = ForwardIndex(EmbeddingGradInputs(replace(TEXT, index=kind), context(rank=1)))
    for _ in range(4):
        index.begin_forward()
        index.prepare_next_step()
        assert index.complaint() is None
    index.expected = index.expected.clone()
    index.expected[0, 3] += 1
    assert index.complaint() == "1 rows of the forward pass's index are wrong"


def test_an_early_index_is_of_the_tokens_before_the_forward_pass() -> None:
    """The index is hashed during the step before: tokens that come later must not change it."""
    for kind, kept in (("early", True), ("late", False)):
        index: Any = ForwardIndex(EmbeddingGradInputs(replace(TEXT, index=kind), context()))
        index.tokens = index.tokens + 1
        index.begin_forward()
        assert (index.complaint() is None) == kept
