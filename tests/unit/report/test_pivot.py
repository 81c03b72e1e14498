"""Every row is in one cell, nothing that differs is merged, and the numbers are the rows'."""

import csv
import io

import pytest

from tests.support.commands import report as main
from tests.unit.report.conftest import CPU
from tpbench.report import plots
from tpbench.report.analysis.grid import arrange_rows
from tpbench.report.pivot import pivot
from tpbench.settings import JobError
from tpbench.tables import as_csv, as_text


def grid(document, table=0):
    """Return the names of keys and columns, and the texts of each line by its keys."""
    shown = document.tables[table]
    at = shown.keys
    return tuple(shown.columns[:at]), tuple(shown.columns[at:]), {tuple(row[:at]): row[at:] for row in shown.texts}


def legend(document):
    """Return the first word of each line below the tables."""
    return [note.text.split()[0] for note in document.notes]


def test_variants_side_by_side(add, frame):
    add("pytorch_gather", 6.23)
    add("triton_tp", 0.2274)
    add("zebra", 1.0)
    add("pytorch_tp_manual", 1.5)
    add("triton_tp", 1.0, vocab=131072, tp_size=8)
    add("pytorch_gather", vocab=131072, tp_size=8, status="oom", reason="asked for 4 GiB")
    report = pivot(frame())
    keys, columns, lines = grid(report)
    assert keys == ("vocab", "tp", "shard")
    assert columns == ("triton_tp", "pytorch_tp_manual", "pytorch_gather", "zebra")
    assert lines == {
        ("32768", "2", "16384"): ["0.227 ms (1.00x)", "1.500 ms (6.60x)", "6.230 ms (27.4x)", "1.000 ms (4.40x)"],
        ("131072", "8", "16384"): ["1.000 ms (1.00x)", "-", "OOM", "-"],
    }
    assert report.tables[0].heading == "entropy_loss, cross_entropy, bfloat16, NVIDIA H200, cuda, tokens=4096"
    assert [note.text for note in report.notes] == ["oom: pytorch_gather vocab=131072 tp=8: asked for 4 GiB"]


def test_values_that_print_alike_stay_apart(add, frame, tmp_path, capsys):
    """Identity comes from values. Texts are cut after 60 letters, have single spaces and once had six digits."""
    names = [f"{'a' * 30}_{middle}_{'b' * 60}.py:fast" for middle in ("one", "two")]
    for variant in names:
        for temperature in (0.1234567, 0.1234568):
            add(variant, 1.0 + temperature, temperature=temperature, dtype="a  b")
    add(names[0], 9.0, dtype="a b")
    report = pivot(frame())
    assert [len(table.rows) for table in report.tables] == [2, 1] and len(set(report.tables[0].columns)) == 6
    for transposed in (False, True):
        lines = list(csv.DictReader(io.StringIO(as_csv(pivot(frame(), transpose=transposed)))))
        times = [value for line in lines for name, value in line.items() if name.endswith("time_ms") and value]
        assert len(times) == 5
    for stored in (f"variant={names[0]}", "temperature=0.1234567", "dtype=a  b", "time_ms=1.1234567"):
        assert main([str(tmp_path), "--only", stored, "--format", "csv"]) == 0, stored
    (panel,) = plots.by_size(arrange_rows(frame())[0], "time_ms").panels
    assert panel.categories == ("0.1234567", "0.1234568")
    capsys.readouterr()


def test_a_report_names_the_traces_of_its_rows(add, frame):
    add("triton_tp", 1.0, trace="trace_rank*.json.gz", log_dir="sweeps/one/3")
    add("pytorch_gather", 2.0)
    assert [note.text for note in pivot(frame()).notes] == [
        "trace of triton_tp vocab=32768 tp=2: sweeps/one/3/trace_rank*.json.gz"
    ]


def test_options_are_columns(add, frame):
    add("triton_tp", 1.0, block_cap="16384")
    add("triton_tp", 1.0, block_cap="4096")
    add("triton_tp", 1.0)
    add("triton_tp", 1.0, graph=True)
    add("pytorch_tp_manual", 1.0, compile=True)
    add("pytorch_gather", 1.0, compute_dtype="logits")
    assert grid(pivot(frame()))[1] == (
        "triton_tp",
        "triton_tp block_cap=4096",
        "triton_tp block_cap=16384",
        "triton_tp graph=true",
        "pytorch_tp_manual compile=true",
        "pytorch_gather compute_dtype=logits",
    )


