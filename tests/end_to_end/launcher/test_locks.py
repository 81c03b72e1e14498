"""Locks of sweeps that run at the same time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.command import ROOT, environment
from tests.support.launcher_rows import cell
from tpbench.launcher.devices import CellLocks


def test_locks_exclude_other_processes_and_end_with_their_owner(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    one, two = cell(0, tmp_path), cell(1, tmp_path, seed=1)
    ours = CellLocks([str(tmp_path)])
    assert ours.acquire(one.job)
    probe = (
        "from pathlib import Path; from tests.support.launcher_rows import cell;"
        "from tpbench.launcher.devices import CellLocks;"
        f"folder = Path({str(tmp_path)!r}); claims = CellLocks([str(folder)]);"
        "print(claims.acquire(cell(0, folder).job), claims.acquire(cell(1, folder, seed=1).job), flush=True); input()"
    )
    other = subprocess.Popen([sys.executable, "-c", probe], cwd=ROOT, env=environment(), text=True,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert other.stdout is not None
    assert other.stdout.readline().split() == ["False", "True"]
    assert not ours.acquire(two.job)
    other.kill()
    other.wait()
    assert ours.acquire(two.job)
    ours.close()
