"""Jobs from command-line overrides, composed by Hydra without a command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hydra
from omegaconf import OmegaConf

from tests.support.command import ROOT
from tpbench.job import Job, parse_job
from tpbench.launcher.overrides import flat_names, force_fields


def composed(*overrides: str) -> dict[str, Any]:
    """Return the flat values that a command line with these overrides has."""
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        values = OmegaConf.to_container(hydra.compose("config", overrides=force_fields(flat_names(overrides))))
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}


def job(*overrides: str, chosen: Sequence[str] = ()) -> Job:
    """Return the job that a command line with these overrides describes. `chosen`: names that the user set."""
    return parse_job(composed(*overrides), chosen)