def test_a_table_names_changing_inputs_once_if_all_rows_have_them(add, frame):
    add("triton_tp", 2.0, fresh=True)
    add("pytorch_gather", 3.0, fresh=True)
    (table,) = pivot(frame()).tables
    assert table.heading.endswith("fresh=true") and list(table.columns)[-2:] == ["triton_tp", "pytorch_gather"]


def test_hardware_loss_and_dtype_are_tables(add, frame):
    add("triton_tp", 1.0, **CPU)
    add("triton_tp", 1.0)
    add("triton_tp", 1.0, gpu_name="NVIDIA H100")
    add("triton_tp", 1.0, loss="forward_kl")
    add("triton_tp", 1.0, dtype="float32")
    assert [table.heading for table in pivot(frame()).tables] == [
        "entropy_loss, cross_entropy, bfloat16, NVIDIA H100, cuda, tokens=4096",
        "entropy_loss, cross_entropy, bfloat16, NVIDIA H200, cuda, tokens=4096",
        "entropy_loss, cross_entropy, float32, NVIDIA H200, cuda, tokens=4096",
        "entropy_loss, forward_kl, bfloat16, NVIDIA H200, cuda, tokens=4096",
        "entropy_loss, cross_entropy, bfloat16, EPYC 9654, cpu, tokens=4096",
    ]


def test_interpreted_rows_are_marked_and_not_compared(add, frame):
    add("triton_tp", 45000.0, interpreted=True, warmed_up=False, **CPU)
    add("pytorch_tp_manual", 9.0, warmed_up=False, **CPU)
    add("pytorch_gather", 12.0, **CPU)
    report = pivot(frame())
    assert list(grid(report)[2].values()) == [["45000 ms*", "9.000 ms^", "12.00 ms (1.00x)"]]
    assert legend(report) == ["*", "^"]


HOST_BOUND = {"bound": "host", "throttle_reasons": "none"}


def test_host_bound_and_throttled_cells_are_marked_and_host_bound_ones_explained(add, frame):
    add("triton_tp", 3.0, device_ms=1.0, **HOST_BOUND)
    add("pytorch_gather", 6.0, device_ms=5.9, bound="memory", throttle_reasons="power")
    add("triton_tp", 8.0, device_ms=7.0, vocab=65536, bound="memory", throttle_reasons="none")
    add("pytorch_gather", status="oom", vocab=65536, bound=None, throttle_reasons=None)
    report = pivot(frame())
    assert list(grid(report)[2].values()) == [
        ["3.000 ms† (1.00x)", "6.000 ms‡ (2.00x)"],
        ["8.000 ms (1.00x)", "OOM"],
    ]
    assert legend(report) == ["†", "‡", "oom:"]
    assert [row[3].kind for row in report.tables[0].cells] == ["best", ""]  # alone, it beats nothing
    by_device = pivot(frame(), "device_ms")
    assert next(iter(grid(by_device)[2].values())) == ["1.000 ms (1.00x)", "5.900 ms‡ (5.90x)"]
    assert "†" not in as_text(by_device).plain
    assert "host-bound" in as_csv(report) and "throttled" in as_csv(report)


def test_a_metric_that_a_row_lacks(add, frame):
    add("triton_tp", 1.0, device_ms=0.0, bound="memory")
    add("pytorch_gather", 1.0)
    report = pivot(frame(), "device_ms")
    assert list(grid(report)[2].values()) == [["0.000 ms", "ok"]]
    assert [note.text for note in report.notes] == ["ok: correct, but without device_ms"]


