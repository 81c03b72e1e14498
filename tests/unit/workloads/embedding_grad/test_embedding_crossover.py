"""Bytes by formula, the crossover predicted and found between measurements, and the report of both."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.embedding_grad import context, problem
from tpbench.report.command import main as report
from tpbench.report.plots import style
from tpbench.report.plots.panels import draw_panels
from tpbench.results.read import plain_rows
from tpbench.results.write import write_row
from tpbench.tables import Document, as_markdown
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs
from tpbench.workloads.embedding_grad.problem import expected_density
from tpbench.workloads.embedding_grad.traffic import crossover, crossover_study, formulas

H200 = {
    "all_to_all_gb_per_s": 380.0, "reduce_scatter_gb_per_s": 304.0, "copy_gb_per_s": 4230.0, "latency_ms": 0.012,
    "upload_gb_per_s": 50.0,
}  # fmt: skip


def distinct_rows(table_rows: int, tokens: int) -> float:
    """The rows that uniform tokens are expected to touch."""
    return table_rows * float(
        expected_density({"table_rows": table_rows, "tokens": tokens, "accumulate": 1, "distribution": "uniform"})
        or 0.0
    )


def test_the_record_sends_what_was_published() -> None:
    assert formulas.dense_reduce_scatter(251_520, 768 * 2, 8) == pytest.approx(338e6, rel=1e-3)
    assert formulas.dense_all_reduce(251_520, 768 * 2, 8) == 2 * formulas.dense_reduce_scatter(251_520, 768 * 2, 8)
    for tokens, density in ((32_768, 0.12), (98_304, 0.32)):
        assert distinct_rows(251_520, tokens) / 251_520 == pytest.approx(density, abs=0.005)


def test_counted_rows_and_the_even_formula_agree() -> None:
    """Hashed rows spread evenly enough over owners for the closed formula."""
    inputs = EmbeddingGradInputs(problem(table_rows=20_001, width=8, tokens=4000), context(ranks=4))
    touched = distinct_rows(20_001, 8000)
    counted = formulas.sparse_all_to_all(inputs.counts, inputs.row_bytes)
    assert counted == pytest.approx([touched * 3 / 4 * (16 + 4) + 8 * 4] * 4, rel=0.03)
    gathered = formulas.sparse_all_gather(inputs.counts, inputs.row_bytes)
    assert gathered == pytest.approx([touched * 3 * (16 + 8)] * 4, rel=0.03)


def test_the_prediction_is_where_both_take_equally_long() -> None:
    rows, row_bytes, ranks = 251_520, 1536, 4
    rho = crossover.predicted(rows, row_bytes, ranks, **H200)
    wire = rho * rows * row_bytes * 3 / 4
    sparse_ns = wire * (1 + 4 / 1536) / 380 + 5 * wire / 4230 + 5 * 0.012e6 + rho * rows * 4 / 50
    assert sparse_ns == pytest.approx(rows * row_bytes * 3 / 4 / 304)
    assert 0.7 < rho < crossover.predicted(rows, row_bytes, ranks, **{**H200, "upload_gb_per_s": None}) < 0.9
    assert crossover.predicted(rows, row_bytes, ranks, **{**H200, "latency_ms": 10.0}) == 0.0
    assert crossover.predicted(rows, row_bytes, ranks, **{**H200, "all_to_all_gb_per_s": 4e3}) == 1.0


@given(at=st.floats(0.05, 0.95), slope=st.floats(0.1, 10), start=st.floats(0, 1))
def test_a_straight_lines_crossover_is_found(at: float, slope: float, start: float) -> None:
    points = [(density / 10, start + slope * density / 10) for density in range(11)]
    dense_ms = start + slope * at
    assert crossover.measured(points[::-1], dense_ms) == pytest.approx(at)
    assert crossover.from_line(points[2], points[8], dense_ms) == pytest.approx(at)


def test_what_was_not_reached_is_not_made_up() -> None:
    assert crossover.measured([(0.1, 1.0), (0.5, 2.0)], 3.0) is None
    assert crossover.measured([(0.1, 1.0), (0.5, 2.0)], 0.5) is None
    assert crossover.from_line((0.2, 1.0), (0.8, 1.0), 2.0) == float("inf")
    assert crossover.from_line((0.2, 1.0), (0.8, 0.9), 0.5) == 0.0


def row(variant: str, density: float, ms: float, **more: Any) -> dict[str, Any]:
    return {
        "workload": "embedding_grad", "status": "ok", "interpreted": False, "variant": variant, "density": density,
        "time_ms": 9 * ms, "device_ms": ms, "gpu_name": "H200", "cpu_model": "x", "dtype": "bfloat16", "dp_size": 4,
        "table_rows": 251_520, "width": 768, "overlap_ms": 0.0, "transfers": "early", "merge": "triton", "pinned": True,
        "distribution": "fixed", "predicted_crossover": 0.63, "started_at": pd.Timestamp("2026-11-20", tz="UTC"),
        "graph": False, "index": "none", "other_mib": 0.0, "transfer_order": "passes",
        "driver_version": "580.1", "nccl_version": "2.28.9", "torch_version": "2.11.0+cu130",
        **more,
    }  # fmt: skip


def speedups(frame: pd.DataFrame) -> pd.DataFrame:
    """The study's times as a frame, with a column for each field of a group."""
    found = crossover_study.density_times(plain_rows(frame))
    return pd.DataFrame([
        {**dict(zip(crossover_study.GROUP, each.group, strict=True)), **vars(each), "head": each.variant,
         "speedup": each.speedup}
        for each in found
    ])  # fmt: skip


