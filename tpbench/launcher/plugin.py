"""Hydra plugins of tpbench: they turn composed configurations into a sweep and run it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import CompactHydraException, HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from tpbench import packages
from tpbench.launcher import outside_variants
from tpbench.launcher.attempt import FAILURES
from tpbench.launcher.host import Host
from tpbench.launcher.options import SweepOptions
from tpbench.launcher.overrides import chosen_fields, present_names
from tpbench.launcher.plan import Cell, Request, plan, sweep_options
from tpbench.launcher.sweep import Runner, run_sweep
from tpbench.settings import JobError

HYDRA_MODULE = "hydra_plugins.tpbench"
"""Module name of the plugins for Hydra, which accepts only plugins in the package `hydra_plugins`."""


class DryRun(HydraException):
    """End of a dry run. It carries the planned cells instead of running them."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        super().__init__("dry run")
        self.cells = cells


class TorchrunLauncher(Launcher):
    """`hydra/launcher=torchrun`: plan the whole sweep, then run one torchrun per job on this host."""

    __module__ = HYDRA_MODULE

    def __init__(self, **options: Any) -> None:
        """Accept the options of the launcher's file. `_runner` reads them later, when errors reach the user."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.config = hydra_context, config
        _compose_once(hydra_context.config_loader)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compose every job before the first one runs, so that a mistake in the last one is reported at once."""
        requests = []
        for index, overrides in enumerate(job_overrides, start=initial_job_idx):
            config = self.context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(config):
                config.hydra.job.id, config.hydra.job.num = str(index), index
            requests.append(_request(config, index))
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
    with open_dict(config):
        config.hydra = hydra_config
    _run([_request(config, 0)], Path(hydra_config.runtime.output_dir), hydra_config.launcher)


def _compose_once(loader: ConfigLoader) -> None:
    """Make the loader return a job's configuration to the launcher that the sweeper has composed a moment before.

    Hydra's sweeper composes every job (0.1 s each) to validate it, and has no option to switch that off.
    """
    compose = loader.load_sweep_config
    composed: dict[tuple[str, ...], DictConfig] = {}

    def compose_once(master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        key = tuple(sweep_overrides)
        if key in composed:
            return composed.pop(key)
        composed[key] = config = compose(master_config, present_names(sweep_overrides))
        return config

    setattr(loader, "load_sweep_config", compose_once)  # noqa: B010  mypy forbids an assignment


def _request(config: DictConfig, index: int) -> Request:
    # A job's own fields may contain ${hydra:...}, which is resolved from HydraConfig.
    HydraConfig.instance().set_config(config)
    plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    try:
        values: Any = OmegaConf.to_container(plain, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        raise JobError(f"a value refers to another one that cannot be found: {error}") from None
    folders = [Path(each.path) for each in config.hydra.runtime.config_sources if each.schema == "file"]
    return Request(index, values, chosen_fields(config.hydra.overrides.task), folders)


def _run(requests: Sequence[Request], folder: Path, launcher: DictConfig) -> None:
    """Plan and run the cells. Raises CompactHydraException for invalid input, and if cells failed."""
    try:
        options = sweep_options(requests)
        runner = _runner(launcher, options)
        cells = plan(requests, runner.target, outside_variants.named())
        if options.skip_predicted_oom:
            from tpbench.launcher.forecast import Forecast, skip_predicted_oom  # late: it imports scipy

            cells = skip_predicted_oom(cells, Forecast.of(cells))
        if options.dry_run:
            raise DryRun(cells)
        packages.require("torch")  # the ranks import it, and this process does not
        outcomes = run_sweep(cells, folder.absolute(), options, runner)
    except JobError as error:
        raise CompactHydraException(str(error)) from None
    failed = Counter(outcome.status for outcome in outcomes if outcome.status in FAILURES)
    if failed:
        counts = ", ".join(f"{status}: {count}" for status, count in failed.items())
        raise CompactHydraException(f"{failed.total()} of {len(outcomes)} cells failed ({counts})")


def _runner(launcher: DictConfig, options: SweepOptions) -> Runner:
    if launcher._target_.rpartition(".")[2] != TorchrunSlurmLauncher.__name__:
        return Host(options)
    if not packages.installed("submitit"):
        raise JobError(f"hydra/launcher=torchrun_slurm {packages.not_installed(['submitit'])}")
    from tpbench.launcher.slurm.runner import Slurm
    from tpbench.launcher.slurm.settings import SlurmSettings

    settings: Any = OmegaConf.to_container(launcher, resolve=True)
    del settings["_target_"]
    return Slurm(SlurmSettings.parse(settings), options)
