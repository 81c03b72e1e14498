"""Check the README and its pages: commands are valid, files exist, and tables come from the stored rows."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.support.command import DEFAULT, ROOT
from tests.support.tp_block_rows import row as block_row
from tpbench.launcher.overrides import check_overrides
from tpbench.report.command import main as report
from tpbench.results.write import write_row
from tpbench.workloads import variants

README = (ROOT / "README.md").read_text()
PAGES = README + "".join(page.read_text() for page in sorted((ROOT / "tpbench/docs").glob("*.md")))
SHELL = PAGES.replace("\\\n", " ")  # a line that goes on is one line
CODE = re.findall(r"```bash\n(.*?)```", SHELL, flags=re.DOTALL)
LINES = [line.split("  #")[0].strip() for block in CODE for line in block.splitlines() if line.strip()]
TRAINED = {
    "workload": "train_step", "variant": "ddp", "model": "qwen3_0p6b", "num_layers": 28, "seq_length": 2048,
    "dp_size": 4, "tp_size": 1, "status": "ok", "time_ms": 100.0, "tokens_per_s_per_gpu": 2e4, "dtype": "bfloat16",
}  # fmt: skip


def arguments(start: str) -> list[list[str]]:
    """Return the arguments of the README's commands that begin with `start`."""
    return [shlex.split(line)[len(shlex.split(start)) :] for line in LINES if f"{line} ".startswith(f"{start} ")]


@pytest.mark.parametrize("line", arguments("python -m tpbench"), ids=" ".join)
def test_commands_are_understood(line: list[str]) -> None:
    check_overrides(line, ROOT / "conf")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the committed rows, and a row of each workload that they lack."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "outputs/reference", folder / "outputs")
    for name in ("before", "after"):
        (folder / name).symlink_to(folder / "outputs")
    write_row(block_row("block_tp", 1), folder / "outputs/rows", "block")
    write_row({**TRAINED, "key": "train"}, folder / "outputs/rows", "train")
    return folder


@pytest.mark.parametrize("line", arguments("python scripts/report.py"), ids=" ".join)
def test_report_commands_run(line: list[str], outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(outputs)
    assert report(line) == 0


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "tpbench/docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), (page.name, link)


def test_every_script_that_is_named_exists() -> None:
    for name in set(re.findall(r"scripts/[\w.]+", PAGES)):
        assert (ROOT / name).exists(), name


def test_every_variant_and_choice_is_named() -> None:
    choices = [
        file.stem
        for group in ("shape", "model", "loss", "block_cap", "measure")
        for file in (ROOT / "conf" / group).glob("*")
    ]
    for name in [*variants(), *choices]:
        assert re.search(rf"\b{name}\b", PAGES), name


def test_the_default_command_is_understood() -> None:
    """`tests/end_to_end/test_command_line.py` runs it."""
    check_overrides(DEFAULT, ROOT / "conf")
