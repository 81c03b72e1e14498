"""Which cells share a torchrun on this host."""

from pathlib import Path

from tests.support.launcher_rows import cell
from tpbench.launcher.attempt import Attempt
from tpbench.launcher.host import problem_of
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
