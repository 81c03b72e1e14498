"""Which cells share a torchrun on this host, and what a sweep advises."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.launcher_rows import cell
from tpbench.launcher.attempt import Attempt
from tpbench.launcher.host import Host, problem_of
from tpbench.launcher.options import SweepOptions
from tpbench.launcher.torchrun import shared_needs


def test_only_on_a_cpu_do_triton_kernels_need_a_torchrun_of_their_own(tmp_path: Path) -> None:
    for device, number in (("cuda", 1), ("cpu", 2)):
        cells = [cell(0, tmp_path, variant=name, device=device) for name in ("triton_tp", "pytorch_gather")]
        assert len({shared_needs([Attempt.plan(one, tmp_path, {})]) for one in cells}) == number


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