def crossovers(frame: pd.DataFrame) -> pd.DataFrame:
    """The study's crossovers as a frame."""
    ends = crossover_study.crossovers(crossover_study.density_times(plain_rows(frame)))
    return pd.DataFrame([
        {**dict(zip(crossover_study.GROUP, each.group, strict=True)), **vars(each), "head": each.variant,
         "prediction error": each.error}
        for each in ends
    ])  # fmt: skip


def markdown(frame: pd.DataFrame) -> str:
    return as_markdown(Document(crossover_study.tables(plain_rows(frame))))


def draw(frame: pd.DataFrame) -> Any:
    picture = crossover_study.picture(plain_rows(frame))
    with style.drawing("test"):
        return picture and draw_panels(picture)


@pytest.fixture
def frame() -> pd.DataFrame:
    """A sparse exchange that takes 0.1 ms and 1.4 ms a whole table, against 0.94 ms: they cross at 60%."""
    rows = [row("sparse_all_to_all", density, 0.1 + 1.4 * density) for density in (0.1, 0.5, 0.9)]
    rows += [row("sparse_all_to_all", 0.5, 2.0, merge="index_add"), row("sparse_auto", 0.9, 0.95)]
    rows += [row("dense_reduce_scatter", 0.1, 0.94), row("dense_all_reduce", 0.1, 1.88)]
    rows += [row("sparse_all_to_all", 0.2, 70.0, interpreted=True), row("sparse_all_to_all", 0.3, 1.0, status="wrong")]
    old = pd.Timestamp("2026-11-01", tz="UTC")
    return pd.DataFrame([*rows, row("sparse_all_to_all", 0.1, 5.0, started_at=old)])


def test_speedups_are_over_the_dense_reduce_scatter(frame: pd.DataFrame) -> None:
    found = speedups(frame).set_index(["head", "density"])["speedup"]
    assert len(found) == 6  # interpreted, wrong and superseded rows do not count
    assert found["sparse_all_to_all", 0.1] == pytest.approx(0.94 / 0.24)
    assert found["sparse_all_to_all merge=index_add", 0.5] == pytest.approx(0.47)
    assert found["dense_all_reduce", 0.1] == pytest.approx(0.5)


