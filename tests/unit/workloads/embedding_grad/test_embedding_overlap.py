"""Order of the transfers and of the stand-in's passes, on the device and on the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.support.command import until
from tests.support.embedding_grad import LoggedStream
from tpbench.workloads.embedding_grad.exchanges.base import Phase, StepPoint
from tpbench.workloads.embedding_grad.training_step.overlap import OverlappedIteration

PASS_S = 0.05


class EventLog:
    """Stand-in that logs each start and end. Its passes last until the phases that belong beside them have run."""

    def __init__(self, forward: Sequence[str] = (), backward: Sequence[str] = ()) -> None:
        self.beside = {"forward": set(forward), "backward": set(backward)}
        self.lines: list[str] = []

    def phase(self, name: str, **more: Any) -> Phase:
        return Phase(name, lambda: self.lines.append(name), **more)

    def forward(self) -> None:
        self._long("forward")

    def backward(self) -> None:
        self._long("backward")

    def _long(self, name: str) -> None:
        self.lines.append(f"{name} begins")
        time.sleep(PASS_S)  # in which a phase may run that does not belong there
        until(lambda: self.beside[name] <= set(self.lines), f"the phases beside the {name} pass")
        self.lines.append(f"{name} ends")


@pytest.mark.parametrize(
    ("transfers", "beside_forward", "beside_backward", "afterwards"),
    [
        ("early", ["counts"], ["ids"], ["values", "merge"]),
        ("late", [], [], ["counts", "ids", "values", "merge"]),
        ("beside", ["counts", "ids", "values", "merge"], [], []),
    ],
)
def test_each_phase_runs_at_its_point(
    transfers: str, beside_forward: list[str], beside_backward: list[str], afterwards: list[str]
) -> None:
    log: Any = EventLog(beside_forward, beside_backward)
    phases = [log.phase("counts", after="batch"), log.phase("ids", after="forward")]
    phases += [log.phase("values"), log.phase("merge")]
    OverlappedIteration(phases, transfers, log, torch.device("cpu")).run()
    lines = log.lines
    forward, middle, end = (lines.index(line) for line in ("forward ends", "backward begins", "backward ends"))
    assert [line for line in lines[:forward] if " " not in line] == beside_forward
    assert [line for line in lines[forward:end] if " " not in line] == beside_backward
    assert forward <= middle and lines[end + 1 :] == afterwards


def test_an_iteration_raises_the_error_of_a_phase() -> None:
    def fails() -> None:
        raise RuntimeError("no such row")

    stand_in: Any = EventLog()
    points: tuple[StepPoint, ...] = ("batch", "forward", "backward")
    for after in points:
        phase = Phase("counts", fails, after)
        with pytest.raises(RuntimeError, match="no such row"):
            OverlappedIteration([phase], "early", stand_in, torch.device("cpu")).run()


@pytest.mark.parametrize(
    ("transfers", "after_passes"),
    [
        ("early", ["counts", "side waits for forward", "ids", "side waits for compute", "values"]),
        (
            "late",
            ["side waits for forward", "host waits for compute", "side waits for compute", "counts", "ids", "values"],
        ),
        ("beside", ["counts", "ids", "values", "side waits for forward", "side waits for compute"]),
    ],
)
def test_streams_and_the_host_wait(transfers: str, after_passes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    log: Any = EventLog()
    log.forward, log.backward = (lambda: log.lines.append("forward")), (lambda: log.lines.append("backward"))
    side, compute = LoggedStream(log.lines, "side"), LoggedStream(log.lines, "compute")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    phases = [log.phase("counts", after="batch"), log.phase("ids", after="forward"), log.phase("values")]
    OverlappedIteration(phases, transfers, log, torch.device("cuda")).run()
    assert log.lines[:3] == ["side waits for compute", "forward", "backward"]
    assert log.lines[3:] == [*after_passes, "compute waits for side"]
