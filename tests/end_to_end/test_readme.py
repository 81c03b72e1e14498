"""The README: its commands run, and its links and the pages' links lead somewhere."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support import synthetic
from tests.support.command import ROOT, environment, forked, tpbench
from tpbench.console import information
from tpbench.launcher.options import COMMANDS as COMMANDS_OF_TPBENCH

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


def test_the_workflow_fails_for_a_worse_variant(tmp_path: Path) -> None:
    """The commands run for a first commit and for a worse one, which needs 64 MiB more on any machine."""
    workflow = re.findall(r"```yaml\n(.*?)```", (ROOT / "tpbench/docs/ci.md").read_text(), flags=re.DOTALL)[0]
    commands = [step["run"] for step in yaml.safe_load(workflow)["jobs"]["measure"]["steps"] if "run" in step]
    script = "\n#\n".join(commands).replace("shape=v32k_tp1", "shape=tiny_tp2 tp_size=1 device=cpu measure=quick")
    script = script.replace("cross_entropy,reverse_kl", "cross_entropy")
    script = script.replace("--format", "--metric peak_gib --format")  # a time would depend on the machine
    script = script.replace("my_loss.py:fast_tp,pytorch_gather", "my_loss.py:fast_tp")
    example = (ROOT / "tpbench/api/examples/entropy_loss.py").read_text()
    env = environment() | {"ROWS": str(tmp_path / "rows"), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    for commit, body, code in (("a", "", 0), ("b", "        __import__('torch').ones(2**24)\n", 1)):
        head = "    def run() -> Output:\n"
        (tmp_path / "my_loss.py").write_text(example.replace(head, head + body))
        line = ["bash", "-eo", "pipefail", "-c", script]
        done = subprocess.run(line, cwd=tmp_path, env=env | {"GITHUB_SHA": commit}, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
    assert "| my_loss.py:fast_tp vocab=1000 tp=1 | worse |" in (tmp_path / "summary").read_text()
    assert (tmp_path / "rows/last").readlink() == Path("a")


def test_the_files_of_the_page_on_configuration_compose(tmp_path: Path) -> None:
    page = (ROOT / "tpbench/docs/configuration.md").read_text()
    shape, experiment, site = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    for name, text in (("shape/ours", shape), ("experiment/ours", experiment), ("site", site)):
        (tmp_path / f"site/{name}.yaml").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"site/{name}.yaml").write_text(text.replace("/data/rows", "rows"))
    lines = (
        ["-m", "+experiment=ours", "--config-dir", "site"],
        ["-m", "variant=pytorch_gather", "--config-dir", "site", "-cn", "site"],
    )
    cells = []
    for line in lines:
        done = tpbench(*line, "device=cpu", "dry_run=true", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        cells.append(done.stdout.count("tokens=8192 vocab=151936 tp_size=2"))
    assert cells == [4, 1]
