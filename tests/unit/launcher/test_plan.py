"""From requests to cells: what runs, what is skipped and why, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tpbench.launcher import plan as planning
from tpbench.launcher.plan import Cell, Request, plan
from tpbench.settings import JobError

CONF = Path(__file__).resolve().parents[3] / "conf"


def cells(*jobs: dict[str, Any], gpus: int, monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    monkeypatch.setattr(planning.machine, "gpu_count", lambda: gpus)
    base = {"variant": "triton_tp", "tokens": 64, "vocab": 1000, "tp_size": 2}
    return plan([Request(index, {**base, **job}, [], [], [CONF]) for index, job in enumerate(jobs)])


@pytest.mark.parametrize(
    ("job", "gpus", "device", "obstacle"),
    [
        ({}, 0, "cpu", None),
        ({}, 4, "cuda", None),
        ({"device": "cpu"}, 4, "cpu", None),
        ({"tp_size": 8}, 4, "cuda", "needs 8 GPUs, found 4"),
        ({"tp_size": 2, "dp_size": 4}, 4, "cuda", "needs 8 GPUs, found 4"),
        ({"tp_size": 8}, 0, "cpu", None),
        ({"device": "cuda"}, 0, "cuda", "needs 2 GPUs, found 0"),
        ({"graph": True}, 0, "cpu", "graph=true needs a CUDA GPU"),
    ],
)
def test_where_a_job_runs(
    job: dict[str, Any], gpus: int, device: str, obstacle: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = cells(job, gpus=gpus, monkeypatch=monkeypatch)
    assert (cell.job.device, cell.obstacle) == (device, obstacle)


def test_a_missing_package_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning.importlib.util, "find_spec", lambda name: None)
    (cell,) = cells({}, gpus=1, monkeypatch=monkeypatch)
    assert cell.obstacle == "needs triton (not installed)"


def test_equal_cells_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    caps = [{"variant": "pytorch_gather", "block_cap": cap} for cap in (4096, 8192)]
    assert [cell.same_as for cell in cells(*caps, gpus=0, monkeypatch=monkeypatch)] == [None, 0]


EMBEDDING = {"variant": "dense_all_reduce", "table_rows": 64, "width": 8, "tp_size": 1, "dp_size": 2}


@pytest.mark.parametrize(
    ("jobs", "said"),
    [
        ([{}, {"vocab": 2000}], ["", ""]),
        ([{"seed": 1}, {"seed": 2}], ["seed=1", "seed=2"]),
        ([{"seed": 1}, {"seed": 2}, {"variant": "pytorch_gather", "seed": 1}], ["seed=1", "seed=2", "seed=1"]),
        ([{"seed": 1, "vocab": 2000}, {"seed": 2}], ["", ""]),  # told apart as they are
        ([{"measure": "quick", "time_budget_s": 1}, {"measure": "thorough"}], ["measure=quick", "measure=thorough"]),
        ([{"graph": True}, {"graph": False}], ["graph=True", "graph=False"]),
        ([{"seed": 1}, {"seed": 1}], ["", ""]),  # the same job
        (
            [{**EMBEDDING, "distribution": one} for one in ("zipf", "uniform")] + [{}],
            ["distribution=zipf", "distribution=uniform", ""],
        ),
    ],
)
def test_cells_are_told_apart_by_what_varies(
    jobs: list[dict[str, Any]], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = cells(*jobs, gpus=2, monkeypatch=monkeypatch)
    assert [str(cell).removeprefix(str(cell.job)).strip() for cell in found] == said


def test_an_option_that_one_of_the_variants_lacks_skips_that_cell_only(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [{"variant": name, "compile": True} for name in ("pytorch_tp_manual", "triton_tp")]
    fine, skipped = cells(*both, gpus=0, monkeypatch=monkeypatch)
    assert fine.obstacle is None
    assert "triton_tp does not take compile=True" in str(skipped.obstacle)


def test_an_option_that_no_variant_of_the_sweep_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match="triton_tp does not take compile=True"):
        cells({"compile": True}, gpus=0, monkeypatch=monkeypatch)


def test_all_complaints_of_all_requests_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError) as caught:
        cells({"tokens": 0}, {"tokens": 0}, {"dtype": "half"}, {}, gpus=0, monkeypatch=monkeypatch)
    assert len(str(caught.value).splitlines()) == 2
