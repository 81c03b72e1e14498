"""Hydra's side of the launcher: composed configurations in, job returns out."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.errors import CompactHydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from tpbench.launcher.attempt import FAILURES, Outcome
from tpbench.launcher.host import Host
from tpbench.launcher.options import SweepOptions
from tpbench.launcher.overrides import chosen_fields, present_names
from tpbench.launcher.plan import Request, conduct, plan
from tpbench.launcher.sweep import Runner, run_sweep
from tpbench.settings import JobError


class TorchrunLauncher(Launcher):
    """`hydra/launcher=torchrun`: plans the whole sweep, then runs a torchrun for each job on this host."""

    def __init__(self, **options: Any) -> None:
        """Hydra passes what the launcher's file says. It is read in `_runner`, whose complaints reach the person."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.config = hydra_context, config
        _compose_once(hydra_context.config_loader)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compose every job before the first one runs, so that a mistake in the last is known at once."""
        setup_globals()
        requests = []
        for index, overrides in enumerate(job_overrides, start=initial_job_idx):
            config = self.context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(config):
                config.hydra.job.id, config.hydra.job.num = str(index), index
            requests.append(_request(config, index))
        folder = Path(self.config.hydra.sweep.dir)
        outcomes = _run(requests, folder, self.config.hydra.launcher)
        failure = _failure(outcomes)
        return [_job_return(outcome, request, failure) for outcome, request in zip(outcomes, requests, strict=True)]


class TorchrunSlurmLauncher(TorchrunLauncher):
    """`hydra/launcher=torchrun_slurm`: the same, with a Slurm job for each."""


LAUNCHERS = (TorchrunLauncher, TorchrunSlurmLauncher)


def run_single(config: DictConfig) -> None:
    """The same path for a command line without `-m`. Raises CompactHydraException when the job failed."""
    hydra_config = HydraConfig.get()
    with open_dict(config):
        config.hydra = hydra_config
    outcomes = _run([_request(config, 0)], Path(hydra_config.runtime.output_dir), hydra_config.launcher)
    if failure := _failure(outcomes):
        raise failure


def register() -> None:
    """Make the launcher known to Hydra, which takes plugins only from under `hydra_plugins`.

    That namespace is scanned once for installed distributions; a checkout that was never installed is not found there,
    so the classes are given the name that Hydra wants and registered by hand.
    """
    plugins = Plugins.instance()
    parent = sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))
    module = ModuleType("hydra_plugins.tpbench")
    vars(parent)["tpbench"] = module
    sys.modules[module.__name__] = module
    for launcher in LAUNCHERS:
        launcher.__module__ = module.__name__
        setattr(module, launcher.__name__, launcher)
        plugins.register(launcher)


def _compose_once(loader: ConfigLoader) -> None:
    """Hydra's sweeper composes every job to see whether that can be done, a moment before the launcher composes it to
    run it: 0.1 s each time. The launcher gets what the sweeper made."""
    compose = loader.load_sweep_config
    made: dict[tuple[str, ...], DictConfig] = {}

    def once(master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        key = tuple(sweep_overrides)
        if key in made:
            return made.pop(key)
        made[key] = config = compose(master_config, present_names(sweep_overrides))  # an experiment may have old ones
        return config

    setattr(loader, "load_sweep_config", once)  # noqa: B010  mypy forbids it as an assignment


def _request(config: DictConfig, index: int) -> Request:
    overrides = list(config.hydra.overrides.task)
    # Without HydraConfig set, ${hydra:...} in a job's own fields could not be resolved.
    HydraConfig.instance().set_config(config)
    plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    values: Any = OmegaConf.to_container(plain, resolve=True)
    folders = [Path(each.path) for each in config.hydra.runtime.config_sources if each.schema == "file"]
    return Request(index, values, chosen_fields(overrides), overrides, folders)


def _run(requests: Sequence[Request], folder: Path, launcher: DictConfig) -> list[Outcome]:
    try:
        how = conduct(requests)
        runner = _runner(launcher, how)
        cells = plan(requests, runner.place)
        if how.skip_predicted_oom or how.dry_run:
            from tpbench.console.plan import foretell, without_predicted_oom  # late: they import scipy

            if how.skip_predicted_oom:
                cells = without_predicted_oom(cells)
            if how.dry_run:
                raise DryRun(foretell(cells))
        return run_sweep(cells, folder.absolute(), how, runner)
    except JobError as error:
        raise CompactHydraException(str(error)) from None


def _runner(launcher: DictConfig, how: SweepOptions) -> Runner:
    if launcher._target_.rpartition(".")[2] != TorchrunSlurmLauncher.__name__:
        return Host(how)
    if importlib.util.find_spec("submitit") is None:
        raise JobError("hydra/launcher=torchrun_slurm needs submitit: pip install 'tpbench[slurm]'")
    from tpbench.launcher.slurm.runner import Slurm
    from tpbench.launcher.slurm.settings import SlurmSettings

    options: Any = OmegaConf.to_container(launcher, resolve=True)
    del options["_target_"]
    return Slurm(SlurmSettings.parse(options), how)


class DryRun(CompactHydraException):
    """Not a failure: the plan of a sweep, instead of the sweep."""


def _failure(outcomes: Sequence[Outcome]) -> CompactHydraException | None:
    """What a sweep or a job ends with if it did not end well."""
    failed = [outcome for outcome in outcomes if outcome.status in FAILURES]
    if not failed:
        return None
    counts = ", ".join(f"{name}: {count}" for name, count in Counter(each.status for each in failed).items())
    return CompactHydraException(f"{len(failed)} of {len(outcomes)} cells failed ({counts})")


def _job_return(outcome: Outcome, request: Request, failure: CompactHydraException | None) -> JobReturn:
    """Hydra's sweeper raises the first failure that it finds: it is made to speak for the whole sweep."""
    result = JobReturn()
    result.overrides = request.overrides
    result.cfg = OmegaConf.create(request.values)
    result.task_name = "tpbench"
    failed = outcome.status in FAILURES
    result.status = JobStatus.FAILED if failed else JobStatus.COMPLETED
    result.return_value = failure if failed else outcome.status
    return result
