"""Jobs from command-line overrides, composed as the cells of a sweep are, without a command."""

import functools
from collections.abc import Sequence
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from tests.support.command import ROOT
from tpbench.job import Job, parse_job
from tpbench.launcher.command_line.arguments import accepted_by_hydra, rewritten
from tpbench.launcher.command_line.composer import SweepComposer


@functools.cache
def composer() -> SweepComposer:
    """Return what composes the cells of a sweep."""
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        loader: Any = GlobalHydra.instance().config_loader()
        return SweepComposer(loader, loader.load_configuration("config", [], RunMode.MULTIRUN))


def composed(*overrides: str) -> dict[str, Any]:
    """Return the flat values that a command line with these overrides has."""
    if any(".py" in override for override in overrides):  # a test may have changed the file
        composer().shared.clear()
    return composer().values(accepted_by_hydra(rewritten(overrides)), 0)


def job(*overrides: str, chosen: Sequence[str] = ()) -> Job:
    """Return the job that a command line with these overrides describes. `chosen`: names that the user set."""
    return parse_job(composed(*overrides), chosen)
