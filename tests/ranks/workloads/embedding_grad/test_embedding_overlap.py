"""Transfers beside a stand-in forward and backward: what is done when, on the device and on the host."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.support.embedding_grad import HERE, FixedStopwatch, context, prepared, problem
from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tpbench.workloads.embedding_grad import WORKLOAD
from tpbench.workloads.embedding_grad.bench import setup
from tpbench.workloads.embedding_grad.exchange import After, Phase
from tpbench.workloads.embedding_grad.overlap import FORWARD, Overlap, StandIn

PASS_S = 0.05


class Diary:
    """Says when each began or ended. A pass lasts long, so that what may begin beside it has."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def phase(self, name: str, **more: Any) -> Phase:
        return Phase(name, lambda: self.lines.append(name), **more)

    def forward(self) -> None:
        self._long("forward")

    def backward(self) -> None:
        self._long("backward")

    def _long(self, name: str) -> None:
        self.lines.append(f"{name} begins")
        time.sleep(PASS_S)
        self.lines.append(f"{name} ends")


@pytest.mark.parametrize(
    ("transfers", "at_once", "beside_backward", "afterwards"),
    [
        ("early", ["counts"], ["ids"], ["values", "merge"]),
        ("late", [], [], ["counts", "ids", "values", "merge"]),
        ("beside", ["counts", "ids", "values", "merge"], [], []),
    ],
)
def test_each_is_done_at_its_point(
    transfers: str, at_once: list[str], beside_backward: list[str], afterwards: list[str]
) -> None:
    diary: Any = Diary()
    phases = [diary.phase("counts", after="batch"), diary.phase("ids", after="forward")]
    phases += [diary.phase("values"), diary.phase("merge")]
    Overlap(phases, transfers, diary, torch.device("cpu")).run()
    lines = diary.lines
    forward, middle, end = (lines.index(each) for each in ("forward ends", "backward begins", "backward ends"))
    assert [each for each in lines[:forward] if " " not in each] == at_once
    assert [each for each in lines[forward:end] if " " not in each] == beside_backward
    assert forward <= middle and lines[end + 1 :] == afterwards


def test_a_phases_failure_is_the_iterations() -> None:
    def fails() -> None:
        raise RuntimeError("no such row")

    stand_in: Any = Diary()
    points: tuple[After, ...] = ("batch", "forward", "backward")
    for after in points:
        phase = Phase("counts", fails, after)
        with pytest.raises(RuntimeError, match="no such row"):
            Overlap([phase], "early", stand_in, torch.device("cpu")).run()


def of_variant(here: Rank, name: str) -> dict[str, str]:
    exchange = prepared(here, problem(), name)[2]
    return {phase.name: phase.after for phase in exchange.phases}


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
@pytest.mark.parametrize("name", sorted({"sparse_all_to_all", "sparse_all_gather", "sparse_auto"} & set(HERE)))
def test_an_exchange_has_three_points(name: str) -> None:
    for said in run_on_ranks(2, of_variant, name):
        assert said.pop("counts") == "batch" and said.pop("ids") == "forward"
        assert set(said.values()) == {"backward"}


def overlapped(here: Rank, transfers: str) -> tuple[float, float, dict[str, Any]]:
    """The stand-in asked for, an iteration's wall ms, and what is said of it."""
    cell = problem(overlap_ms=20.0, transfers=transfers)
    session = setup(cell, WORKLOAD.variants["sparse_all_to_all"], context(here))
    taken = session.stopwatch.ms(session.step, session.restore, on_host=True)
    columns = session.check().columns
    return cell.overlap_ms, taken, {**columns, **session.details({**columns, "copy_gb_per_s": 10.0, "time_ms": taken})}


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
@pytest.mark.parametrize("transfers", ["early", "late", "beside"])
def test_an_iteration_has_the_whole_stand_in(transfers: str) -> None:
    for asked, taken, columns in run_on_ranks(2, overlapped, transfers):
        least = (1 + FORWARD) * asked * (0.9 if torch.cuda.is_available() else 1.0)  # made of whole products there
        assert columns["stand_in_ms"] >= least
        assert taken >= least
        assert columns["exposed_ms"] == pytest.approx(taken - columns["stand_in_ms"])


class Stream:
    """Notes what the host asks of it. The device never comes into it."""

    def __init__(self, lines: list[str], name: str) -> None:
        self.lines, self.name = lines, name

    def wait_stream(self, other: Stream) -> None:
        self.lines.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.lines.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        return self.lines[-1]

    def synchronize(self) -> None:
        self.lines.append(f"host waits for {self.name}")


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
    diary: Any = Diary()
    diary.forward, diary.backward = (lambda: diary.lines.append("forward")), (lambda: diary.lines.append("backward"))
    side, compute = Stream(diary.lines, "side"), Stream(diary.lines, "compute")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    phases = [diary.phase("counts", after="batch"), diary.phase("ids", after="forward"), diary.phase("values")]
    Overlap(phases, transfers, diary, torch.device("cuda")).run()
    assert diary.lines[:3] == ["side waits for compute", "forward", "backward"]
    assert diary.lines[3:] == [*after_passes, "compute waits for side"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("transfers", ["early", "late", "beside"])
def test_on_a_gpu_late_is_late_for_the_host_too(transfers: str) -> None:
    device = torch.device("cuda")
    stopwatch: Any = FixedStopwatch()
    stand_in: Any = StandIn(20.0, device, stopwatch)  # 2000 products: some 20 ms or more
    compute = torch.cuda.current_stream(device)
    passed: dict[str, bool] = {}
    ended: list[torch.cuda.Event] = []
    backward = stand_in.backward

    def noted() -> None:
        backward()
        ended.append(compute.record_event())

    stand_in.backward = noted

    def phase(name: str, **more: Any) -> Phase:
        return Phase(name, lambda: passed.update({name: ended[-1].query()}), **more)

    phases = [phase("counts", after="batch"), phase("ids", after="forward"), phase("values")]
    overlap = Overlap(phases, transfers, stand_in, device)
    for _ in range(2):  # the first loads kernels
        overlap.run()
        torch.cuda.synchronize(device)
    late = transfers == "late"
    assert passed == {"counts": late, "ids": late, "values": late}
    # What nobody could have done earlier is queued ahead, as under transfers=early.
    Overlap([phase("reduce")], transfers, stand_in, device).run()
    assert not passed["reduce"]
