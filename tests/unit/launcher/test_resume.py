"""Decisions of a resumed sweep: which cells run again, and why."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import tpbench as package
from tests.support.launcher_rows import FACTS, cell, measured
from tpbench.launcher.attempt import discard_rows, new_task, store
from tpbench.launcher.planning.resume import decide
from tpbench.results.current_rows import newest


@pytest.mark.parametrize(
    ("status", "changed", "reason", "runs"),
    [
        ("ok", {}, "measured before", False),
        ("oom", {}, "measured before", False),
        ("wrong", {}, "measured before", False),
        ("error", {}, "failed: error, it broke", True),
        ("timeout", {}, "failed: timeout, it broke", True),
        ("skipped", {}, "skipped before: it broke", True),
        ("ok", {"torch_version": "2.11.0"}, "stale: torch_version was 2.11.0, is 2.13.0", True),
        ("ok", {"triton_version": None}, "stale: triton_version was none, is 3.9.0", True),
        ("ok", {"kernels_version": "xyz"}, "stale: kernels_version was xyz, is abc", True),
        ("ok", {"driver_version": "550.2"}, "stale: driver_version was 550.2, is 600.1", True),
        (
            "ok",
            {"gpu_name": "old", "driver_version": "1"},
            "stale: gpu_name was old, is a GPU, driver_version was 1, is 600.1",
            True,
        ),
        ("ok", {"host": "elsewhere", "cpu_model": "another"}, "measured before", False),
    ],
)
def test_why_a_cell_runs_or_not(status: str, changed: dict[str, Any], reason: str, runs: bool, tmp_path: Path) -> None:
    one = cell(0, tmp_path)
    measured(one, status, None if status == "ok" else "it broke\nin two lines", **changed)
    decision = decide([one], FACTS)[0]
    assert (decision.reason, decision.row is None) == (reason, runs)


def test_a_changed_job_is_another_cell(tmp_path: Path) -> None:
    measured(cell(0, tmp_path))
    found = decide([cell(0, tmp_path), cell(1, tmp_path, seed=5), cell(2, tmp_path, timeout_s=5)], FACTS)
    assert [each.reason for each in found.values()] == ["measured before", "missing: has no row yet", "measured before"]


def test_a_cell_that_still_cannot_run_stays_skipped(tmp_path: Path) -> None:
    one = cell(0, tmp_path, skip_reason="needs 8 GPUs, found 4")
    measured(one, "skipped", "needs 8 GPUs, found 4")
    assert decide([one], FACTS)[0].row is not None


def test_an_old_row_of_the_same_machine_stands_beside_a_newer_one_of_another(tmp_path: Path) -> None:
    one = cell(0, tmp_path)
    measured(one)
    measured(one, gpu_name="another GPU")
    measured(one, "error", "it broke")
    assert decide([one], FACTS)[0].reason == "measured before"


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("liger_kernel 1.2", "measured before"),
        (None, "measured before"),  # a row from before tpbench stored the versions
        ("liger_kernel 1.1", "stale: package_versions was liger_kernel 1.1, is liger_kernel 1.2"),
    ],
)
def test_a_cell_runs_again_if_a_package_of_its_variant_has_changed(
    before: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = cell(0, tmp_path, variant="liger")
    measured(one, package_versions=before)
    monkeypatch.setattr("tpbench.job.versions", lambda modules: ", ".join(f"{each} 1.2" for each in modules))
    assert decide([one], FACTS)[0].reason == reason


def test_a_row_of_other_kernels_than_the_variants_is_stale(tmp_path: Path) -> None:
    ours, torchs = cell(0, tmp_path), cell(1, tmp_path, variant="pytorch_gather")
    version = ours.job.kernels_version
    facts = {name: value for name, value in FACTS.items() if name != "kernels_version"}
    measured(ours)
    measured(torchs)
    assert [each.reason for each in decide([ours, torchs], facts).values()] == [
        f"stale: kernels_version was abc, is {version}", "measured before",
    ]  # fmt: skip
    measured(ours, kernels_version=version)
    assert decide([ours], facts)[0].reason == "measured before"


def test_a_row_replaces_earlier_failures_of_the_same_software_and_hardware(tmp_path: Path) -> None:
    one = cell(0, tmp_path)
    measured(one, "error", "of another machine", gpu_name="another GPU")
    measured(one, "error", "of another torch", torch_version="2.11.0")
    measured(one, "error", "before")
    measured(one, "timeout", "its job never began", gpu_name=None, driver_version=None)
    measured(cell(1, tmp_path, seed=5), "error", "another cell")
    measured(one, "skipped", "too few GPUs then")
    alike = ["before", "its job never began", "too few GPUs then"]
    decision = decide([one], FACTS)[0]
    assert [row["reason"] for row in decision.superseded] == alike
    assert decision.row is None
    measured(one)
    measured(one, "timeout", "after")
    measured(one, "error", "with other kernels", kernels_version="xyz")
    decision = decide([one], FACTS)[0]
    assert (decision.reason, decision.row is None) == ("measured before", False)
    assert [row["reason"] for row in decision.superseded] == [*alike, "after"]


def test_a_report_shows_the_rows_that_a_resumed_sweep_uses(tmp_path: Path) -> None:
    one = cell(0, tmp_path)

    def shown() -> list[str]:
        return [str(each) for each in newest(package.load(tmp_path))["status"]]

    measured(one)
    measured(one, "timeout", "with timeout_s=2")
    measured(one, "skipped", "too few GPUs")
    assert (decide([one], FACTS)[0].reason, shown()) == ("measured before", ["ok"])
    now = {**FACTS, "kernels_version": "xyz"}
    measured(one, "error", "it broke", **now)
    assert (decide([one], now)[0].reason, shown()) == ("failed: error, it broke", ["error"])
    measured(one, **now)
    assert (decide([one], now)[0].reason, shown()) == ("measured before", ["ok"])


def test_a_failed_row_stays_if_its_attempt_cannot_be_abandoned(tmp_path: Path) -> None:
    """Another process would write the row again."""
    one = cell(0, tmp_path)
    logs = tmp_path / "sweeps" / "logs"
    logs.parent.mkdir()
    logs.write_text("no folder")
    measured(one, "error", "it broke", log_dir=str(logs))
    (row,) = decide([one], FACTS)[0].superseded
    with pytest.raises(NotADirectoryError):
        discard_rows(str(tmp_path), [row])
    assert len(package.load(tmp_path)) == 1
    logs.unlink()
    discard_rows(str(tmp_path), [row])
    discard_rows(str(tmp_path), [row])
    assert len(package.load(tmp_path)) == 0


def test_a_clock_that_steps_back(tmp_path: Path) -> None:
    one = cell(0, tmp_path)
    ahead = replace(new_task(one.job, tmp_path, **FACTS), started_at=datetime.now(UTC) + timedelta(hours=1))
    store(ahead.result("error", "it broke"), one.job, tmp_path)  # ended before the clock was set back
    measured(one)
    assert (package.load(tmp_path)["wall_s"] >= 0).all()
    assert decide([one], FACTS)[0].reason == "measured before"
