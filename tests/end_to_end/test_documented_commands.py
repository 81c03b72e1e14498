"""Run the commands of README, CONTRIBUTING and the pages. A command is marked, run here, or run by another test.

A marked command needs GPUs, Slurm, root or minutes. Its names are checked, and its plan is made if it is a sweep.
"""

from __future__ import annotations

import configparser
import re
import runpy
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support import synthetic
from tests.support.command import ROOT, forked, tpbench
from tests.support.documented_commands import Command, commands, commands_of, missing_file
from tests.support.tp_block_rows import row as block_row
from tpbench.console import information
from tpbench.launcher.command_line.checks import check_overrides
from tpbench.launcher.command_line.rewrites import flat_names
from tpbench.packages import NO_EXTRA
from tpbench.results.read import load
from tpbench.results.write import write_row

COMMANDS = commands()
UNIT, END_TO_END = "tests/unit", "tests/end_to_end"
ELSEWHERE = {
    "scripts/run": (f"{END_TO_END}/test_command_line.py", "*DEFAULT"),
    "python -m tpbench doctor": (f"{END_TO_END}/test_doctor.py", '"doctor"'),
    "python -m tpbench.console.reference": (f"{UNIT}/console/test_reference.py", "page()"),
    "python -m tpbench.console.conf_comments": (f"{UNIT}/test_conf.py", "commented_files"),
    "python -m tpbench.console.pages": (f"{UNIT}/console/test_pages.py", "with_tables"),
    "python -m tpbench.results.document": (f"{UNIT}/results/test_document.py", "page()"),
    "variant=tutorial_tp,pytorch_gather": (f"{END_TO_END}/test_contributing.py", 'startswith("python -m tpbench -m")'),
    "vocab=100": (f"{END_TO_END}/test_command_line.py", 'documented("vocab=100")'),
    "variant=my_loss.py:fast_tp,pytorch_gather": (f"{END_TO_END}/test_packaging.py", 'documented("variant=my_loss.py'),
    "shape=tiny_block_tp2": (f"{END_TO_END}/workloads/test_block_command.py", 'documented("shape=tiny_block_tp2")'),
    "shape=tiny_bigram_w2": (f"{END_TO_END}/workloads/test_embedding_command.py", 'documented("shape=tiny_bigram_w2")'),
    "shape=tiny_train_tp2": (f"{END_TO_END}/workloads/test_train_command.py", 'documented("shape=tiny_train_tp2")'),
}
"""Commands, or an argument of them, that another test runs: its file, and the text in it that runs the command."""

SMALL = {"python -m tpbench"}
"""Sweeps and jobs that run here."""


def other_test(command: Command) -> tuple[str, str] | None:
    """Return the file and the text of the test that runs this command, if another test does."""
    names = [command.text.partition(" > ")[0], *(word for word in command.words if "=" in word)]
    return next((ELSEWHERE[name] for name in names if name in ELSEWHERE), None)


def is_run_here(command: Command) -> bool:
    return not command.is_marked and other_test(command) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder like a checkout in which jobs have run: the committed rows, and one row of its own."""
    folder = tmp_path_factory.mktemp("documented")
    shutil.copytree(ROOT / "outputs", folder / "outputs", ignore=shutil.ignore_patterns("sweeps", "rows.*"))
    (folder / "ROWS").symlink_to(folder / "outputs/reference")
    (folder / "tpbench").symlink_to(ROOT / "tpbench")
    write_row(block_row("block_tp", 1), folder / "outputs/rows", "block")
    for name, sweep in (("before", "20261120-100000-1a2b3c"), ("after", "20261121-100000-4d5e6f")):
        row = synthetic.cell("triton_tp", 32768, 1, run=name, sweep_id=sweep, gpu_name="NVIDIA B200")
        synthetic.write([row], folder / name, name)
        synthetic.write([row], folder / "outputs", name)
    return folder


def run_script(arguments: list[str], folder: Path) -> None:
    """Run a script of the checkout in this process. It must print or write something, and exit with 0."""
    script, *rest = arguments
    with pytest.MonkeyPatch.context() as patch:
        if "html" in rest:  # a page of all rows takes ten seconds
            folder = folder / "few"
            synthetic.write(list(synthetic.cells())[:8], folder / "outputs")
        patch.chdir(folder)
        patch.setattr(sys, "argv", [str(ROOT / script), *rest])
        patch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
        patch.setattr(sys, "excepthook", sys.excepthook)
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / script), run_name="__main__")
    assert end.value.code == 0


def run_list(arguments: list[str], folder: Path) -> None:
    assert information(["list", *arguments]) == 0


def run_new(arguments: list[str], folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tempfile.mkdtemp(dir=folder))
        assert information(["new", *arguments]) == 0


def run_completion(arguments: list[str], folder: Path) -> None:
    """Check the code that a shell is to evaluate."""
    (inner,) = (re.fullmatch(r"\$\(tpbench (.*)\)", each) for each in arguments)
    assert inner
    ((code, made),) = forked([inner[1].split()], folder)
    assert code == 0 and "complete" in (made / "stdout").read_text()


def run_pip(arguments: list[str], folder: Path) -> None:
    """Check that the package has the extra, or that tpbench's messages name the same command for a peer.

    Nothing is installed here; `tests/end_to_end/test_installation.py` does that.
    """
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    command, *rest = arguments
    assert command == "install"
    if extra := re.fullmatch(r"\.\[(\w+)\]", rest[-1]):
        assert rest[:-1] == ["-e"] and extra[1] in setup["options.extras_require"]
    else:
        assert shlex.join(rest) in NO_EXTRA.values()


def run_torchrun(arguments: list[str], folder: Path) -> None:
    """Run the training loop on real ranks. Its losses must fall, and equal torch's."""
    *options, script = arguments
    done = tpbench(cwd=folder, program=("-m", "torch.distributed.run", *options, str(ROOT / script)))
    assert done.returncode == 0, done.stderr
    losses = [
        (float(ours), float(torchs))
        for ours, torchs in re.findall(r"loss ([\d.]+), torch in one process ([\d.]+)", done.stdout)
    ]
    assert len(losses) > 3
    assert [ours for ours, _ in losses] == pytest.approx([torchs for _, torchs in losses], abs=1e-4)
    assert losses == sorted(losses, reverse=True) and losses[-1][0] < losses[0][0] - 0.5


