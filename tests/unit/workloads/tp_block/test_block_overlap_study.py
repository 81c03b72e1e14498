"""Speed-ups of overlap by tokens, and the length from which overlap pays."""

from __future__ import annotations

from typing import Any

from tests.support.tp_block_rows import row
from tpbench.workloads.tp_block import overlap_study
from tpbench.workloads.tp_block.overlap_study import pays_from, picture, speedups, tables


def made(part: str, tokens: int, variant: str, wall: float, device: float, **changes: Any) -> dict[str, Any]:
    facts = {"part": part, "tokens": tokens, "time_ms": wall, "device_ms": device, "graph": False, "layers": 0}
    return row(variant, 1, **{**facts, "torch_version": "2.11.0", "warmed_up": True, "hardware": "H200", **changes})


ROWS = [
    *(made("mlp", tokens, "block_tp", 2.0, 1.0) for tokens in (128, 512, 2048, 8192)),
    made("mlp", 128, "block_copy_engine", 4.0, 0.8),
    made("mlp", 512, "block_copy_engine", 4.0, 1.1),
    made("mlp", 2048, "block_copy_engine", 2.1, 0.8),
    made("mlp", 8192, "block_copy_engine", 1.6, 0.8),
    made("mlp", 2048, "block_symm_mem", 2.5, 0.9),
    made("column", 8192, "block_tp", 1.0, 1.0),
    made("column", 8192, "block_copy_engine", 1.0, 0.995),
    made("mlp", 8192, "block_tp", 1.0, 1.0, graph=True),
    made("mlp", 8192, "block_copy_engine", 0.5, 0.5, graph=True),
    made("mlp", 8192, "block_no_tp", 9.0, 9.0),
    made("mlp", 8192, "block_copy_engine", 0.1, 0.1, layers=2),
    made("mlp", 8192, "block_auto", 0.1, 0.1, try_graphs=True),
    made("mlp", 8192, "block_symm_mem", 0.1, 0.1, status="error"),
]


def test_each_row_is_compared_with_the_plain_one_of_its_problem() -> None:
    found = {(each.group[3], each.group[-1], each.variant, each.tokens): each.by_clock for each in speedups(ROWS)}
    assert found["mlp", False, "block_copy_engine", 2048] == {"time_ms": 2.0 / 2.1, "device_ms": 1.25}
    assert found["mlp", True, "block_copy_engine", 8192] == {"time_ms": 2.0, "device_ms": 2.0}
    assert found["column", False, "block_copy_engine", 8192] == {"time_ms": 1.0, "device_ms": 1 / 0.995}
    assert len(found) == 7


def test_overlap_pays_from_the_length_after_the_last_loss() -> None:
    alike = [each for each in speedups(ROWS) if each.group[3] == "mlp" and not each.group[-1]]
    assert pays_from(alike, "device_ms") == 2048, "not from 128 on: at 512 it loses"
    assert pays_from(alike, "time_ms") == 8192
    assert pays_from([each for each in speedups(ROWS) if each.group[3] == "column"], "device_ms") is None


def test_rows_of_a_cpu_have_no_device_time_from_which_overlap_pays() -> None:
    *_, ends = tables([{**row, "device_ms": None} for row in ROWS])
    assert ends.rows[1][-2:] == ("8192", "-")


def test_the_tables_and_the_picture_show_both_clocks() -> None:
    column, eager, graph, ends = tables(ROWS)
    assert "part=column" in column.heading and "graph=true" in graph.heading
    assert eager.columns == ("tokens", "block_copy_engine", "block_symm_mem")
    assert eager.rows[2] == ("2048", "0.95x (1.25x)", "0.80x (1.11x)") and eager.rows[3][2] == "-"
    assert ends.rows[1] == ("mlp", "4096", "4", "false", "8192", "2048")
    assert ends.rows[0] == ("column", "4096", "4", "false", "not up to 8192", "not up to 8192")
    drawn = picture(ROWS)
    assert drawn is not None and [panel.title for panel in drawn.panels] == ["part=mlp, hidden=4096, tp=4"]
    assert {(line.label, line.dashed) for line in drawn.panels[0].lines} == {
        (name, dashed) for name in ("block_copy_engine", "block_symm_mem") for dashed in (False, True)
    }
    assert drawn.doubling == (128, 512, 2048, 8192)
    assert overlap_study.picture(ROWS[6:8]) is None
