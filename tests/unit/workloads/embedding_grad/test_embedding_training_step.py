"""Order of the exchange, the passes and other transfers in a training step; the index of its forward pass."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
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
        self.lines, self.count = list[str](), count

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
        return SimpleNamespace(wait=lambda: self.lines.append(f"{name} ends"))


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


GATHERS = ["gather 0", "gather 1", "gather 0 ends", "gather 1 ends"]
SCATTERS = ["scatter 0", "scatter 1", "scatter 0 ends", "scatter 1 ends"]
TO_EXCHANGE, TO_OTHERS = "exchange waits for compute", "others waits for compute"
AFTER, EVENT = "exchange waits for others", "exchange waits for forward 1 of 1"
PASSES = ["forward 1 of 1", "counts", EVENT, "ids", "backward 1 of 1"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("order", "count", "lines"),
    [
        (
            "passes", 2,
            [
                "gather 0", "gather 1", "gather 0 ends", "forward 1 of 2", "gather 1 ends", "forward 2 of 2", "counts",
                "exchange waits for forward 2 of 2", "ids", "backward 1 of 2", TO_OTHERS, "scatter 0",
                "backward 2 of 2", TO_OTHERS, "scatter 1", "scatter 0 ends", "scatter 1 ends", TO_EXCHANGE, "values",
            ],
        ),
        ("first", 2, [*PASSES, TO_EXCHANGE, TO_OTHERS, "values", *SCATTERS, *GATHERS]),
        ("between", 2, [*PASSES, TO_EXCHANGE, TO_OTHERS, *SCATTERS, AFTER, "values", *GATHERS]),
        ("last", 2, [*PASSES, TO_EXCHANGE, TO_OTHERS, *SCATTERS, *GATHERS, AFTER, "values"]),
        # Without other transfers both passes are queued first.
        ("passes", 0, ["forward 1 of 1", "backward 1 of 1", "counts", EVENT, "ids", TO_EXCHANGE, "values"]),
    ],
)  # fmt: skip
def test_the_exchange_has_its_place_among_other_transfers(
    order: str, count: int, lines: list[str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: Any = Log(count)
    streams = (LoggedStream(log.lines, name) for name in ("exchange", "others"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(streams))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: LoggedStream(log.lines, "compute"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    points: dict[str, Any] = {"counts": "batch", "ids": "forward", "values": "backward"}
    phases = [Phase(name, lambda name=name: log.lines.append(name), at) for name, at in points.items()]  # type: ignore[misc]
    cell = problem(overlap_ms=1.0, other_mib=float(count > 0), transfer_order=order)
    TrainingStep(cell, log, log, None, torch.device(device)).with_exchange(phases)()
    others = [TO_OTHERS, "compute waits for others"] if count else []
    expected = [TO_EXCHANGE, *others[:1], *lines, "compute waits for exchange", *others[1:]]
    assert log.lines == [line for line in expected if device == "cuda" or "waits for" not in line]


@pytest.mark.parametrize("kind", ["early", "late", "pinned", "device"])
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
