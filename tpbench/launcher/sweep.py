"""Hydra's plugins: they compose the cells of a sweep, plan them, and run them."""

import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.conf import HydraConf
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.config_source import ConfigSource
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf

from tpbench import packages
from tpbench.launcher.attempt import FAILURES
from tpbench.launcher.command_line import arguments
from tpbench.launcher.command_line.composer import SweepComposer
from tpbench.launcher.command_line.outside_choices import command_line_variants
from tpbench.launcher.display import QUIET_S
from tpbench.launcher.host import Host
from tpbench.launcher.options import CODE, CONF, GROUPS, SlurmSettings, SweepOptions, command_line_names
from tpbench.launcher.planning.plan import Request, plan, sweep_options
from tpbench.launcher.planning.resume import decide
from tpbench.launcher.runner import Runner, run_sweep
from tpbench.settings import JobError, SweepError, user_path
from tpbench.suggestions import unknown

HYDRA_MODULE = "hydra_plugins.tpbench"
"""Module name of the plugins for Hydra, which accepts only plugins in the package `hydra_plugins`."""


class TorchrunLauncher(Launcher):
    """`hydra/launcher=torchrun`: plan the whole sweep, then run one torchrun per job on this host."""

    __module__ = HYDRA_MODULE

    def __init__(self, **options: Any) -> None:
        """Accept the options of the launcher's file. `runner` reads them later, when errors reach the user."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.composer = config, SweepComposer(hydra_context.config_loader, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        of_hydra = Path(self.config.hydra.sweep.dir)  # its sweeper has written a file there
        shutil.rmtree(of_hydra, ignore_errors=True)
        folder = user_path(self.config.output_dir, "output_dir").absolute() / "sweeps" / of_hydra.name
        self._plan_and_run(self._requests(job_overrides, initial_job_idx), folder)
        return [JobReturn(overrides=overrides, status=JobStatus.COMPLETED) for overrides in job_overrides]

    def runner(self, options: SweepOptions) -> Runner:
        return Host(options)

    def _requests(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[Request]:
        """Compose every job before the first one runs, so that a mistake in the last one is reported at once."""
        arguments.check_overrides(dict.fromkeys(line for lines in job_overrides for line in lines))
        # A field of the command line takes the place of an experiment's, which Hydra's sweeper takes for another field.
        # Otherwise each cell would be composed once for every value that the experiment has.
        last = dict.fromkeys(
            tuple({line.lstrip("+").partition("=")[0]: line for line in lines}.values()) for lines in job_overrides
        )
        jobs = dict.fromkeys(job for lines in last for job in self.composer.variants_of(lines))
        if not jobs:
            raise JobError("the sweep has no cells: some name has no values")
        requests: list[Request] = []
        printed = time.monotonic()
        for index, lines in enumerate(jobs, start=initial_job_idx):
            values, chosen = self.composer.values(lines, index), arguments.chosen_fields(lines)
            requests.append(Request(index, values, chosen, arguments.overrides_of_cell(lines)))
            if time.monotonic() - printed > QUIET_S:
                printed = time.monotonic()
                print(f"{len(requests)} of {len(jobs)} cells are composed", file=sys.stderr, flush=True)
        names = dict.fromkeys(name for one in requests for name in one.values if name not in one.chosen)
        _check_files(self.config, self.config.hydra.runtime.choices, names)
        return requests

    def _plan_and_run(self, requests: Sequence[Request], folder: Path) -> None:
        """Plan and run the cells. Raises JobError for invalid input, and if cells failed."""
        options = sweep_options(requests)
        runner = self.runner(options)
        cells = plan(requests, runner.target, command_line_variants)
        if options.dry_run:
            from tpbench.launcher.planning.forecast import dry_run_text

            decisions = decide(cells, runner.facts) if options.resume else {}
            print(dry_run_text(cells, decisions, runner.target, options.reuse), end="")
            return
        if not packages.installed("torch"):  # the ranks import it, and this process does not
            raise ModuleNotFoundError(name="torch")
        for output_dir in {cell.job.output_dir for cell in cells}:
            try:
                Path(output_dir, "rows").mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise JobError(f"output_dir={output_dir} cannot be written: {error.strerror}") from None
        try:
            attempts = run_sweep(cells, folder, options, runner)
        except JobError as error:
            raise SweepError(str(error)) from None
        if failed := Counter(attempt.status for attempt in attempts if attempt.status in FAILURES):
            counts = ", ".join(f"{status}: {count}" for status, count in failed.items())
            raise SweepError(f"{failed.total()} of {len(attempts)} cells failed ({counts})")


class TorchrunSlurmLauncher(TorchrunLauncher):
    """`hydra/launcher=torchrun_slurm`: plan the whole sweep, then run one Slurm job per cell."""

    __module__ = HYDRA_MODULE

    def runner(self, options: SweepOptions) -> Runner:
        if not packages.installed("submitit"):
            raise JobError(f"hydra/launcher=torchrun_slurm {packages.not_installed(['submitit'])}")
        from tpbench.launcher.slurm.jobs import Slurm

        settings: Any = OmegaConf.to_container(self.config.hydra.launcher, resolve=True)
        del settings[CODE]
        return Slurm(SlurmSettings.parse(settings), options)


def register() -> None:
    """Register the plugins with Hydra, which looks up their names in `hydra_plugins`, also from a plain checkout."""
    plugins = Plugins.instance()  # first: it imports installed plugins
    parent = sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))
    vars(parent)["tpbench"] = sys.modules[HYDRA_MODULE] = sys.modules[__name__]
    for plugin in (TorchrunLauncher, TorchrunSlurmLauncher):
        plugins.register(plugin)
    header: Any = ConfigSource._get_header_dict  # the header of a file that may begin with a byte-order mark
    setattr(ConfigSource, "_get_header_dict", staticmethod(lambda text: header(text.lstrip("\ufeff"))))  # noqa: B010
    load: Any = ConfigLoaderImpl.load_configuration

    def checked(loader: ConfigLoaderImpl, *arguments: Any, **named: Any) -> DictConfig:
        config: DictConfig = load(loader, *arguments, **named)
        if config.hydra.job.get("config_name"):  # otherwise only Hydra's own help is asked for
            _check_hydra(config.hydra)  # before Hydra makes objects of it
        return config

    setattr(ConfigLoaderImpl, "load_configuration", checked)  # noqa: B010
    # Hydra would compose the whole configuration only to find its mode, which `arguments.for_hydra` sets.
    setattr(Hydra, "get_mode", lambda *_, **__: RunMode.MULTIRUN)  # noqa: B010
    # The values that an experiment sweeps are forced and quoted as arguments are, which then replace them.
    of_experiment = BasicSweeper._parse_config
    setattr(BasicSweeper, "_parse_config", lambda sweeper: arguments.accepted_by_hydra(of_experiment(sweeper)))  # noqa: B010


def _check_hydra(hydra: DictConfig) -> None:
    """Raise JobError for a setting of Hydra by a file that nothing reads, or that names Python code."""
    own = OmegaConf.merge(OmegaConf.structured(HydraConf), OmegaConf.load(CONF / "config.yaml").hydra)
    trees: list[Any] = [*map(OmegaConf.to_container, (hydra, own))]
    given, plain = ({**tree, **tree["job"]} for tree in trees)
    for name in ("run", "sweep", "output_subdir", "callbacks", "verbose", "chdir", "env_set", "env_copy"):
        if given[name] != plain[name]:  # a folder of a sweep would even be removed
            place = f"hydra.{'job.' * (name in own.job)}{name}"
            what = "has no effect: hydra.launcher and sweeper.params have one"
            raise JobError(f"in a configuration file: {place} {what}")
    plugins = (OmegaConf.to_container(hydra[name], resolve=True) for name in ("launcher", "sweeper"))
    code = re.findall(rf"'{CODE}': ('[^']*'|.)", f"{[*plugins]}")
    if not re.fullmatch(rf"'{HYDRA_MODULE}\.\w+' '{BasicSweeper.__module__}\.BasicSweeper'", " ".join(code)):
        raise JobError(f"in a configuration file: {CODE} names Python code, which isn't allowed")


def _check_files(config: Any, choices: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise JobError for what files set and nothing reads. `choices`: those of groups. `names`: of all their values."""
    for group in ("shape", "model", "measure", "experiment"):
        if isinstance(config.get(group), DictConfig):
            raise JobError(f"{group}={choices.get(group)}: its file must begin with the line `# @package _global_`")
        if config.get(group) not in (None, choices.get(group)):
            raise JobError(f"`{group}:` at the root of a file selects nothing: choose it in the file's `defaults:`")
    valid = {*command_line_names(), *GROUPS, "hub_ids", "shape_workload"}
    errors = [unknown("field", name, valid, "python -m tpbench list fields") for name in names if name not in valid]
    if errors:
        raise JobError("\n".join(f"in a configuration file: {error}" for error in errors))
