"""Reports show options that mean the same as one column, memory with that of CUDA graphs, and host-bound cells."""

import pytest
from tpbench.report.tables import render

from tests.support.planned_jobs import job
from tpbench.measure.bottleneck import Shares
from tpbench.report.analysis.grid import arrange_rows
from tpbench.report.analysis.records import with_bound
from tpbench.report.compare.pairs import pair_cells
from tpbench.report.pivot import pivot
from tpbench.report.studies import column_tables, study_tables

TABLE = {"table_rows": 251520, "width": 768, "tokens": 16384, "tp_size": 1, "dp_size": 2}
BLOCK = {"workload": "tp_block", "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128,
         "part": "block", "save_gathered": True, "try_graphs": False, "loss": None, "vocab": None}  # fmt: skip


@pytest.fixture
def add_search(add):
    """Return a function that adds a row of the embedding gradient with that search, as a worker writes it."""

    def add_row(search, time_ms, *, device="cuda", **changes):
        stored = job("sparse_all_to_all", **TABLE, device=device, search=search)
        flat = {name: value for name, value in stored.flat().items() if name in TABLE or name in vars(stored.problem)}
        add("sparse_all_to_all", time_ms, workload="embedding_grad", key=stored.key, density=0.12, device=device,
            loss=None, vocab=None, **{**flat, **changes}, job=stored.flat())  # fmt: skip

    return add_row


@pytest.mark.parametrize(("device", "meant"), [("cuda", "kernel"), ("cpu", "host")])
def test_the_search_that_auto_stands_for_is_no_other_column(add_search, frame, device, meant):
    add_search(meant, 2.0, device=device)
    add_search("auto", 1.0, device=device)
    add_search("kernel" if meant == "host" else "host", 3.0, device=device)
    (grid,) = arrange_rows(frame(), ["time_ms"]).grids
    (row,) = grid.rows
    assert grid.columns[0] == "sparse_all_to_all" and len(grid.columns) == 2
    assert [record["time_ms"] for record in row.records] == [1.0, 3.0]
    assert "job search" not in grid.key_names


def test_a_newer_row_with_the_search_by_name_replaces_one_with_auto(add_search, frame):
    add_search("auto", 1.0)
    add_search("kernel", 2.0)
    (grid,) = arrange_rows(frame(), ["time_ms"]).grids
    assert grid.columns == ("sparse_all_to_all",) and grid.rows[0].records[0]["time_ms"] == 2.0
    (study,) = study_tables(frame(), "crossover")
    assert "search" not in str(study)


def test_rows_from_before_and_after_the_default_changed_are_paired(add_search, frame):
    add_search("kernel", 2.0)
    add_search("auto", 1.0)
    rows = frame()
    (pair,) = pair_cells(rows.iloc[:1], rows.iloc[1:])
    assert pair.before["time_ms"] == 2.0 and pair.after["time_ms"] == 1.0


def test_a_row_without_a_readable_job_keeps_its_key(add_search, frame):
    add_search("kernel", 2.0)
    rows = frame().assign(job="{")
    (grid,) = arrange_rows(rows, ["time_ms"]).grids
    assert grid.columns == ("sparse_all_to_all",)


def test_the_memory_of_graphs_counts_and_is_marked(add, frame):
    add("block_tp", 4.0, **BLOCK, peak_gib=0.25)
    add("block_auto", 2.0, **BLOCK, peak_gib=0.0, graph_gib=0.5)
    report = pivot(frame(), "peak_gib")
    assert [cell.value for cell in report.tables[0].lines[0].cells] == [0.25, 0.5]
    text = render.text(report).plain
    assert "0.250 GiB (1.00x)" in text and "0.500 GiB§ (2.00x)" in text and "§ peak_gib with graph_gib" in text
    assert "block_auto: with graph_gib" in render.comma_separated(report)
    assert "§" not in render.text(pivot(frame(), "time_ms")).plain


def test_a_table_of_columns_marks_the_memory_that_it_shows(add, frame):
    add("block_auto", 2.0, **BLOCK, peak_gib=0.0, graph_gib=0.5)
    for columns, status in ((["peak_gib"], "ok§"), (["peak_gib/time_ms"], "ok§"), (["time_ms"], None)):
        (table,) = column_tables(frame(), columns)
        assert (dict(zip(table.columns, table.rows[0], strict=True)).get("status")) == status
        assert bool(table.notes) == (status is not None)


def test_a_row_from_before_the_bottleneck_was_measured_is_host_bound_by_its_clocks(add, frame):
    for variant, device_ms, bound in (
        ("triton_tp", 0.7, None), ("pytorch_tp_manual", 0.9, None), ("quack", 0.7, "wire"), ("liger", None, None),
    ):  # fmt: skip
        add(variant, 1.0, device_ms=device_ms, bound=bound)
    rows = with_bound(frame())
    found = dict(zip(rows["variant"], rows["bound"].astype(object).where(rows["bound"].notna(), None), strict=True))
    assert found == {"triton_tp": "host", "pytorch_tp_manual": None, "quack": "wire", "liger": None}
    assert [Shares(1 - idle, 0.0, idle).bound(1.0, 2.0) for idle in (0.3, 0.1)] == ["host", "memory"]


@pytest.mark.parametrize(("columns", "marked"), [(("device_ms",), False), (("device_ms", "time_ms"), True)])
def test_a_table_of_device_times_alone_has_no_mark_of_the_host(add, frame, columns, marked):
    add("triton_tp", 1.0, device_ms=0.5)
    (table,) = column_tables(frame(), columns)
    assert ("ok†" in table.rows[0]) == marked