RUNNERS: dict[str, Callable[[list[str], Path], None]] = {
    "python -m tpbench list": run_list,
    "python -m tpbench new": run_new,
    "eval": run_completion,
    "pip": run_pip,
    "torchrun": run_torchrun,
}
"""Functions that run a command in this process, by the first words of the command."""


def runner(command: Command) -> tuple[Callable[[list[str], Path], None], list[str]] | None:
    """Return the function that runs this command, and the arguments of the function."""
    words = command.words
    for count in (4, 1):
        if run := RUNNERS.get(" ".join(words[:count])):
            return run, words[count:]
    words = words[words[0] == "python" :]
    return (run_script, words) if re.match(r"scripts/\w+\.py$", words[0]) else None


def sweeps(run: bool) -> list[str]:
    """Return the sweeps that run here, or those that need more than this machine."""
    return sorted({each.text for each in COMMANDS if each.is_sweep and (is_run_here(each) if run else each.is_marked)})


HERE = {each.text: each for each in COMMANDS if is_run_here(each) and not each.is_sweep}


@pytest.mark.parametrize("text", HERE)
def test_a_command_runs(text: str, folder: Path) -> None:
    found = runner(HERE[text])
    assert found, f"{HERE[text]} is neither run nor marked: see tests/support/documented_commands.py"
    run, arguments = found
    run(arguments, folder)


@pytest.mark.parametrize("text", sweeps(run=True))
def test_a_small_sweep_runs(text: str, tmp_path: Path) -> None:
    assert text in SMALL, f"{text} is neither run nor marked: see tests/support/documented_commands.py"
    done = tpbench(*shlex.split(text)[3:], "measure=quick", "device=cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(load(tmp_path / "outputs").status) == {"ok"}


def plan(text: str) -> list[str]:
    """Return the arguments of a dry run of this sweep, on this host.

    To compose a cell takes 20 ms. Of an experiment's lists of names the first one is planned; the tests of the
    workloads compose its other cells.
    """
    arguments = shlex.split(text)[3:]
    check_overrides(flat_names(arguments), ROOT / "conf")
    kept = [each for each in arguments if not each.startswith(("hydra/launcher=", "hydra.launcher.", "wait="))]
    for name in [each.partition("=")[2] for each in kept if each.startswith("+experiment=")]:
        experiment = yaml.safe_load((ROOT / "conf/experiment" / f"{name}.yaml").read_text())
        lists = experiment["hydra"]["sweeper"]["params"]
        first = {key: str(values).split(",")[0] for key, values in lists.items()}
        kept += [
            f"hydra.sweeper.params.{key}={value}"
            for key, value in first.items()
            if key.isidentifier() and value.isidentifier()
        ]
    return [*kept, "dry_run=true"]


def test_large_sweeps_can_be_planned(tmp_path: Path) -> None:
    texts = sweeps(run=False)
    for text, (code, folder) in zip(texts, forked([plan(text) for text in texts], tmp_path), strict=True):
        assert code == 0, (text, (folder / "stderr").read_text())
        assert "Nothing was run" in (folder / "stdout").read_text(), text


def test_files_that_a_command_names_exist() -> None:
    assert [(str(each), missing) for each in COMMANDS if (missing := missing_file(each))] == []


@pytest.mark.parametrize("command", [each for each in COMMANDS if other_test(each)], ids=str)
def test_another_test_runs_the_command(command: Command) -> None:
    file, text = other_test(command) or ("", "")
    assert text in (ROOT / file).read_text()


def test_a_page_is_read_as_people_read_it() -> None:
    page = """
Run `python -m tpbench list`, which `tpbench` prints, or `scripts/run ARGS`.

```bash
python -m tpbench -m shape=a \\
    loss=b   # two cells; needs 8 GPUs
scripts/test     # all tests
```

```python
python = scripts
```
"""
    found = commands_of("page.md", page)
    assert [(each.text, each.comment, each.is_marked) for each in found] == [
        ("python -m tpbench -m shape=a loss=b", "two cells; needs 8 GPUs", True),
        ("scripts/test", "all tests", False),
        ("python -m tpbench list", "", False),
    ]
