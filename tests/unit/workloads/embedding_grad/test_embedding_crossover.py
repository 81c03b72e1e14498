"""Studies of dense and sparse exchanges: the crossover between measurements, the ablation; and committed rows."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.support.command import ROOT
from tests.support.commands import report
from tests.support.embedding_grad import context, problem
from tpbench.measure.run import cost_columns
from tpbench.measure.session import Costs
from tpbench.results.read import load, plain_rows
from tpbench.results.write import write_row
from tpbench.tables import Document, as_markdown
from tpbench.workloads.embedding_grad import ablation, crossover
from tpbench.workloads.embedding_grad.bench import unavoidable_bytes
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs, leaving


def test_uniform_tokens_touch_the_rows_that_the_density_says() -> None:
    """Hashed rows spread evenly over owners."""
    cell = problem(table_rows=20_001, width=8, tokens=4000)
    inputs = EmbeddingGradInputs(cell, context(ranks=4))
    assert inputs.density == pytest.approx(1 - (1 - 1 / 20_001) ** cell.tokens_per_rank, rel=0.03)
    touched = 20_001 * inputs.density
    assert leaving(inputs.counts) == pytest.approx([touched * 3 / 4] * 4, rel=0.03)


def row(variant: str, density: float, ms: float, **more: Any) -> dict[str, Any]:
    return {
        "label": variant,
        "workload": "embedding_grad", "status": "ok", "interpreted": False, "variant": variant, "density": density,
        "time_ms": 9 * ms, "device_ms": ms, "gpu_name": "H200", "cpu_model": "x", "dtype": "bfloat16", "dp_size": 4,
        "table_rows": 251_520, "width": 768, "overlap_ms": 0.0, "distribution": "fixed",
        "started_at": pd.Timestamp("2026-11-20", tz="UTC"),
        "graph": False, "index": "none", "other_mib": 0.0, "transfer_order": "passes", "accumulate": 1,
        "driver_version": "580.1", "nccl_version": "2.28.9", "torch_version": "2.11.0+cu130",
        **more,
    }  # fmt: skip


def markdown(frame: pd.DataFrame) -> str:
    return as_markdown(Document(crossover.tables(plain_rows(frame))))


def speedups(frame: pd.DataFrame) -> dict[tuple[str, float], float]:
    """Return the speed-ups by device time of the only group by variant and density."""
    (group,) = crossover.groups_of(plain_rows(frame))
    return {
        (str(name), float(density)): ratio  # type: ignore[arg-type]
        for name, ratios in group.by_clock["device_ms"].items()
        for density, ratio in ratios.dropna().items()
    }


OLD = pd.Timestamp("2026-11-01", tz="UTC")
SIZE = "width 768, 4 ranks, fixed"


@pytest.fixture
def frame() -> pd.DataFrame:
    """A sparse exchange that takes 0.1 ms and 1.4 ms a whole table, against 0.94 ms: they cross at 60%."""
    rows = [row("sparse_all_to_all", density, 0.1 + 1.4 * density) for density in (0.1, 0.5, 0.9)]
    rows += [row("sparse_all_to_all", 0.5, 2.0, label="sparse_all_to_all search=host")]
    rows += [row("dense_reduce_scatter", 0.1, 0.94), row("mine", 0.1, 1.88)]
    return pd.DataFrame([*rows, row("sparse_all_to_all", 0.1, 5.0, started_at=OLD)])


def test_speedups_are_over_the_dense_exchange(frame: pd.DataFrame) -> None:
    found = speedups(frame)
    assert len(found) == 5  # superseded rows do not count
    assert found["sparse_all_to_all", 0.1] == pytest.approx(0.94 / 0.24)
    assert found["sparse_all_to_all search=host", 0.5] == pytest.approx(0.47)
    assert found["mine", 0.1] == pytest.approx(0.5)
    text = markdown(frame)
    assert "| 10% | 0.50x | 3.92x | - |" in text
    assert f"| sparse_all_to_all, {SIZE} | 60% | 60% |" in text  # wall times are nine times as long
    assert text.count("width 768, 4 ranks") == 1  # the others were measured at one density


@pytest.mark.parametrize(
    ("device_ms", "wall_ms", "texts"),
    [
        (0.3, 0.0, "none up to 90% | 60%"),
        (1.0, 0.0, "dense from 10% on | 60%"),
        (None, 9 * 0.28, "60% | 40%"),  # the host's search adds to the wall time of a sparse exchange
        (None, 9.0, "60% | dense from 10% on"),
    ],
)
def test_crossovers_are_of_both_clocks(
    frame: pd.DataFrame, device_ms: float | None, wall_ms: float, texts: str
) -> None:
    sparse = frame["variant"] == "sparse_all_to_all"
    frame["time_ms"] += wall_ms * sparse
    if device_ms is not None:
        frame["device_ms"] = frame["device_ms"].where(~sparse, device_ms)
    assert f"| sparse_all_to_all, {SIZE} | {texts} |" in markdown(frame)


def test_the_picture_has_both_clocks(frame: pd.DataFrame) -> None:
    drawn = crossover.picture(plain_rows(frame.assign(time_ms=2 * frame["time_ms"] - 9 * 0.94)))
    assert drawn is not None
    (panel,) = drawn.panels
    lines = {(line.label, line.dashed): dict(line.points) for line in panel.lines}
    assert lines["sparse_all_to_all", False][50.0] == pytest.approx(0.94 / 0.8)
    assert lines["sparse_all_to_all", True][50.0] == pytest.approx(0.94 / (2 * 0.8 - 0.94))
    assert crossover.picture(plain_rows(frame[frame["variant"] == "dense_reduce_scatter"])) is None
    assert crossover.picture(plain_rows(frame.assign(overlap_ms=5.0))) is None, "a training step is no exchange alone"


@pytest.mark.parametrize(
    ("column", "value", "suffix"),
    [("distribution", "uniform", ""), ("driver_version", "99", ", driver 99 NCCL 2.28.9 torch 2.11.0+cu130")],
)
def test_rows_that_cannot_be_compared_are_not_mixed(frame: pd.DataFrame, column: str, value: str, suffix: str) -> None:
    other = frame.assign(**{column: value, "device_ms": 2 * frame["device_ms"]})
    text = markdown(pd.concat([frame, other]))
    assert text.count("| 10% | 0.50x | 3.92x | - |") == 2
    assert f"{suffix} | 60% | 60% |" in text


def test_the_baseline_is_the_median_of_dense_rows(frame: pd.DataFrame) -> None:
    """A replayed row isn't a baseline, because most sparse exchanges cannot be replayed, nor has it a crossover."""
    more = [row("dense_reduce_scatter", density, ms) for density, ms in ((0.5, 0.7), (0.7, 1.3))]
    replayed = [row("dense_reduce_scatter", at, 0.47, label="dense_reduce_scatter graph=true") for at in (0.1, 0.5)]
    added = pd.concat([frame, pd.DataFrame([*more, *replayed, row("sparse_all_to_all", 0.7, 1.08)])])
    found = speedups(added)
    assert found["sparse_all_to_all", 0.7] == 0.94 / 1.08  # the median of 0.7, 0.94, 1.3
    assert found["dense_reduce_scatter graph=true", 0.1] == 2.0
    assert "dense_reduce_scatter graph=true, " not in markdown(added)


