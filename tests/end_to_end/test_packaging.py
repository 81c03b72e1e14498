"""A wheel made from the source distribution, installed away from the checkout, runs a job."""

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import tpbench as package
from tests.support.command import ROOT, environment
from tpbench.outside.variant import from_file

CHEAT = """

def stores_its_answer(problem, shard):
    step, answers = fast_tp(problem, shard), []

    def run():
        if not answers:
            answers.append(step())
        return answers[0]

    return Step(run)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the contents of the built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    source = folder / "source"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):  # a copy: a build leaves files beside its source
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    # The wheel is made from the source distribution, so both are tried. An isolated build would download setuptools;
    # `scripts/environment` makes one.
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("tpbench-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


def test_the_wheel_has_the_configuration_and_no_tests(installed: Path) -> None:
    files = {str(file.relative_to(ROOT / "conf")) for file in (ROOT / "conf").rglob("*.yaml")}
    assert {str(file.relative_to(installed / "tpbench/conf")) for file in installed.rglob("*.yaml")} == files
    assert (installed / "tpbench/docs/columns.md").exists()
    assert {each.name for each in installed.iterdir() if each.is_dir()} - {"bin"} == {
        "tpbench",
        f"tpbench-{package.__version__}.dist-info",
    }


IMPORTS = """
import importlib, pkgutil, sys
sys.path[:0] = sys.argv[1:]
import tpbench.integrations, tpbench.kernels
for name in tpbench.kernels._MODULES:
    getattr(tpbench.kernels, name)
for module in pkgutil.iter_modules(tpbench.integrations.__path__, "tpbench.integrations."):
    try:
        importlib.import_module(module.name)
        print(module.name.split(".")[-1])
    except ImportError as error:
        print(error)
"""


def requirements(distribution: metadata.Distribution) -> list[str]:
    """Return the names of the packages that pip installs with this one, without extras."""
    declared = map(Requirement, distribution.requires or [])
    return [each.name for each in declared if each.marker is None or each.marker.evaluate({"extra": ""})]


def test_an_installation_without_extras_has_kernels_and_integrations(installed: Path, tmp_path: Path) -> None:
    """The wheel is imported beside links to what it requires, which is torch and triton, and to what these require."""
    (information,) = installed.glob("*.dist-info")
    waiting, linked = requirements(metadata.Distribution.at(information)), set()
    assert waiting == ["torch", "triton"]
    while waiting:
        distribution = metadata.distribution(waiting.pop())
        if distribution.name in linked:
            continue
        linked.add(distribution.name)
        for entry in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            (tmp_path / entry).symlink_to(distribution.locate_file(entry))
        waiting += requirements(distribution)
    line = [sys.executable, "-I", "-S", "-c", IMPORTS, str(installed), str(tmp_path)]
    env = environment() | {"TRITON_INTERPRET": "0"}  # the interpreter needs numpy
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *loaded, torchtitan = sorted(done.stdout.splitlines(), key=lambda text: "not installed" in text)
    assert loaded == ["megatron", "patches", "transformers", "trl", "trl_objectives", "verl"]
    assert torchtitan.startswith("torchtitan is not installed: pip install")
    run = f"import runpy, sys; sys.path[:0] = {[str(installed), str(tmp_path)]}; runpy.run_module('tpbench.__main__')"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", run], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    (message,) = done.stderr.splitlines()
    assert "needs numpy, scipy, pandas" in message and message.endswith("pip install 'tpbench[bench]'")


def test_it_runs_a_new_variant_as_the_readme_shows_and_reads_its_rows(installed: Path, tmp_path: Path) -> None:
    """The variant's file lies outside the installation, in the folder of the user. A function in it cheats."""
    env = environment() | {"PYTHONPATH": str(installed)}
    line = [sys.executable, "-m", "tpbench"]
    shutil.copy(installed / "tpbench/api/examples/entropy_loss.py", tmp_path / "my_loss.py")  # as `new` does
    with (tmp_path / "my_loss.py").open("a") as file:
        file.write(CHEAT)
    sweep = "-m variant=my_loss.py:fast_tp,pytorch_gather shape=tiny_tp2 tp_size=1 measure=quick device=cpu reuse=true"
    line += [each.replace("pytorch_gather", "pytorch_gather,my_loss.py:stores_its_answer") for each in sweep.split()]
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "1 of 3 cells failed (wrong: 1)" in done.stderr, done.stderr
    columns = "['variant', 'status', 'variant_version', 'reason', 'time_ms', 'fresh']"
    probe = f"import tpbench; print(tpbench.__file__); print(tpbench.load('outputs')[{columns}].to_json())"
    seen = subprocess.run([sys.executable, "-c", probe], cwd=tmp_path, env=env, capture_output=True, text=True)
    file, text = seen.stdout.splitlines()
    for program in (installed / "bin").iterdir():  # each installed command starts
        started = subprocess.run([sys.executable, program, "--version"], env=env, capture_output=True, text=True)
        assert (started.returncode, started.stdout) == (0, f"tpbench {package.__version__}\n"), started.stderr
    line = [sys.executable, "-m", "tpbench", "report", "outputs"]
    printed = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
    assert len(printed.splitlines()) > 5
    assert Path(file).is_relative_to(os.path.realpath(installed)) or Path(file).is_relative_to(installed)
    rows = json.loads(text)
    assert list(rows["variant"].values()) == ["my_loss.py:fast_tp", "pytorch_gather", "my_loss.py:stores_its_answer"]
    assert list(rows["status"].values()) == ["ok", "ok", "wrong"]
    assert list(rows["fresh"].values()) == [True] * 3  # alike for all variants of the sweep
    assert "loss_error" in rows["reason"]["2"]
    assert rows["time_ms"]["2"] is None
    assert rows["variant_version"]["0"] == from_file(tmp_path / "my_loss.py", "fast_tp").version
    assert rows["variant_version"]["1"] is None