def test_crossovers_are_measured_beside_their_prediction(frame: pd.DataFrame) -> None:
    ends = crossovers(frame).set_index("head")
    assert set(ends.index) == {"sparse_all_to_all"}  # the other merge was measured at one density
    assert ends.loc["sparse_all_to_all", "measured"] == pytest.approx(0.6)
    assert ends.loc["sparse_all_to_all", "prediction error"] == pytest.approx(0.05)
    assert ends.loc["sparse_all_to_all", "measured_range"] == ""


@pytest.mark.parametrize(("ms", "said"), [(0.3, "none up to 90%"), (1.0, "dense from 10% on")])
def test_where_no_crossover_was_reached(frame: pd.DataFrame, ms: float, said: str) -> None:
    level = frame.assign(device_ms=frame["device_ms"].where(frame["variant"] != "sparse_all_to_all", ms))
    assert pd.isna(crossovers(level).iloc[0]["measured"])
    assert f"| sparse_all_to_all, width 768, 4 ranks, fixed | {said} | 63% | - |" in markdown(level)


def test_the_crossover_by_wall_clock_stands_beside_that_of_device_times(frame: pd.DataFrame) -> None:
    """The host's search for rows adds to the wall time of a sparse exchange only."""
    assert "| 60% | 63% | 5% | 60% |" in markdown(frame)  # wall times are device times, nine times as long
    sparse = frame["variant"] == "sparse_all_to_all"
    searched = frame.assign(time_ms=frame["time_ms"] + 9 * 0.28 * sparse)
    assert "| 60% | 63% | 5% | 40% |" in markdown(searched)
    drawn = crossover_study.picture(plain_rows(searched))
    assert drawn is not None
    points = {each.dashed: dict(each.points) for each in drawn.panels[0].lines if each.label == "sparse_all_to_all"}
    assert points[False][50.0] == pytest.approx(0.94 / 0.8) and points[True][50.0] == pytest.approx(0.94 / 1.08)
    never = frame.assign(time_ms=frame["time_ms"] + 9 * sparse)
    assert "| 60% | 63% | 5% | dense from 10% on |" in markdown(never)


def test_what_the_formula_is_not_about_has_no_prediction(frame: pd.DataFrame) -> None:
    pushed = frame.assign(variant=frame["variant"].replace("sparse_all_to_all", "sparse_symmetric"))
    end = crossovers(pushed).set_index("head").loc["sparse_symmetric"]
    assert end["measured"] == pytest.approx(0.6)
    assert pd.isna(end["predicted"]) and pd.isna(end["prediction error"])


def test_distributions_are_not_mixed(frame: pd.DataFrame) -> None:
    """A sparse exchange is slower if one rank owns all rows: its points belong to no other distribution's line."""
    skewed = [row("sparse_all_to_all", density, 0.1 + 2 * density, distribution="one_owner") for density in (0.2, 0.7)]
    skewed.append(row("dense_reduce_scatter", 0.2, 0.9, distribution="one_owner"))
    mixed = pd.concat([frame, pd.DataFrame(skewed)])
    alone, both = speedups(frame), speedups(mixed)
    of_fixed = both[both["distribution"] == "fixed"].reset_index(drop=True)
    pd.testing.assert_frame_equal(of_fixed, alone)
    ends = crossovers(mixed).set_index("distribution")["measured"]
    assert ends["fixed"] == pytest.approx(0.6) and ends["one_owner"] == pytest.approx(0.4)
    pytest.importorskip("matplotlib")
    figure = draw(pd.concat([frame, pd.DataFrame(skewed)]))
    assert figure is not None and len(figure.axes) == 2


