"""One rule for every path that a user gives, in every command."""

import importlib
from pathlib import Path

import pytest

import tpbench
from tests.support.planned_jobs import job
from tpbench.launcher.command_line.arguments import rewritten
from tpbench.launcher.command_line.outside_choices import find_outside
from tpbench.launcher.options import COMMANDS
from tpbench.settings import JobError, user_path

NO_PATHS = {"list", "docs", "test", "profile"}
"""Commands that take no path."""
LINES = {
    "report": ["report PATH", "report outputs -o PATH"],
    "compare": ["compare PATH outputs", "compare a b -o PATH"],
    "history": ["history PATH", "history outputs -o PATH"],
    "predict": ["predict --tokens 4 --vocab 8 --tp 1 --rows PATH"],
    "collect": ["collect PATH"],
    "compact": ["compact PATH"],
    "rows": ["rows PATH --delete", "rows outputs --into PATH"],
    "new": ["new PATH"],
    "doctor": ["doctor output_dir=PATH"],
}
"""Every place of a path in every command."""


def ended(line: str, path: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command prints that fails."""
    name, *arguments = [word.replace("PATH", path) for word in line.split(" ")]
    module = importlib.import_module(COMMANDS[name])
    try:
        code = module.main(arguments)
    except (SystemExit, JobError, FileNotFoundError) as end:
        code = getattr(end, "code", end)
    assert code not in (0, None), line
    printed = capsys.readouterr()
    return f"{printed.err}{code}"


@pytest.mark.parametrize("line", [line for lines in LINES.values() for line in lines])
def test_every_command_refuses_an_empty_path_and_knows_the_home_folder(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert "is empty (is a variable of the shell not set?)" in ended(line, "", capsys)
    if "o PATH" not in line and "doctor" not in line:
        assert f"{tmp_path}/home/nothing" in ended(line, "~/nothing/x.py", capsys)
    assert not list(tmp_path.iterdir())


def test_every_command_is_known() -> None:
    assert {*LINES, *NO_PATHS} == set(COMMANDS)


@pytest.mark.parametrize("value", ["'PATH'", "'PATH',triton_tp", "triton_tp,'PATH'"])
def test_a_path_in_quotation_marks_may_have_a_comma(value: str, tmp_path: Path) -> None:
    path = tmp_path / "a,b" / "op.py"
    with pytest.raises(JobError, match=str(path)):
        rewritten([f"variant={value.replace('PATH', f'{path}:f')}"])


def test_fields_functions_and_files_of_variants_follow_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert job(output_dir="~/x").output_dir == "/home/me/x"
    assert job(output_dir=2026).output_dir == "2026"
    assert rewritten(["output_dir=~/x", "model_dir=~/m,~/n"]) == [
        "output_dir=/home/me/x",
        "model_dir=/home/me/m,/home/me/n",
    ]
    for other in (["rows"], 1e3, True):
        with pytest.raises(JobError, match=r"output_dir=.* is of the type"):
            user_path(other, "output_dir")
    with pytest.raises(JobError, match=r"output_dir=.* must be one text"):
        job(output_dir=["rows"])
    for empty in ("", " ", None, "null"):
        with pytest.raises(JobError, match="output_dir is empty"):
            job(output_dir=empty)
        with pytest.raises(ValueError, match="is empty"):
            tpbench.load(str(empty or ""))
    with pytest.raises(JobError, match=r"/home/me/nothing\.py"):
        find_outside("~/nothing.py:f")
    with pytest.raises(JobError, match="~nobody-here isn't the home of a user"):
        user_path("~nobody-here/x")
