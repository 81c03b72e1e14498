"""Options of hydra/launcher=torchrun_slurm."""

import os
import re
from dataclasses import replace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import tpbench.launcher.sweep  # noqa: F401  it stores the defaults
from tests.support.command import ROOT
from tpbench.launcher.command_line.arguments import check_overrides
from tpbench.launcher.options import SlurmSettings
from tpbench.launcher.slurm.cluster import drop_client_variables
from tpbench.settings import JobError


def test_the_example_of_further_arguments_is_valid() -> None:
    text = SlurmSettings.__dataclass_fields__["sbatch"].metadata["help"]
    (line,) = re.findall(r"'(\+hydra\.launcher\.sbatch=.*)'", text)
    check_overrides(["hydra/launcher=torchrun_slurm", line])
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        config = compose("config", ["hydra/launcher=torchrun_slurm", line], return_hydra_config=True)
    values: Any = OmegaConf.to_container(config.hydra.launcher)
    del values["_target_"]
    assert set(values) == set(SlurmSettings.__dataclass_fields__)
    sbatch = (("mail-type", "END"), ("reservation", "tests"))
    assert SlurmSettings.parse(values) == replace(SlurmSettings(), sbatch=sbatch)


def test_every_line_of_setup_stands_alone() -> None:
    """One that fails within a text of several lines must not be hidden by the last one."""
    text = "module load cuda\n# then\n\nexport X='#'"
    assert SlurmSettings.parse({"setup": [text, " "]}).setup == ("module load cuda", "export X='#'")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"time_limit_min": 0}, "time_limit_min=0 must be at least 1"),
        ({"gpus_per_node": "many"}, "gpus_per_node=many must be a whole number"),
        ({"setup": {"a": 1}}, "setup must be a list of shell lines"),
        ({"setup": ["true", None]}, "setup must be a list of shell lines"),
        ({"sbatch": {"array": "1-3", "no_requeue": True}}, "sbatch cannot set array, no-requeue: tpbench does"),
        ({"nodes": 4}, "no option of torchrun_slurm is called nodes"),
    ],
)
def test_invalid_options_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        SlurmSettings.parse(values)


def test_variables_that_change_slurms_commands_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = (
        "SQUEUE_PARTITION",
        "SBATCH_WAIT",
        "SBATCH_PARTITION",
        "SLURM_MEM_PER_CPU",
        "SBATCH_ACCOUNT",
        "SLURM_CONF",
    )
    for name in variables:
        monkeypatch.setenv(name, "x")
    drop_client_variables(SlurmSettings(partition="gpu"))
    assert [name for name in variables if name in os.environ] == ["SBATCH_ACCOUNT", "SLURM_CONF"]