def test_a_stand_in_is_named_and_not_drawn_beside_exchanges_alone(frame: pd.DataFrame) -> None:
    """The formula is of an exchange alone, and beside a stand-in a time is nearly all the stand-in's."""
    beside = frame.assign(overlap_ms=5.0, transfers="late", device_ms=frame["device_ms"] + 5)
    text = markdown(pd.concat([frame, beside]))
    assert "| sparse_all_to_all, width 768, 4 ranks, fixed | 60% | 63% | 5% |" in text
    assert "| sparse_all_to_all, width 768, 4 ranks, fixed, overlap_ms=5, transfers=late | 60% | - | - |" in text
    pytest.importorskip("matplotlib")
    for drawn, title in ((pd.concat([frame, beside]), "fixed"), (beside, "fixed, overlap_ms=5, transfers=late")):
        figure = draw(drawn)
        assert figure is not None
        assert [axes.get_title() for axes in figure.axes] == [f"251520 x 768, 4 ranks, {title}"]


def test_rows_among_other_transfers_and_with_an_index_are_groups_of_their_own(frame: pd.DataFrame) -> None:
    others = frame.assign(overlap_ms=5.0, other_mib=13.5, transfer_order="last", device_ms=frame["device_ms"] + 5)
    index = frame.assign(overlap_ms=5.0, index="late", device_ms=frame["device_ms"] + 6)
    text = markdown(pd.concat([frame, others, index]))
    size = "| sparse_all_to_all, width 768, 4 ranks, fixed"
    for beside in ("other_mib=13.5, transfer_order=last", "index=late"):
        assert f"{size}, overlap_ms=5, transfers=early, {beside} | 60% | - | - |" in text
    assert f"{size} | 60% | 63% | 5% |" in text


def test_dense_rows_of_the_same_density_come_first(frame: pd.DataFrame) -> None:
    """Else the median of all."""
    more = [row("dense_reduce_scatter", density, ms) for density, ms in ((0.5, 0.7), (0.7, 1.3))]
    found = speedups(pd.concat([frame, pd.DataFrame(more)])).set_index(["head", "density"])["dense_ms"]
    assert found["sparse_all_to_all", 0.5] == 0.7 and found["sparse_all_to_all", 0.1] == 0.94
    assert found["sparse_all_to_all", 0.9] == 0.94  # of 0.7, 0.94, 1.3


def test_a_replayed_dense_row_is_no_baseline(frame: pd.DataFrame) -> None:
    """Most sparse exchanges cannot be replayed."""
    later = pd.Timestamp("2026-11-21", tz="UTC")
    names = ("dense_reduce_scatter", "dense_all_reduce")
    replayed = [row(name, 0.1, 0.47, graph=True, started_at=later) for name in names]
    old = row("sparse_all_to_all", 0.7, 1.08, graph=None)  # from before there was such a column
    found = speedups(pd.concat([frame, pd.DataFrame([*replayed, old])])).set_index(["head", "density"])
    alone = speedups(frame).set_index(["head", "density"])
    pd.testing.assert_frame_equal(found.loc[alone.index], alone)
    assert len(found) == len(alone) + 3
    assert found.loc[("dense_reduce_scatter graph=true", 0.1), "speedup"] == pytest.approx(2)
    assert found.loc[("dense_all_reduce graph=true", 0.1), "dense_ms"] == 0.94


@pytest.mark.parametrize("name", ["driver_version", "nccl_version", "torch_version"])
def test_software_is_not_mixed_but_days_are(frame: pd.DataFrame, name: str) -> None:
    """A speed-up, and a line between densities, come from rows of one version."""
    later = frame["started_at"] + pd.Timedelta(days=1)
    newer = frame.assign(**{name: "99", "device_ms": 2 * frame["device_ms"], "started_at": later})
    both = speedups(pd.concat([frame, newer]))
    assert len(both) == 2 * len(speedups(frame))
    assert sorted(both["dense_ms"].unique()) == [0.94, 1.88]
    text = markdown(pd.concat([frame, newer]))
    assert text.count("| 10% | 0.50x | 3.92x | - | - |") == 2
    was, called = str(frame[name].iloc[0]), crossover_study.SOFTWARE[name]
    assert text.count(f"{called} {was}") == text.count(f"{called} 99") == 2  # a heading and a crossover each
    assert "| sparse_all_to_all, width 768, 4 ranks, fixed | 60%" in markdown(frame)  # where nothing differs
    another_day = row("sparse_all_to_all", 0.7, 1.08, started_at=later.iloc[0])
    assert speedups(pd.concat([frame, pd.DataFrame([another_day])])).groupby(list(crossover_study.GROUP)).ngroups == 1


