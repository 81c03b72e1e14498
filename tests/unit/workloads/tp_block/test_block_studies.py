"""The studies of the block, from synthetic rows: speed-ups of overlap by tokens and the profile table."""

import csv
import datetime
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tpbench.report.command import main as report
from tpbench.results.write import write_row
from tpbench.tables import Document, as_json
from tpbench.workloads.tp_block.overlap_study import choice, picture, problems, tables

SIZES = {"hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "part": "block", "tp_size": 4}


def row(variant: str, number: int, **changes: Any) -> dict[str, Any]:
    moment = datetime.datetime(2026, 11, 21, 12, 0, number, tzinfo=datetime.UTC)
    made = {
        "workload": "tp_block", "variant": variant, "status": "ok", "device": "cuda", "gpu_name": "NVIDIA H200",
        "tokens": 8192, "dp_size": 1, "dtype": "bfloat16", "save_gathered": True, "signals": "stream", "seed": 0,
        "time_ms": 9.0, "device_ms": 8.0 + number, "forward_ms": 3.0, "backward_ms": 5.0, "loss_value": -0.5,
        "grad_norm": 19.25, "exposed_ms": 0.5, "hidden_share": 0.75, "peak_gib": 1.5, "interpreted": False,
        "started_at": moment, "finished_at": moment, **SIZES,
    }  # fmt: skip
    made |= changes
    return made | {"key": f"{variant}-{made['tokens']}-{made['save_gathered']}"}


def timed(part: str, tokens: int, variant: str, wall: float, device: float, **changes: Any) -> dict[str, Any]:
    facts = {"part": part, "tokens": tokens, "time_ms": wall, "device_ms": device, "graph": False, "layers": 0}
    facts |= {
        f"{clock}_ci_{end}_ms": ms for clock, ms in (("time", wall), ("device", device)) for end in ("low", "high")
    }
    return row(variant, 1, **{**facts, "torch_version": "2.11.0", "warmed_up": True, "hardware": "H200", **changes})


TIMED = [
    *(timed("mlp", tokens, "block_tp", 2.0, 1.0) for tokens in (128, 512, 2048, 8192)),
    timed("mlp", 128, "block_copy_engine", 4.0, 0.8),
    timed("mlp", 512, "block_copy_engine", 4.0, 1.1),
    timed("mlp", 2048, "block_copy_engine", 2.1, 0.8),
    timed("mlp", 8192, "block_copy_engine", 1.6, 0.8),
    timed("mlp", 2048, "block_symm_mem", 2.5, 0.9),
    timed("column", 8192, "block_tp", 1.0, 1.0),
    timed("column", 8192, "block_copy_engine", 1.0, 0.995),
    timed("mlp", 8192, "block_tp", 1.0, 1.0, graph=True),
    timed("mlp", 8192, "block_copy_engine", 0.5, 0.5, graph=True),
    timed("mlp", 8192, "block_no_tp", 9.0, 9.0),
    timed("mlp", 8192, "block_copy_engine", 0.1, 0.1, layers=2),
    timed("mlp", 8192, "former", 0.1, 0.1, chosen="block_fused"),
    timed("mlp", 8192, "block_tp", 0.1, 0.1, nccl="copy_engine"),
]


def test_each_row_is_compared_with_the_plain_one_of_its_problem() -> None:
    found = {(group.facts["part"], group.facts["graph"]): group for group, _ in problems(TIMED)}
    mlp, graph, column = found["mlp", False], found["mlp", True], found["column", False]
    assert {clock: ratios["block_copy_engine"][2048] for clock, ratios in mlp.by_clock.items()} == {
        "time_ms": 2.0 / 2.1, "device_ms": 1.25,
    }  # fmt: skip
    assert graph.by_clock["time_ms"].to_dict() == {"block_copy_engine": {8192: 2.0}}
    assert column.by_clock["device_ms"].to_dict() == {"block_copy_engine": {8192: 1 / 0.995}}
    assert mlp.by_clock["time_ms"].count().sum() == 5 and len(found) == 3


def test_the_fastest_variant_is_chosen_if_it_gains() -> None:
    (column, mlp, _) = problems(TIMED)
    by_device = {128: "block_copy_engine", 512: "block_tp", 2048: "block_copy_engine", 8192: "block_copy_engine"}
    assert choice(*mlp, "device_ms") == by_device and choice(*column, "device_ms") == {8192: "block_tp"}
    assert choice(*mlp, "time_ms") == {**dict.fromkeys((128, 512, 2048), "block_tp"), 8192: "block_copy_engine"}


def test_a_gain_whose_intervals_overlap_is_not_chosen() -> None:
    plain = timed("mlp", 2048, "block_tp", 2.0, 1.0, device_ci_low_ms=0.9, device_ci_high_ms=1.1)
    for high, chosen in (0.89, "block_copy_engine"), (0.91, "block_tp"):
        faster = timed("mlp", 2048, "block_copy_engine", 1.0, 0.8, device_ci_low_ms=0.7, device_ci_high_ms=high)
        (group,) = problems([plain, faster])
        assert choice(*group, "device_ms") == {2048: chosen} and choice(*group, "time_ms") == {2048: faster["variant"]}


def test_compiled_blocks_are_compared_with_each_other() -> None:
    names = "block_tp", "block_compile_async", "block_copy_engine"
    eager = [timed("block", 8192, name, 1.0, 1.0) for name in names]
    compiled = [timed("block", 8192, name, 0.5, 0.5, compile=True) for name in (names[0], names[2])]
    groups = [group for group, _ in problems(eager + compiled)]
    assert sorted(group.facts["compile"] for group in groups) == [False, True]
    for group in groups:
        faster = {"block_compile_async": {8192: 0.5}} if group.facts["compile"] else {}
        assert group.by_clock["time_ms"].to_dict() == {"block_copy_engine": {8192: 1.0}} | faster


def test_a_variant_stays_chosen_unless_another_one_gains_more_than_noise() -> None:
    names = "block_symm_mem", "block_copy_engine"
    rows = [timed("block", tokens, "block_tp", 2.0, 1.0) for tokens in (128, 512, 2048, 8192)]
    for tokens, times in {128: (1.99, 1.6), 512: (1.595, 1.6), 2048: (1.5, 1.6), 8192: (None, 1.6)}.items():
        rows += [timed("block", tokens, name, at, 1.0) for name, at in zip(names, times, strict=True) if at]
    (group,) = problems(rows)
    assert [*choice(*group, "time_ms").values()] == [*names[1:] * 2, names[0], names[1]]


def test_a_sentence_for_each_problem_says_what_to_choose() -> None:
    column, mlp, _ = tables([{**row, "bound": "compute"} for row in TIMED])[0].notes
    assert column.endswith("choose by device time block_tp at 8192 tokens; at 8192 tokens block_tp is bound by compute")
    assert mlp.startswith(
        "part=mlp, hidden=4096, ffn=14336, tp=4, NVIDIA H200: choose by device time block_copy_engine at "
    )
    assert (
        "at 128 tokens, block_tp at 512 tokens, block_copy_engine from 2048 tokens; by wall time block_tp from" in mlp
    )
    assert "is 1.25x as fast as block_tp and hides 75% of the communication" in mlp
    two_hosts = [{**row, "host": "b" if row["variant"] == "block_tp" else "a"} for row in TIMED]
    assert "rows of 2 hosts" in tables(two_hosts)[0].notes[0]
    without = {**dict.fromkeys(("device_ms", "hidden_share")), "gpu_name": None}
    assert "tp=4, cpu: " in tables([{**row, **without} for row in TIMED])[0].notes[1]


def test_the_tables_show_the_clocks() -> None:
    _, column, _, eager, over, graph, _ = tables([{**row, "compute_ms": 2.0} for row in TIMED])
    assert "part=column" in column.heading and "graph=true" in graph.heading
    assert eager.columns == ("tokens", "block_copy_engine", "block_symm_mem")
    assert eager.texts[2] == ["2048", "1.25x (0.95x)", "1.11x (0.80x)"] and eager.texts[3][2] == "-"
    assert over.columns[3] == "block_tp" and over.texts[2] == ["2048", *["1.250x"] * 3]
    of_over = json.loads(as_json(Document([over])))[2]  # numbers are numbers, with all digits
    assert (of_over["tokens"], of_over["hidden"], of_over["block_tp"]) == (2048, 4096, 1.25)
    assert json.loads(as_json(Document([eager])))[2]["notes"].startswith("block_copy_engine: time_ms 0.95x; ")
    looped = {"chained_ms": 1.0, "chained_compute_ms": 1.0, "chained_exposed_ms": 0.5}
    assert tables([{**row, **looped} for row in TIMED])[1].texts == [["8192", "1.00x (1.01x, 1.00x)"]]
    forward = [{**row, "forward_compute_ms": 0.5, "forward_exposed_ms": 0.125} for row in TIMED]
    (of_pass,) = [table for table in tables(forward) if "forward pass" in table.heading]
    assert "part=column" in of_pass.heading and of_pass.texts == [["8192", "1.250x", "1.250x"]]
    again = tables([row | {"save_gathered": False} for row in TIMED if row["part"] == "column"])
    assert all("save_gathered=false" in table.heading for table in again[1:])


def test_the_picture_shows_wall_times_beside_those_of_the_first_clock() -> None:
    drawn = picture(TIMED)
    assert drawn is not None and [panel.title for panel in drawn.panels] == ["part=mlp, hidden=4096, ffn=14336, tp=4"]
    assert {(line.label, line.dashed) for line in drawn.panels[0].lines} == {
        (name, dashed) for name in ("block_copy_engine", "block_symm_mem") for dashed in (False, True)
    }
    assert drawn.doubling == (128, 512, 2048, 8192) and drawn.panels[0].no_gain_to == 2048
    assert picture(TIMED[6:8]) is None


def test_the_profile_has_a_line_for_each_variant_and_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = dict.fromkeys(("time_ms", "device_ms", "loss_value"))
    made = [
        row("block_tp", 10),
        row("block_tp", 11, save_gathered=False),
        row("block_no_tp", 13, hidden_share=None, exposed_ms=None),
        row("block_symm_mem", 14, status="skipped", reason="needs a CUDA GPU", **nothing),
    ]
    for index, synthetic in enumerate(made):
        write_row(synthetic, tmp_path, f"r{index}")
    assert report([str(tmp_path), "--study", "profile", "--format", "csv"]) == 0
    lines = {line["variant"]: line for line in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    assert set(lines) == {"block_no_tp", "block_symm_mem", "block_tp", "block_tp save_gathered=false"}
    assert lines["block_tp"]["of best"] == "1.0" and float(lines["block_no_tp"]["of best"]) == pytest.approx(1.17, 0.01)
    assert lines["block_tp"]["hidden_share"] == "0.75" and lines["block_no_tp"]["hidden_share"] == ""
    assert lines["block_symm_mem"]["status"] == "skipped"
