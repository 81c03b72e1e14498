"""Attempts on this host, with fake ranks: each cell ends once, even if its torchrun fails."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.launcher_rows import cell
from tpbench.launcher import torchrun
from tpbench.launcher.attempt import Attempt
from tpbench.launcher.devices import Lease
from tpbench.launcher.host import Host, problem_of
from tpbench.launcher.options import SweepOptions
from tpbench.worker.task import PROGRESS_FILE, TASK_FILE, JsonLines, Task

QUIET: Any = SimpleNamespace(show=lambda *_: None, blocked=lambda *_: None, tick=lambda: None)
"""A display that shows nothing."""


class FakeRanks:
    """The ranks of a torchrun, which run their tasks as soon as somebody looks. `fates`: by the cell's index."""

    fates: ClassVar[dict[int, str]] = {}
    started: ClassVar[list[list[int]]] = []

    def __init__(self, command: list[str], *_: Any) -> None:
        self.file, self.code = Path(command[-1]), None
        self.agent: Any = self
        self.lines, self.progress = JsonLines(self.file), JsonLines(self.file.with_name(PROGRESS_FILE))

    def poll(self) -> int | None:
        if self.code is None and self.file.name == TASK_FILE:
            self.code = self.run([str(self.file)]) or 0
        for files in self.lines.read() if self.code is None else ():
            self.code = self.run(files)
        return self.code

    def run(self, files: list[str]) -> int | None:
        tasks = [Task.load(Path(file)) for file in files]
        self.started.append([task.columns["cell"] for task in tasks])
        for place, task in enumerate(tasks):
            self.progress.append(place)
            fate = self.fates.get(task.columns["cell"], "ok")
            alone = len(tasks) == 1
            if fate == "killed":
                return 1
            if fate == "raises":
                task.result("error", "it broke").save(task.folder)
                return 1
            if fate.startswith("crowded") and not alone:
                task.result("oom", "no memory").save(task.folder)
                if fate == "crowded in a step":
                    return 1
        for task in tasks:
            task.result("ok", time_ms=1.0).save(task.folder)
        leaves = any(self.fates.get(task.columns["cell"]) == "leaves tensors" for task in tasks)
        self.progress.append("tensors are left" if leaves else "")
        return 0 if leaves else None

    def end(self) -> None:
        self.code = self.code if self.code is not None else -15


def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cells: list[Any], fates: dict[int, str], **options: Any
) -> list[Attempt]:
    """Run cells with these fates, and return their attempts as they end."""
    monkeypatch.setattr(torchrun, "ProcessTree", FakeRanks)
    monkeypatch.setattr(torchrun, "SIGNAL_S", 0.0)
    monkeypatch.setattr(FakeRanks, "fates", fates)
    monkeypatch.setattr(FakeRanks, "started", [])
    sweep = folder / "sweeps" / "S"
    sweep.mkdir(parents=True)
    attempts = [Attempt.plan(each, sweep, {}) for each in cells]
    return list(Host(SweepOptions(reuse=True, **options)).run(attempts, QUIET))


fates = st.lists(
    st.sampled_from(["ok", "killed", "raises", "crowded in the set-up", "crowded in a step", "leaves tensors"]),
    min_size=2,
    max_size=4,
)


@settings(max_examples=20, deadline=None)
@given(fates)
def test_every_interleaved_cell_ends_once_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, fates: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("fates")
    cells = [cell(at, folder, device="cpu", block_cap=str(4096 << at)) for at in range(len(fates))]
    with pytest.MonkeyPatch.context() as patch:
        ended = run(folder, patch, cells, dict(enumerate(fates)), order="interleaved")
    assert sorted(attempt.cell.index for attempt in ended) == list(range(len(fates)))
    for attempt in ended:
        fate, row = fates[attempt.cell.index], attempt.row
        assert row is not None
        assert row["status"] == ("error" if fate in ("killed", "raises") else "ok")
        if fate.startswith("crowded"):
            alone = str(row["not_interleaved"])
            assert alone.startswith("out of memory beside") or alone == "the sweep runs no other cell of its problem"
        assert bool(row["interleaved"]) != bool(row["not_interleaved"])
    assert not list(folder.rglob("result.json")) and not list(folder.rglob(".result.reserved"))


def test_a_torchrun_takes_the_cells_of_its_key_first_and_the_others_get_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[dict[str, Any]] = [{"tp_size": 2}, {"tp_size": 1}, {"tp_size": 2}, {"memory_limit_gib": 1.0}]
    cells = [cell(at, tmp_path, device="cpu", seed=at, **size) for at, size in enumerate(sizes)]
    ended = run(tmp_path, monkeypatch, cells, {2: "leaves tensors"})
    assert FakeRanks.started == [[0], [2], [1], [3]]
    assert [attempt.row and attempt.row["warm"] for attempt in ended] == [False, True, False, None]
    assert {attempt.status for attempt in ended} == {"ok"}


def test_a_node_does_not_wait_for_one_that_has_ended_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the late node's next attempts would begin too late for the other node, and end as timeouts."""
    monkeypatch.setattr(torchrun, "ProcessTree", FakeRanks)
    monkeypatch.setattr(FakeRanks, "poll", lambda ranks: ranks.code)
    attempt = Attempt.plan(cell(0, tmp_path, device="cpu"), tmp_path / "sweeps" / "S", {}).begin()
    late = torchrun.Torchrun([attempt], Lease(), rendezvous=torchrun.Rendezvous(2, "first:1", "second", 1))
    assert late.poll() == []
    attempt.close("error", "rank 0 broke")
    assert [ended.reason for ended in late.poll()] == ["rank 0 broke"]
    assert late.over


def test_the_same_problem(tmp_path: Path) -> None:
    one = problem_of(cell(0, tmp_path).job)
    assert one == problem_of(cell(1, tmp_path, block_cap="4096").job)
    assert one == problem_of(cell(2, tmp_path, variant="pytorch_tp_manual", compile=True).job)
    for other in ({"vocab": 1001}, {"tp_size": 4}, {"dtype": "float32"}, {"loss": "forward_kl"}, {"device": "cpu"},
                  {"seed": 1}, {"measure": "quick", "time_budget_s": 0.5}):  # fmt: skip
        assert one != problem_of(cell(3, tmp_path, **other).job)


@pytest.mark.parametrize(
    ("start_s", "more", "advice"),
    [
        (4.0, {}, "12 of 15 s went into starting processes; with reuse=true the sweep takes about 7 s"),
        (2.0, {}, ""),
        (4.0, {"warm": False}, ""),
        (4.0, {"status": "error"}, ""),
    ],
)
def test_a_sweep_that_mostly_starts_processes_names_reuse(
    start_s: float, more: dict[str, Any], advice: str, tmp_path: Path
) -> None:
    row = {"status": "ok", "start_s": start_s, "wall_s": 5.0, "warm": None, **more}
    attempts = [replace(Attempt.plan(cell(at, tmp_path), tmp_path, {}), row=row) for at in range(3)]
    assert Host(SweepOptions()).advice(attempts) == advice
    assert Host(SweepOptions()).advice(attempts[:1]) == ""