def test_what_has_no_dense_row_is_said_and_no_empty_table(frame: pd.DataFrame) -> None:
    lone = [
        row(name, density, 0.5, distribution="zipf")
        for name in ("sparse_auto", "sparse_symmetric")
        for density in (0.1, 0.3)
    ]
    text = markdown(pd.concat([frame, pd.DataFrame(lone)]))
    heading, sentence, following = text[text.index("distribution zipf") :].split("\n\n")[:3]
    assert heading == "distribution zipf**"
    assert sentence.startswith("- No row of dense_reduce_scatter was measured there: there is nothing to compare")
    assert sentence.endswith("compare sparse_auto, sparse_symmetric with.")
    assert following == "**density at which dense_reduce_scatter becomes faster**"
    assert "| density |\n" not in text and text.count("| density |") == 1
    assert markdown(pd.DataFrame(lone)).count("\n") == 3  # nothing but that


def test_both_as_tables_and_as_a_picture(frame: pd.DataFrame) -> None:
    text = markdown(frame)
    assert "| 10% | 0.50x | 3.92x | - | - |" in text
    assert "| sparse_all_to_all, width 768, 4 ranks, fixed | 60% | 63% | 5% |" in text
    pytest.importorskip("matplotlib")
    figure = draw(frame)
    assert figure is not None and len(figure.axes) == 1
    assert draw(frame[frame["variant"] == "dense_reduce_scatter"]) is None
    assert speedups(frame[:0]).empty


def stored(folder: Path, **changes: Any) -> None:
    rows = [row("sparse_all_to_all", density, 0.1 + 1.4 * density) for density in (0.1, 0.5, 0.9)]
    for index, each in enumerate([*rows, row("dense_reduce_scatter", 0.1, 0.94)]):
        write_row({**each, "device": "cuda", "key": str(index), **changes}, folder, f"r{index}")


def test_the_report_prints_and_draws_the_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(tmp_path)
    command = [str(tmp_path), "--study", "crossover"]
    for form, said in (("text", "3.92x"), ("markdown", "| 60% | 63% | 5% |"), ("csv", ",10%,3.92x,")):
        assert report([*command, "--format", form]) == 0
        assert said in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    for form, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        file = tmp_path / f"crossover.{form}"
        assert report([*command, "--format", form, "-o", str(file)]) == 0
        assert file.read_bytes().startswith(start)
    assert b"251520 x 768, 4 ranks, fixed" in file.read_bytes()
    assert report([*command, "--variant", "dense_reduce_scatter", "--format", "svg"]) == 2
    assert "these rows have nothing to draw for the study crossover" in capsys.readouterr().err
    assert report([*command, "--variant", "dense_reduce_scatter"]) == 2
    assert "no rows for the study crossover, which is of embedding_grad" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["text", "markdown", "csv"])
def test_text_of_a_row_is_harmless(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    stored(tmp_path, gpu_name="=cmd\x1b[31m\u202e <script>\r\n# **b**", distribution="=cmd|\x07")
    assert report([str(tmp_path), "--study", "crossover", "--format", form]) == 0
    printed = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\u202e", "\r"} & set(printed)
    if form == "markdown":
        assert "<script>" not in printed and "**b**" not in printed
    if form == "csv":
        cells = [value for line in csv.DictReader(io.StringIO(printed)) for value in line.values()]
        assert any("cmd" in value for value in cells) and not any(value.startswith("=") for value in cells)
