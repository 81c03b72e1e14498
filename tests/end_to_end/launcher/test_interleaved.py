"""Cells that take turns: in the order A B B A, never two at once, and a fault costs one cell."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tpbench as package
from tests.support.command import ROOT, Running, gone, refused, tpbench
from tests.support.launcher_rows import cell
from tpbench.launcher.cells.attempt import Attempt
from tpbench.launcher.cells.outcome import Outcome
from tpbench.launcher.host.interleaved import InterleavedCells, problem_of
from tpbench.launcher.planning.plan import Cell
from tpbench.measure.interleaving import FOLDER, InterleavedRank, RoundRequest

INTERLEAVED = ("order=interleaved", "reuse=true", "device=cpu", "tp_size=2", "dtype=float32")
VARIANTS = "variant=pytorch_tp_manual,pytorch_gather"


def test_turns_in_the_order_a_b_b_a_and_a_cell_that_needs_all_memory_alone(tmp_path: Path) -> None:
    done = tpbench("-m", VARIANTS, "tokens=1536", "vocab=8192", "memory_limit_gib=0.22,2", "measure=quick",
                   "time_budget_s=60", "max_iterations=4", *INTERLEAVED, cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = package.load(tmp_path / "outputs").set_index(["variant", "memory_limit_gib"])
    manual, gather = rows.loc["pytorch_tp_manual", 2.0], rows.loc["pytorch_gather", 2.0]
    assert (len(rows), manual["status"], gather["status"]) == (4, "ok", "ok")
    assert manual["interleaved"] == gather["interleaved"] and manual["interleaved_cells"] == 2
    assert manual["iterations"] == len(manual["samples_ms"]) == len(manual["round_ms"]) == 4
    assert gather["peak_gib"] > 3 * manual["peak_gib"]  # each its own, though both are there at once

    (sweep,) = (tmp_path / "outputs/sweeps").iterdir()
    held = _held(sweep, {"A": int(manual["cell"]), "B": int(gather["cell"])})
    order = "".join(name for name, _, _ in held)
    rounds = len(gather["round_ms"])
    assert order.startswith(("ABBA" * rounds)[: 2 * rounds])
    assert all(ended <= began for (_, _, ended), (_, began, _) in pairwise(held))

    # With 0.22 GiB the gather runs out of memory: beside the other that means nothing, alone it is a result.
    assert rows.loc["pytorch_tp_manual", 0.22]["status"] == "ok"
    short = rows.loc["pytorch_gather", 0.22]
    assert short["status"] == "oom" and short["not_interleaved"] == "out of memory beside 1 cell of its problem"
    assert rows["interleaved"].notna().sum() == 3


def _held(sweep: Path, cells: dict[str, int]) -> list[tuple[str, int, int]]:
    """Return the name of each measuring cell, with the start and the end of its round."""
    found = []
    for name, index in cells.items():
        folder = sweep / str(index) / FOLDER
        for given_ in folder.glob("[0-9]*.grant"):
            if given_.read_text() == "measure":
                asked = folder / f"{int(given_.stem) + 1}.request"
                found.append((name, given_.stat().st_mtime_ns, asked.stat().st_mtime_ns))
    return sorted(found, key=lambda each: each[1])


IN_ROUND_2 = f"""
import sys, time
def hook(event, arguments):
    while event == "open" and str(arguments[0]).endswith("/2/{FOLDER}/2.grant"):
        time.sleep(0.05)