def test_the_ablation_names_combinations_without_rows() -> None:
    step = {"distribution": "zipf_bigram", "overlap_ms": 5.0, "tokens": 9, "bytes_communicated": 7.68e6}
    rows = [row("dense_reduce_scatter", 0.2, 1.0, **step, exposed_ms=1.5)]
    rows += [row("sparse_symmetric", 0.2, 1.0, **step, other_mib=1.0, transfer_order="last", exposed_ms=0.25)]
    text = as_markdown(Document(ablation.tables(plain_rows(pd.DataFrame(rows)))))
    assert "| exchange | index | no other transfers | order last |" in text
    assert "| dense_reduce_scatter | none | 1.500 | no row |" in text
    assert "| sparse_symmetric | none | no row | 0.250 |" in text
    assert text.count("no row") == 2  # exchanges, indexes and orders without any row have no line and no column
    assert "no other transfers" not in as_markdown(Document(ablation.tables(plain_rows(pd.DataFrame(rows[1:])))))
    assert "| dense_reduce_scatter | 7.68 | 2.7% | 6.6% |" in text  # the bytes of 3 x 62880 and 3 x 25152 rows


def test_the_report_prints_and_draws_the_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("sparse_all_to_all", density, 0.1 + 1.4 * density) for density in (0.1, 0.5, 0.9)]
    for index, each in enumerate([*rows, row("dense_reduce_scatter", 0.1, 0.94)]):
        del each["label"]
        write_row({**each, "device": "cuda", "key": str(index)}, tmp_path, f"r{index}")
    command = [str(tmp_path), "--study", "crossover"]
    assert report(command) == 0 and "3.92x" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    file = tmp_path / "crossover.svg"
    assert report([*command, "-o", str(file)]) == 0 and b"251520 x 768, 4 ranks, fixed" in file.read_bytes()
    for form in ([], ["--format", "svg"]):  # without a sparse exchange there is nothing to compare
        assert report([*command, "--variant", "dense_reduce_scatter", *form]) == 2
        assert "the study crossover" in capsys.readouterr().err


def test_no_committed_row_is_faster_than_its_floor() -> None:
    rows = plain_rows(load(ROOT / "outputs/reference", workload="embedding_grad", status="ok"))
    with_floor = [row for row in rows if row["floor_ms"] is not None]
    assert {"dense_reduce_scatter", "sparse_all_to_all", "sparse_symmetric"} <= {row["variant"] for row in with_floor}
    for each in with_floor:
        assert each["floor_ms"] <= each["device_ms"], (each["variant"], each["density"])


def test_unavoidable_bytes_are_of_the_busiest_rank() -> None:
    counts = [[5, 2], [1, 3]]  # rank 0 reads 7 rows and writes 5; rank 1 reads 4 and writes 4
    assert unavoidable_bytes(counts, [5, 4], row_bytes=10) == (120, 20)
    for wire_ms, floor_ms in ((0.5, 2.0), (3.0, 3.0)):  # transfers beside memory traffic count once
        costs = Costs(bytes_moved=2 * 10**6, bytes_communicated=0, wire_ms=wire_ms, wire_beside_memory=True)
        assert cost_columns(costs, copy_gb_per_s=1.0)["floor_ms"] == pytest.approx(floor_ms)
