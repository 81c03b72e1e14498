"""Measure the cost of starting a cell with real processes, and check the messages for wrong arguments."""

import re
import subprocess
import sys
from pathlib import Path

from tests.support.command import ROOT, environment

SCRIPT = [sys.executable, str(ROOT / "scripts" / "bench_overhead.py")]


def bench(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SCRIPT, *arguments], capture_output=True, text=True, env=environment(), cwd=cwd)


def test_a_sweep_is_told_by_its_cells_and_as_a_whole(tmp_path: Path) -> None:
    done = bench("--rounds", "1", "--cells", "1", "--tp-size", "1", "--ways", "warm", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    bare, warm = done.stdout.splitlines()
    assert re.fullmatch(r"bare torchrun, empty worker: [\d.]+ s a cell \(1\.00 x bare torchrun\)", bare)
    assert warm.startswith("tpbench, warm (reuse=true): ") and "; a whole sweep of 2 cells: " in warm
    of_the_last_cell, of_each = map(float, re.findall(r"([\d.]+) s a cell", warm))
    assert 0 < of_the_last_cell <= 2 * of_each  # the whole sweep contains its last cell, however busy the machine is
