"""`scripts/report.py` as users call it."""

import json
import shutil

import pytest

from tests.support.commands import report as main
from tpbench.results.read import RowWarning


def test_output_and_filters(add, tmp_path, capsys):
    add("triton_tp", 1.0)
    add("pytorch_gather", 2.0, loss="forward_kl")
    out = tmp_path / "table.md"
    arguments = [str(tmp_path), "--loss", "forward_kl", "--format", "markdown"]
    assert main([*arguments, "-o", str(out)]) == 0
    assert "pytorch_gather" in out.read_text() and "triton_tp" not in out.read_text()
    assert capsys.readouterr().out == ""
    assert main([*arguments, "--variant", "pytorch_gather,triton_tp"]) == 0
    assert capsys.readouterr().out == out.read_text()
    assert main([str(tmp_path), "--columns", "time_ms, loss"]) == 0
    assert main([*arguments, "--variant", "triton_tp"]) == 2
    assert "in these rows, no loss is called forward_kl (valid: cross_entropy)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["nowhere"], "no such folder or file: nowhere: run `python -m tpbench ...` first"),
        (["empty"], "no rows in empty: run `python -m tpbench ...` first"),
        (["rows", "--metric", "time"], "no metric is called time, did you mean"),
        (["rows", "--columns", "time_ms,a/time_ms"], "no column is called a (all "),
        (["rows", "--loss", "cros_entropy"], "did you mean cross_entropy?"),
        (["rows", "--transpose", "--columns", "time_ms"], "--floor and --transpose are for tables of one metric"),
        (["rows", "--metric", "time_ms", "--columns", "peak_gib"], "choose their own numbers: leave out --metric"),
        (["rows", "-o", "no/such/folder"], "No such file or directory"),
        (["rows", "--only", "tp_size", "2"], "--only tp_size: the equals sign is missing: write --only tp_size=VALUE"),
        (["rows", "--only", "tp_size=2,3"], "in these rows, no tp_size is called 3 (valid: 2)"),
        (["rows", "--only", "tokns=1"], "no column is called tokns, did you mean tokens or top_k? (all "),
        (["rows", "-o", "x.pdf"], "-o x.pdf: use one of the suffixes .txt, .md, .csv, .html, "),
        (["rows", "-o", "x.svg"], "a picture needs -o FILE.svg, and --study NAME or --plot time"),
        (["rows", "-o", "x.svg", "--plot", "tme"], "no plot is called tme, did you mean time?"),
        (["rows", "-o", "x.svg", "--plot", "chained_time"], "nothing for the plot chained_time"),
    ],
)
def test_wrong_requests_are_explained(add, tmp_path, monkeypatch, capsys, arguments, said):
    add("triton_tp", 1.0)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.out == "" and len(printed.err.splitlines()) == 1


def test_older_rows_are_told(add, tmp_path, capsys):
    for ms in (2.0, 3.0):
        add("triton_tp", ms)
    assert main([str(tmp_path), "--only", "graph=false"]) == 0
    printed = capsys.readouterr()
    assert "3.000 ms" in printed.out and "1 older row is not shown" in printed.err


def test_broken_files_and_disagreement_are_told(add, tmp_path, capsys):
    add("triton_tp", 1.0)
    add("pytorch_gather", 1.0, loss_value=99.0)
    (tmp_path / "rows" / "bad.parquet").write_text("bad")
    with pytest.warns(RowWarning, match=r"bad\.parquet: skipped"):
        assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "different losses" in printed.err and "different losses" in printed.out


@pytest.mark.parametrize(
    "name, beginning",
    [("x.html", "<!doctype html>"), ("x.md", "time_ms:"), ("x.csv", "workload,"), ("x", "time_ms:"), ("x.json", "[\n")],
)
def test_the_suffix_decides_the_format(add, tmp_path, name, beginning):
    add("triton_tp", 1.0)
    file = tmp_path / name
    assert main([str(tmp_path), "-o", str(file)]) == 0
    assert file.read_text().lower().startswith(beginning)
    assert ("| ---: |" in file.read_text()) == (name == "x.md")
    if name == "x.html":  # a format that is named wins
        assert main([str(tmp_path), "--format", "csv", "-o", str(file)]) == 0
        assert file.read_text().startswith("workload,")


def test_a_folder_of_outputs_means_the_user_s_own_rows(add, tmp_path, capsys):
    """Without own rows it means the reference, and the report says so. More rows are shown if they are named."""
    add("pytorch_gather", 2.0)
    (tmp_path / "reference").mkdir()
    shutil.move(tmp_path / "rows", tmp_path / "reference" / "rows")
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "pytorch_gather" in printed.out and "no rows of your own, so these are the reference rows" in printed.err
    add("triton_tp", 1.0)
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "triton_tp" in printed.out and "pytorch_gather" not in printed.out and printed.err == ""
    assert main([str(tmp_path), str(tmp_path / "reference")]) == 0
    assert "pytorch_gather" in capsys.readouterr().out


def test_plain_rows_as_json(add, tmp_path):
    add("triton_tp", 1.0, samples_ms=[1.0, 2.0])
    add("triton_tp", status="oom", reason="no room", vocab=1)
    assert main([str(tmp_path), "-o", str(tmp_path / "rows.json")]) == 0
    first, second = json.loads((tmp_path / "rows.json").read_text())
    assert (first["time_ms"], first["samples_ms"], first["vocab"]) == (1.0, [1.0, 2.0], 32768)
    assert (second["status"], second["time_ms"]) == ("oom", None) and "gpu_count" not in first
    assert main([str(tmp_path), "--columns", "time_ms,vocab", "-o", str(tmp_path / "table.json")]) == 0
    lines = {line["vocab"]: line for line in json.loads((tmp_path / "table.json").read_text())}
    assert lines[32768]["variant"] == "triton_tp" and lines[32768]["time_ms"] == 1.0 and "time_ms" not in lines[1]
