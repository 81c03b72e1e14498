"""The file of block caps follows from the committed rows."""

from __future__ import annotations

from pathlib import Path

from tests.support.command import ROOT, tpbench
from tests.support.synthetic import cell, write

PROGRAM = ("scripts/choose_block_caps.py",)


def test_the_block_caps_are_those_of_the_committed_rows() -> None:
    done = tpbench("tpbench/kernels/rows", program=PROGRAM, cwd=ROOT)
    assert done.stdout == (ROOT / "tpbench/kernels/block_caps.json").read_text()


def test_rows_without_a_choice_are_errors(tmp_path: Path) -> None:
    """If two rows measured the same, the last one counts."""

    def rows(name: str, *changes: dict[str, object]) -> str:
        made = [cell("triton_tp", 32768, 1, **{"algorithm": "two_reads", **each}) for each in changes]
        return str(write(made, tmp_path / name, name))

    measured = [{"block_cap": cap, "device_ms": ms} for cap, ms in ((4096, 0.1), (8192, 0.2), (4096, 0.3))]
    one, automatic = rows("one", *measured), rows("automatic", {})
    other = rows("other", {"block_cap": 4096, "gpu_name": "A100"})
    chosen = tpbench(one, program=PROGRAM, cwd=ROOT).stdout
    assert '"block_cap": 8192, "device_ms": 0.2, "tried": [4096, 8192]' in chosen
    for folders, reason in (((automatic,), "no measured rows"), ((one, other), "differ in gpu_name")):
        done = tpbench(*folders, program=PROGRAM, cwd=ROOT)
        assert done.returncode == 2 and reason in done.stderr
