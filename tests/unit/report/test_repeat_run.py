"""`report.py --repeat ROW_ID --run`, with a function in place of the command that measures."""

import json
import re
import shlex
import sys
from types import SimpleNamespace

import pandas as pd
import pytest

from tests.support import synthetic
from tpbench.job import stored_job
from tpbench.outside.source import version
from tpbench.outside.variant import OutsideVariant
from tpbench.report import repeat as repeating
from tpbench.results.read import load
from tpbench.results.write import write_row
from tpbench.settings import JobError


def row(**changes):
    made = synthetic.cell("triton_tp", 32768, 2, **changes)
    moment = synthetic.START
    key = stored_job(json.loads(made["job"])).key
    return {"started_at": moment, "finished_at": moment, "cell": 0, **made, "key": key}


@pytest.fixture
def repeat(tmp_path, monkeypatch):
    """Return a function that repeats a stored row. The command writes a row with its keywords, or no row for None."""
    monkeypatch.chdir(tmp_path)
    write_row(row(), tmp_path / "stored", "old")
    frame = load(tmp_path / "stored")

    def repeat(changes, code=0):
        def command(words, *, check, stdout):
            repeat.words = words
            assert not check and stdout is sys.stderr  # the report alone writes to stdout
            if changes is not None:
                write_row(row() | changes, tmp_path / "outputs", "new")
            return SimpleNamespace(returncode=code)

        monkeypatch.setattr(repeating.subprocess, "run", command)
        return repeating.repeat(frame, frame["row_id"][0], run="", metric="time_ms")

    return repeat


def test_an_equal_row_passes(repeat, capsys):
    assert repeat({}) == 0
    printed, table = capsys.readouterr().out.split("\n", 1)
    assert "triton_tp" in table
    interpreter, *words = shlex.split(printed)[shlex.split(printed).index("python") :]
    assert interpreter == "python" and repeat.words[:2] == ["/usr/bin/env", sys.executable]
    assert repeat.words[2:] == [*words, "output_dir=outputs"]


@pytest.mark.parametrize(
    "changes",
    [{"time_ms": 1e3, "samples_ms": [1e3] * 100}, {"status": "error", "reason": "no such kernel", "time_ms": None}],
)
def test_a_slower_or_failed_row_does_not_pass(repeat, changes):
    assert repeat(changes) == 1


def test_a_faster_row_passes(repeat):
    assert repeat({"time_ms": 1e-3, "samples_ms": [1e-3] * 100}) == 0


def test_only_new_rows_of_the_same_job_are_compared(repeat, tmp_path):
    write_row(row() | {"time_ms": 1e3, "samples_ms": [1e3] * 100}, tmp_path / "outputs", "slow_before")
    assert repeat({}) == 0


@pytest.mark.parametrize("changes", [None, {"key": "another", "job": None}])
def test_a_command_without_a_row_is_no_pass(repeat, changes):
    with pytest.raises(JobError, match=r"made no row \(exit code 3\), so nothing was compared"):
        repeat(changes, code=3)


def test_an_interpreted_row_is_no_pass(repeat):
    with pytest.raises(JobError, match="nothing was compared, so this is no pass"):
        repeat({"interpreted": True})


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("abcd", "abcd"), ("abcdef", "abcdef-1"), ("-2wxyz", "abcd-2wxyz"), ("wxyz", "abcd-2wxyz"), ("f-1", None)],
)
def test_the_beginning_or_the_end_of_an_identifier_is_enough(wanted, found):
    """Four characters are enough. A whole identifier wins over those that begin with it."""
    frame = pd.DataFrame({"row_id": ["abcd", "abcdef-1", "abcd-2wxyz"]})
    if found:
        assert list(repeating._row(frame, wanted)["row_id"]) == [found]
    else:
        with pytest.raises(JobError, match="no row has the identifier f-1"):
            repeating._row(frame, wanted)


def test_several_rows_of_a_beginning_are_named():
    frame = pd.DataFrame({"row_id": [f"abcd-{at}" for at in range(4)]})
    with pytest.raises(JobError, match="4 rows match abcd: abcd-0, abcd-1, abcd-2: name one"):
        repeating._row(frame, "abcd")


SOURCE = "def fast_tp(problem, shard):\n    raise NotImplementedError\n"


@pytest.fixture
def repeat_file(tmp_path, monkeypatch):
    """Return a function that repeats a row of `code/my_loss.py:fast_tp`. The command writes a row like the old one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "my_loss.py").write_text(SOURCE)
    name = "my_loss.py:fast_tp"
    of_file = {"variant": name, "variant_version": version(tmp_path / "code" / "my_loss.py")}
    of_file["job"] = json.dumps(json.loads(row()["job"]) | {"variant": name})
    of_file["key"] = stored_job(json.loads(of_file["job"]), OutsideVariant.named(name, "entropy_loss")).key
    write_row(row() | of_file, tmp_path / "stored", "old")
    frame = load(tmp_path / "stored")

    def repeat(run):
        def command(words, *, check, stdout):
            repeat.words = words
            write_row(row() | of_file, tmp_path / "outputs", "new")
            return SimpleNamespace(returncode=0)

        monkeypatch.setattr(repeating.subprocess, "run", command)
        return repeating.repeat(frame, frame["row_id"][0], run=run, metric="time_ms")

    return repeat


def test_a_file_that_the_command_line_names_is_measured_again(repeat_file, capsys):
    assert repeat_file("variant=code/my_loss.py:fast_tp") == 0
    assert "variant=code/my_loss.py:fast_tp" in repeat_file.words
    assert capsys.readouterr().err == ""


def test_a_changed_file_is_named(repeat_file, tmp_path, capsys):
    (tmp_path / "code" / "my_loss.py").write_text(f"# edited\n{SOURCE}")
    assert repeat_file("variant=code/my_loss.py:fast_tp") == 0
    assert capsys.readouterr().err == "report: my_loss.py:fast_tp has changed since this row was measured\n"


def test_a_printed_command_says_whether_the_file_has_changed(repeat_file, tmp_path, monkeypatch, capsys):
    assert repeat_file(None) == 0
    assert capsys.readouterr().err == "report: run this command in the folder of my_loss.py\n"
    monkeypatch.chdir(tmp_path / "code")
    assert repeat_file(None) == 0
    assert capsys.readouterr().err == ""
    (tmp_path / "code" / "my_loss.py").write_text(f"# edited\n{SOURCE}")
    assert repeat_file(None) == 0
    assert capsys.readouterr().err == "report: my_loss.py:fast_tp has changed since this row was measured\n"


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("", "a stored row may not load code: name the code yourself, as --run variant=my_loss.py:fast_tp"),
        ("variant=other.py:fast_tp", "the row is of my_loss.py:fast_tp, and --run names other.py:fast_tp"),
        ("outputs", "--run outputs: write folders before --run"),
    ],
)
def test_only_code_that_the_command_line_names_is_run(repeat_file, run, said):
    with pytest.raises(JobError, match=re.escape(said)):
        repeat_file(run)
    assert not hasattr(repeat_file, "words")
