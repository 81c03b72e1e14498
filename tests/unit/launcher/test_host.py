"""Which cells share a torchrun on this host."""

from dataclasses import replace
from pathlib import Path

from tests.support.launcher_rows import cell
from tpbench.launcher.attempt import Attempt
from tpbench.launcher.host import problem_of
from tpbench.launcher.torchrun import shared_needs
from tpbench.outside.variant import OutsideVariant


def test_only_on_a_cpu_do_triton_kernels_need_a_torchrun_of_their_own(tmp_path: Path) -> None:
    for device, number in (("cuda", 1), ("cpu", 2)):
        cells = [cell(0, tmp_path, variant=name, device=device) for name in ("triton_tp", "pytorch_gather")]
        assert len({shared_needs([Attempt.plan(one, tmp_path, {})]) for one in cells}) == number


def test_files_whose_helpers_may_clash_need_a_torchrun_of_their_own(tmp_path: Path) -> None:
    def needs(file: Path, helper: str = "") -> tuple[object, ...]:
        file.parent.mkdir(exist_ok=True)
        file.write_text(helper and f"import {helper}")
        (file.parent / "helper.py").touch()
        plain = cell(0, tmp_path)
        job = replace(plain.job, outside=OutsideVariant("f.py:a", path=str(file)))
        return shared_needs([Attempt.plan(replace(plain, job=job), tmp_path, {})])

    first = needs(tmp_path / "a/f.py", "helper")
    assert first == needs(tmp_path / "a/g.py", "helper") != needs(tmp_path / "b/f.py", "helper")
    assert needs(tmp_path / "a/h.py") == needs(tmp_path / "b/h.py")


def test_the_same_problem(tmp_path: Path) -> None:
    one = problem_of(cell(0, tmp_path).job)
    assert one == problem_of(cell(1, tmp_path, block_cap="4096").job)
    assert one == problem_of(cell(2, tmp_path, variant="pytorch_tp_manual", compile=True).job)
    for other in ({"vocab": 1001}, {"tp_size": 4}, {"dtype": "float32"}, {"loss": "forward_kl"}, {"device": "cpu"},
                  {"seed": 1}, {"measure": "quick", "time_budget_s": 0.5}):  # fmt: skip
        assert one != problem_of(cell(3, tmp_path, **other).job)
