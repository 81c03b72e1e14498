"""The README: its commands run, and its links and the pages' links lead somewhere."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.support import synthetic
from tests.support.command import DEFAULT, ROOT, forked, tpbench
from tpbench.console import COMMANDS as COMMANDS_OF_TPBENCH
from tpbench.console import information
from tpbench.launcher.command_line.checks import check_overrides
from tpbench.workloads import variants

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "tpbench/docs").glob("*.md"))]
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    for line in block.splitlines()
]
SWEEPS = [words[3:] for words in COMMANDS if words[:4] == ["python", "-m", "tpbench", "-m"]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the committed rows and with the folders that the README compares. It is the current one."""
    shutil.copytree(ROOT / "outputs", tmp_path / "outputs", ignore=shutil.ignore_patterns("sweeps", "rows.*"))
    for run in ("before", "after"):
        synthetic.write([synthetic.cell("triton_tp", 32768, 1, run=run)], tmp_path / run, run)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_command_runs(folder: Path) -> None:
    """`scripts/run` and the sweep with an own variant run in `test_command_line` and `test_packaging`."""
    for words in COMMANDS:
        if words[:2] == ["python", "-m"] and words[3] in COMMANDS_OF_TPBENCH:
            assert information(words[3:]) == 0
        else:
            assert words[0] in ("scripts/run", "scripts/test") or words[3:] in SWEEPS, words
    assert len(SWEEPS) == 3 and (folder / "my_loss.py").exists()
    for code, ended in forked([[*words, "dry_run=true"] for words in SWEEPS if "my_loss" not in str(words)], folder):
        assert code == 0, (ended / "stderr").read_text()
        assert "2 cells" in (ended / "stdout").read_text()
    check_overrides(DEFAULT, ROOT / "conf")


def test_the_training_loop_trains_as_one_process_does(tmp_path: Path) -> None:
    """The script that the guide explains: its losses fall, and are those of torch in one process."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", str(ROOT / "scripts/training_loop.py"))
    done = tpbench(cwd=tmp_path, program=torchrun)
    assert done.returncode == 0, done.stderr
    losses = [
        (float(ours), float(torchs))
        for ours, torchs in re.findall(r"loss ([\d.]+), torch in one process ([\d.]+)", done.stdout)
    ]
    assert len(losses) > 3
    assert [ours for ours, _ in losses] == pytest.approx([torchs for _, torchs in losses], abs=1e-4)
    assert losses == sorted(losses, reverse=True) and losses[-1][0] < losses[0][0] - 0.5


def test_links_and_files_that_pages_name_exist() -> None:
    for page in PAGES:
        text = page.read_text()
        for link in re.findall(r"\]\((?!http)([^)#]+)", text):
            assert (page.parent / link).exists(), (page.name, link)
        for name in set(re.findall(r"scripts/[\w.]+", text)):
            assert (ROOT / name).exists(), (page.name, name)


def test_every_variant_and_choice_is_named() -> None:
    text = "".join(page.read_text() for page in PAGES)
    groups = ("variant", "shape", "model", "loss", "block_cap", "measure")
    choices = {file.stem for group in groups for file in (ROOT / "conf" / group).glob("*")}
    assert [name for name in sorted({*variants(), *choices}) if not re.search(rf"\b{name}\b", text)] == []
