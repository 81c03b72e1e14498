"""Hydra plugins of tpbench: they turn composed configurations into a sweep and run it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import CompactHydraException, HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from tpbench import packages
from tpbench.launcher.attempt import FAILURES
from tpbench.launcher.command_line.checks import check_roots
from tpbench.launcher.command_line.rewrites import chosen_fields, command_line_variants
from tpbench.launcher.host import Host
from tpbench.launcher.hydra_internals import SweepComposer, plain_values
from tpbench.launcher.options import SweepOptions
from tpbench.launcher.planning.plan import Cell, Request, plan, sweep_options
from tpbench.launcher.planning.resume import ResumeDecision, decide
from tpbench.launcher.sweep import Runner, run_sweep
from tpbench.settings import JobError

HYDRA_MODULE = "hydra_plugins.tpbench"
"""Module name of the plugins for Hydra, which accepts only plugins in the package `hydra_plugins`."""


class DryRun(HydraException):
    """End of a dry run. It carries the planned cells and, with resume=true, the decision on each by its index."""

    def __init__(self, cells: Sequence[Cell], decisions: Mapping[int, ResumeDecision]) -> None:
        super().__init__("dry run")
        self.cells, self.decisions = cells, decisions


class TorchrunLauncher(Launcher):
    """`hydra/launcher=torchrun`: plan the whole sweep, then run one torchrun per job on this host."""

    __module__ = HYDRA_MODULE

    def __init__(self, **options: Any) -> None:
        """Accept the options of the launcher's file. `_runner` reads them later, when errors reach the user."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.composer = config, SweepComposer(hydra_context.config_loader, config)
        self.composer.disable_composition_by_sweepers()

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compose every job before the first one runs, so that a mistake in the last one is reported at once."""
        check_roots(self.config, self.config.hydra.runtime.choices)
        folders = _folders(self.config.hydra)
        requests = []
        for index, overrides in enumerate(job_overrides, start=initial_job_idx):
            values = self.composer.values(overrides, index)
            requests.append(Request(index, values, chosen_fields(overrides), folders))
        _run(requests, Path(self.config.hydra.sweep.dir), self.config.hydra.launcher)
        return [JobReturn(overrides=each, status=JobStatus.COMPLETED) for each in job_overrides]


class TorchrunSlurmLauncher(TorchrunLauncher):
    """`hydra/launcher=torchrun_slurm`: plan the whole sweep, then run one Slurm job per cell."""

    __module__ = HYDRA_MODULE


def register() -> None:
    """Register the plugins with Hydra, under names in `hydra_plugins`.

    Hydra finds such a package by itself only if it is installed, and tpbench also runs from a plain checkout. Hence
    this module is entered as `hydra_plugins.tpbench`, where Hydra looks up the names.
    """
    plugins = Plugins.instance()  # first: it imports installed plugins
    parent = sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))
    vars(parent)["tpbench"] = sys.modules[HYDRA_MODULE] = sys.modules[__name__]
    for plugin in (TorchrunLauncher, TorchrunSlurmLauncher):
        plugins.register(plugin)


def run_single(config: DictConfig) -> None:
    """Run one job, for a command line without `-m`. Raises CompactHydraException if the job failed."""
    hydra_config = HydraConfig.get()
    check_roots(config, hydra_config.runtime.choices)
    lines: Any = OmegaConf.to_container(hydra_config.overrides.task)  # ${...} in a line stays as it is
    request = Request(0, plain_values(config), chosen_fields(lines), _folders(hydra_config))
    _run([request], Path(hydra_config.runtime.output_dir), hydra_config.launcher)


def _folders(hydra_config: Any) -> list[Path]:
    """Return the folders that the configuration came from."""
    return [Path(each.path) for each in hydra_config.runtime.config_sources if each.schema == "file"]


def _run(requests: Sequence[Request], folder: Path, launcher: DictConfig) -> None:
    """Plan and run the cells. Raises CompactHydraException for invalid input, and if cells failed."""
    try:
        options = sweep_options(requests)
        runner = _runner(launcher, options)
        cells = plan(requests, runner.target, command_line_variants())
        if options.skip_predicted_oom:
            from tpbench.launcher.planning.forecast import Forecast, skip_predicted_oom  # late: it imports scipy

            cells = skip_predicted_oom(cells, Forecast.of(cells))
        if options.dry_run:
            raise DryRun(cells, decide(cells, runner.facts) if options.resume else {})
        if not packages.installed("torch"):  # the ranks import it, and this process does not
            raise ModuleNotFoundError(name="torch")
        attempts = run_sweep(cells, folder.absolute(), options, runner)
    except JobError as error:
        raise CompactHydraException(str(error)) from None
    failed = Counter(attempt.status for attempt in attempts if attempt.status in FAILURES)
    if failed:
        counts = ", ".join(f"{status}: {count}" for status, count in failed.items())
        raise CompactHydraException(f"{failed.total()} of {len(attempts)} cells failed ({counts})")


def _runner(launcher: DictConfig, options: SweepOptions) -> Runner:
    if launcher._target_.rpartition(".")[2] != TorchrunSlurmLauncher.__name__:
        return Host(options)
    if not packages.installed("submitit"):
        raise JobError(f"hydra/launcher=torchrun_slurm {packages.not_installed(['submitit'])}")
    from tpbench.launcher.slurm.cluster import SlurmSettings
    from tpbench.launcher.slurm.runner import Slurm

    settings: Any = OmegaConf.to_container(launcher, resolve=True)
    del settings["_target_"]
    return Slurm(SlurmSettings.parse(settings), options)
