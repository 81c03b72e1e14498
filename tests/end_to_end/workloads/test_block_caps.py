"""The file of block caps follows from the committed rows."""

import json
from pathlib import Path

from tests.support.command import ROOT, tpbench
from tests.support.synthetic import cell, write

PROGRAM = ("scripts/choose_block_caps.py",)


def test_the_block_caps_are_those_of_the_committed_rows() -> None:
    done = tpbench("tpbench/kernels/rows", program=PROGRAM, cwd=ROOT)
    assert done.stdout == (ROOT / "tpbench/kernels/block_caps.json").read_text()


def test_each_gpu_has_the_smallest_of_its_fastest_caps(tmp_path: Path) -> None:
    """If a cell was measured twice, the newest row counts."""

    def rows(name: str, *changes: dict[str, object]) -> str:
        made = [cell("triton_tp", 32768, 1, **{"algorithm": "two_reads", **each}) for each in changes]
        return str(write(made, tmp_path / name, name))

    times = ((4096, 0.1), (8192, 0.2), (16384, 0.2), (4096, 0.3))
    one, automatic = rows("one", *({"block_cap": cap, "device_ms": ms} for cap, ms in times)), rows("automatic", {})
    other = rows("other", {"block_cap": 4096, "gpu_name": "A100"})
    chosen = json.loads(tpbench(one, other, program=PROGRAM, cwd=ROOT).stdout)
    caps = {machine["measured_on"]["gpu_name"]: machine["caps"]["two_reads"] for machine in chosen}
    assert {gpu: list(by_loss.values()) for gpu, by_loss in caps.items()} == {
        "A100": [{"32768": 4096}],
        "NVIDIA H200": [{"32768": 8192}],
    }
    older = rows("older", {"block_cap": 4096, "torch_version": "2.10"})
    for folders, reason in (((automatic,), "no rows of triton_tp"), ((one, older), "differ in torch_version")):
        done = tpbench(*folders, program=PROGRAM, cwd=ROOT)
        assert done.returncode == 2 and reason in done.stderr
