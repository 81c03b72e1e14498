"""Messages about missing packages name what setup.cfg declares, and a command for the environment of this Python."""

import configparser
import re
import shlex
import sys
from pathlib import Path

import pytest

from tpbench import packages
from tpbench.report import plots
from tpbench.settings import JobError
from tpbench.workloads.study_data import Picture

ROOT = Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip", "install"]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def declared(requirements: str) -> set[str]:
    """Return the names of the packages in a list of requirements, without tpbench's own extras."""
    return set(re.findall(r"^[\w-]+", requirements, re.MULTILINE)) - {"tpbench"}


def hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Make these modules look as if they were not installed."""
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]


def test_the_tables_agree_with_setup_cfg() -> None:
    names = {"hydra": "hydra-core", "pynvml": "nvidia-ml-py", "yaml": "pyyaml"}
    required = {names.get(module, module) for module in packages.REQUIRED}
    extras = SETUP["options.extras_require"]
    assert required == declared(SETUP["options"]["install_requires"] + extras["bench"])
    names = {"liger_kernel": "liger-kernel", "megatron": "megatron-core", "quack": "quack-kernels"}
    for extra in ("report", "slurm", "peers", "train"):
        modules = [module for module, own in packages.OPTIONAL.items() if own == f"[{extra}]"]
        listed = {names.get(module, module) for module in modules}
        assert listed == declared(extras[extra])


def test_versions_are_of_optional_packages_under_their_own_names() -> None:
    found = packages.versions(["torch", "pytest", "_pytest", "not_installed", "tests"])
    assert found == f"pytest {pytest.__version__}, tests unknown"
    assert packages.versions(["torch", "triton"]) is None


def test_in_a_checkout_the_command_names_its_folder() -> None:
    assert packages.checkout() == ROOT
    assert shlex.split(packages.install_command("report")) == [*PIP, "-e", f"{ROOT}[report]"]


def test_elsewhere_the_command_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(packages, "__file__", str(tmp_path / "site-packages/tpbench/packages.py"))
    assert packages.checkout() is None
    assert packages.install_command("report").endswith(" -m pip install 'tpbench[report]'")
    assert shlex.split(packages.install_command("report")) == [*PIP, "tpbench[report]"]


def test_one_command_for_each_extra() -> None:
    train, peers = packages.install_command("train"), packages.install_command("peers")
    needs = packages.not_installed(["transformers", "deepspeed", "quack"])
    assert needs.startswith(f"needs transformers, deepspeed, quack (not installed): {train} and {peers}")
    assert packages.not_installed(["flash_attn"]).endswith("-m pip install flash-attn --no-build-isolation")
    assert packages.not_installed(["triton"]) == "needs triton (not installed)"


def test_a_missing_optional_package_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, "submitit")
    with pytest.raises(SystemExit, match=r"^2$"), packages.explain_missing():
        import submitit  # noqa: F401
    assert re.search(r"needs submitit \(not installed\): .*\[slurm\]", capsys.readouterr().err)


def test_other_errors_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("tpbench.no_such_module", "no_such_package", "yaml.no_such_part"):
        with pytest.raises(ModuleNotFoundError), packages.explain_missing():
            __import__(module)
    with pytest.raises(ImportError, match="cannot import name"), packages.explain_missing():
        from yaml import no_such_name  # noqa: F401


def test_the_message_of_plots_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "matplotlib")
    with pytest.raises(JobError) as error:
        plots.render(Picture((), "x", "y"), "a plot")
    assert packages.install_command("report") in str(error.value)
