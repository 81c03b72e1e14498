"""A sweep and the rows of its cells, with a fake runner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import tpbench as package
from tests.support.launcher_rows import FACTS, cell
from tpbench.launcher import sweep
from tpbench.launcher.attempt import Outcome, StartAttempt
from tpbench.launcher.display import Display
from tpbench.launcher.options import SweepOptions
from tpbench.launcher.plan import Cell
from tpbench.launcher.target import PlanningTarget, ThisHost


class InstantRunner:
    """Ends each attempt at once as out of memory. The cells of `fail_once` end as error the first time."""

    def __init__(self, fail_once: Sequence[int] = ()) -> None:
        self.fail_once = set(fail_once)
        self.started: list[int] = []

    @property
    def target(self) -> PlanningTarget:
        return ThisHost(gpus=8)

    @property
    def facts(self) -> Mapping[str, Any]:
        return FACTS

    def recover(self, cells: Sequence[Cell]) -> dict[int, str]:
        return {}

    def run(self, cells: Sequence[Cell], begin: StartAttempt, display: Display) -> Iterator[Outcome]:
        for one in cells:
            self.started.append(one.index)
            display.start(one)
            attempt = begin(one)
            attempt.create_folder()
            failing = one.index in self.fail_once
            self.fail_once.discard(one.index)
            yield attempt.close("error" if failing else "oom", "it broke" if failing else None)


def test_a_long_sweep_merges_its_rows_and_still_retries_and_resumes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sweep, "MERGE_AFTER_ROWS", 3)
    cells = [cell(index, tmp_path, seed=index) for index in range(8)]
    runner = InstantRunner(fail_once=[1])
    outcomes = sweep.run_sweep(cells, tmp_path / "logs", SweepOptions(retries=1), runner)
    assert [each.status for each in outcomes] == ["oom"] * 8
    assert runner.started == [*range(8), 1]

    rows = package.load(tmp_path)
    assert sorted(rows["cell"]) == [*range(8)]
    assert set(rows["status"]) == {"oom"}
    # After three rows two that ended are merged, a failed one is kept; after six and after nine three are merged.
    files = [path.name for path in (tmp_path / "rows").glob("*.parquet")]
    assert [name.startswith("merged-") for name in files] == [True] * 3

    again = InstantRunner()
    outcomes = sweep.run_sweep(cells, tmp_path / "again", SweepOptions(resume=True), again)
    assert again.started == []
    assert {each.note for each in outcomes} == {"measured before"}