def test_equal_problems_must_agree(add, frame):
    add("triton_tp", 1.0, loss_value=10.5)
    add("pytorch_gather", 1.0, loss_value=10.6)
    assert pivot(frame()).warnings == []
    add("pytorch_tp_manual", 1.0, loss_value=11.5, tp_size=4, gpu_name="NVIDIA H100")
    add("pytorch_gather", 1.0, loss_value=30.0, seed=1)
    add("pytorch_gather", 1.0, loss_value=30.0, dp_size=2)
    add("pytorch_gather", 1.0, loss_value=30.0, status="wrong", tp_size=8)
    add("quack", 1.0, loss_value=None)
    (warning,) = pivot(frame()).warnings
    assert "(entropy_loss tokens=4096 vocab=32768)" in warning
    farthest = "triton_tp (dp1 x tp2) 10.50 and pytorch_tp_manual (dp1 x tp4) 11.50"
    assert f"{farthest}; a share of 0.02 is allowed. Measure both again" in warning
    for variant, loss in (("triton_tp", 10.5), ("pytorch_gather", 10.6)):  # float32 must agree better
        add(variant, 1.0, loss_value=loss, dtype="float32")
    for name, loss in (("ppo", 0.5), ("cispo", -6.5)):  # functions of one file are losses of their own
        add("linear_tp", 1.0, workload="linear_loss", loss="logprob", objective=f"my.py:{name}", loss_value=loss)
    assert len(pivot(frame()).warnings) == 2


def test_rows_that_say_nothing(add, frame):
    blank = dict.fromkeys(
        ("workload", "device", "gpu_name", "loss", "dtype", "vocab", "tp_size", "tokens", "job", "key")
    )
    add(None, 1.0, **blank)
    add("triton_tp", status="error", vocab=None, tp_size=0)
    report = pivot(frame())
    assert sum(len(table.rows) for table in report.tables) == 2
    nothing = pivot(frame().iloc[:0])
    assert nothing.tables == [] and nothing.notes == []


def test_the_floor_is_that_of_the_fastest_of_a_line(add, frame):
    add("pytorch_gather", 6.0, floor_ms=0.13)
    add("triton_tp", 0.25, floor_ms=0.125)
    add("triton_tp", vocab=131072, status="oom", reason="no room")
    _, columns, lines = grid(pivot(frame(), floor=True))
    assert columns == ("triton_tp", "pytorch_gather", "floor")
    assert lines[("32768", "2", "16384")] == ["0.250 ms (1.00x)", "6.000 ms (24.0x)", "0.125 ms"]
    assert lines[("131072", "2", "65536")] == ["OOM", "-", "-"]
    with pytest.raises(JobError, match="peak_gib has no floor"):
        pivot(frame(), "peak_gib", floor=True)


def test_a_transposed_table_has_a_line_for_each_variant(add, frame):
    add("triton_tp", 0.25, floor_ms=0.125)
    add("pytorch_gather", 6.0)
    add("triton_tp", 0.5, vocab=65536, floor_ms=0.25)
    report = pivot(frame(), floor=True, transpose=True)
    assert grid(report) == (
        ("variant",),
        ("vocab=32768", "vocab=65536"),
        {
            ("triton_tp",): ["0.250 ms (1.00x)", "0.500 ms (1.00x)"],
            ("pytorch_gather",): ["6.000 ms (24.0x)", "-"],
            ("floor",): ["0.125 ms", "0.250 ms"],
        },
    )
    assert report.tables[0].heading.endswith("tokens=4096, tp=2")
    assert report.caption.endswith("twice the fastest of its column")


def test_a_winner_has_a_colour_only_if_no_other_cell_may_be_as_fast(add, frame):
    noisy = [1.0 + 0.1 * at for at in range(-6, 7)]
    add("triton_tp", 1.0, samples_ms=noisy)
    add("quack", 1.3, samples_ms=[1.3 * each for each in noisy])
    add("triton_tp", 1.0, vocab=1000)
    add("triton_tp", 1.0, vocab=1000, graph=True)
    add("quack", 1.3, vocab=1000)
    decided, tied = ([(cell.text, cell.kind) for cell in row[3:]] for row in pivot(frame()).tables[0].cells)
    assert decided == [("1.000 ms (1.00x)", "best"), ("1.000 ms (1.00x?)", "best"), ("1.300 ms (1.30x)", "")]
    assert tied == [("1.000 ms (1.00x)", ""), ("-", "dim"), ("1.300 ms (1.30x?)", "")]
    assert "undecided" in as_csv(pivot(frame())) and "? undecided" in as_text(pivot(frame())).plain