sys.addaudithook(hook)
"""
"""Rank 0 of cell 2 stays in its round 2 when it reads that it may run the round."""


def test_a_rank_killed_in_its_round_costs_its_own_cell_only(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(IN_ROUND_2)
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    running = Running("-m", VARIANTS, "tokens=64", "vocab=2048", "time_budget_s=60", "precision=0", "seed=1,2",
                      "max_iterations=24", *INTERLEAVED, cwd=tmp_path, env=env)  # fmt: skip
    sweeps = tmp_path / "outputs/sweeps"
    third = running.until(lambda: next(sweeps.glob(f"*/2/{FOLDER}/2.grant"), None), "round 2").parents[1]
    family = running.family()
    (log,) = third.glob("warm/attempt_0/1")
    rank = next(
        each for each in running.workers() if str(log / "stderr.log") in {file.path for file in each.open_files()}
    )
    rank.kill()
    code, output = running.end()
    assert code == 1, output
    rows = package.load(tmp_path / "outputs").set_index("cell")
    assert rows["status"].sort_index().to_dict() == {0: "ok", 1: "ok", 2: "error", 3: "ok"}
    assert "rank 1 ended with signal 9 (SIGKILL)" in rows["reason"][2]
    assert [len(rows["round_ms"][cell]) for cell in (0, 1, 3)] == [24] * 3
    assert rows["interleaved"].nunique() == 2
    assert gone(family)


NOT_INTERLEAVED: list[tuple[list[str], list[str]]] = [
    (["order=interleaved"], ["order=interleaved needs reuse=true"]),
    (
        ["order=interleaved", "reuse=true", "hydra/launcher=torchrun_slurm"],
        ["order=interleaved and reuse=true: works on one host only"],
    ),
    (["order=random", "reuse=true"], ["order=random does not exist (valid: sequential, interleaved)"]),
]


def test_what_cannot_be_interleaved_is_said_at_once(tmp_path: Path) -> None:
    refused([(["-m", VARIANTS, "device=cpu", *options], said) for options, said in NOT_INTERLEAVED], tmp_path)


def test_the_same_problem(tmp_path: Path) -> None:
    one = problem_of(cell(0, tmp_path).job)
    assert one == problem_of(cell(1, tmp_path, block_cap="4096").job)
    assert one == problem_of(cell(2, tmp_path, variant="pytorch_tp_manual", compile=True).job)
    for other in ({"vocab": 1001}, {"tp_size": 4}, {"dtype": "float32"}, {"loss": "forward_kl"}, {"device": "cpu"},
                  {"seed": 1}, {"measure": "quick", "time_budget_s": 0.5}):  # fmt: skip
        assert one != problem_of(cell(3, tmp_path, **other).job)


def test_cells_whose_iterations_are_counted_are_measured_in_one_go(tmp_path: Path) -> None:
    folder = tmp_path / "outputs"
    done = tpbench("-m", "variant=fsdp,ddp", "shape=tiny_train_dp2", "dp_size=1", "steps=2", "warmup_steps=0",
                   "phase_steps=0", "order=interleaved", "reuse=true", "device=cpu", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = package.load(folder)
    assert list(rows["status"]) == ["ok", "ok"] and rows["interleaved"].isna().all()
    assert set(rows["not_interleaved"]) == {"each iteration continues the one before"}


class FakeJob:
    """A cell without processes: it asks for a number of rounds, and measures that many or fails in one."""

    def __init__(self, attempt: Any, script: dict[str, Any], log: list[str]) -> None:
        self.attempt, self.script, self.log, self.deadline = attempt, script, log, 1e18
        self.turns = InterleavedRank(attempt.folder / FOLDER)
        self.rounds = -1

    def poll(self) -> Outcome | None:
        """Do what the schedule granted: measure a round and ask for more, or end."""
        name = self.script["name"]
        if self.script["alone"]:
            return Outcome(self.attempt.cell, None, "alone")
        folder, number = self.turns.folder, self.turns.number
        if self.rounds >= 0:
            file = folder / f"{number - 1}.grant"
            if not file.exists():
                return None
            if file.read_text() == "finish":
                self.log.append(f"{name} ends")
                return Outcome(self.attempt.cell, None, "ended")
            self.log.append(name)
        self.rounds += 1
        if self.rounds == self.script["dies"]:
            return Outcome(self.attempt.cell, None, "died", measure_alone=self.script["crowded"])
        wants = RoundRequest.MORE if self.rounds < self.script["wants"] else RoundRequest.ENOUGH
        wants = RoundRequest.NO_MORE if self.rounds >= self.script["most"] else wants
        (folder / f"{number}.request").write_text(wants)
        self.turns.number += 1
        return None


script = st.fixed_dictionaries(
    {"wants": st.integers(0, 4), "most": st.integers(0, 6), "dies": st.sampled_from([-1, -1, 0, 1, 2]),
     "crowded": st.booleans()}
)  # fmt: skip


@settings(max_examples=60)
@given(st.lists(script, min_size=2, max_size=4))
def test_every_cell_ends_once_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, scripts: list[dict[str, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("turns")
    log: list[str] = []

    def begin(of: Cell) -> Attempt:
        attempt = Attempt.begin(of, folder, {}, number=1)
        attempt.create_folder()
        return attempt

    def submit(attempt: Attempt, number: int) -> Any:
        alone = attempt.task.interleaving is None
        assert not alone or "out of memory" in attempt.task.columns["not_interleaved"]
        return FakeJob(attempt, {**scripts[attempt.cell.index], "alone": alone,
                                 "name": "ABCD"[attempt.cell.index]}, log)  # fmt: skip

    work = InterleavedCells([cell(at, folder) for at in range(len(scripts))], begin, submit)
    ended: list[int] = []
    for _ in range(500):
        ended += [outcome.cell.index for outcome in work.poll()]
        if work.over:
            break
    assert work.over and sorted(ended) == list(range(len(scripts)))
    if all(each["dies"] == -1 and each["most"] >= 4 for each in scripts):
        names = "ABCD"[: len(scripts)]
        rounds = max(each["wants"] for each in scripts)
        assert "".join(each for each in log if len(each) == 1) == (names + names[::-1]) * -(-rounds // 2)
