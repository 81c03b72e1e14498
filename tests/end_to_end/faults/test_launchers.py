"""Several sweeps in one outputs folder."""

import signal
from pathlib import Path

import tpbench as package
from tests.support.command import Running, gone
from tests.support.disturbed_sweeps import SINGLE
from tests.support.held_ranks import Held, wait_for_claims
from tpbench.results.current_rows import MEASURED


def test_two_sweeps_at_once_share_a_cell(tmp_path: Path) -> None:
    both = [Running("-m", f"seed={seeds}", *SINGLE, "resume=true", cwd=tmp_path) for seeds in ("1,2", "3,2")]
    ends = [each.end() for each in both]
    assert [code for code, _ in ends] == [0, 0], ends
    rows = package.load(tmp_path / "outputs")
    assert sorted(rows["seed"]) == [1, 2, 3]
    assert set(rows["status"]) == {"ok"}
    assert rows["sweep_id"].nunique() == 2


def test_cells_of_a_killed_sweep_are_run_by_another(tmp_path: Path) -> None:
    sweep = ("-m", *SINGLE, "seed=1,2", "resume=true", "reuse=true")
    first = Running(*sweep, cwd=tmp_path, env={**Held(tmp_path).env, "TMPDIR": str(tmp_path)})
    family = first.wait_for("importing torch", rank=0) and first.family()  # it has the cells
    second = Running(*sweep, cwd=tmp_path)
    wait_for_claims(second)
    first.process.kill()
    ends = [each.end() for each in (first, second)]
    assert [code for code, _ in ends] == [-signal.SIGKILL, 0], ends
    rows = package.load(tmp_path / "outputs", status=list(MEASURED))
    assert sorted(rows["seed"]) == [1, 2]
    assert gone(family)
    assert not list(tmp_path.glob("tpbench-*"))
