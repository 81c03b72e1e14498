"""Compose the cells of a sweep by Hydra."""

import copy
import re
from collections.abc import Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from tpbench.launcher.options import GROUPS, SlurmSettings, store_defaults
from tpbench.settings import JobError, defaults, job_error
from tpbench.workloads import variants

_FIELD = re.compile(r"\+\+(?!.*hydra)")
"""An override of a field, as `accepted_by_hydra` writes it, that does not refer to Hydra."""

store_defaults()
# A command line adds to `sbatch` as to a mapping.
ConfigStore.instance().store("slurm_defaults", {**defaults(SlurmSettings), "sbatch": {}})


class SweepComposer:
    """Composes the cells of one sweep. Hydra's sweeper, which would compose each to validate it, no longer does."""

    def __init__(self, loader: ConfigLoader, sweep: DictConfig) -> None:
        """`sweep`: the configuration of the whole sweep, with the node `hydra`."""
        self.sweep = sweep
        self.compose = loader.load_sweep_config
        self.shared: dict[tuple[str, ...], DictConfig | None] = {}
        setattr(loader, "load_sweep_config", lambda *args, **kwargs: None)  # noqa: B010  mypy forbids an assignment
        OmegaConf.register_new_resolver("tpbench.not", lambda value: not value, replace=True)
        OmegaConf.register_new_resolver("tpbench.difference", _difference, replace=True)

    def variants_of(self, lines: Sequence[str]) -> list[tuple[str, ...]]:
        """Return these overrides for each variant that they mean: `all` means those of the workload of the shape."""
        own = next((line for line in lines if line.startswith("variant=")), f"variant={self.sweep.get('variant')}")
        if own != "variant=all":
            return [tuple(lines)]
        # Fields of the workload cannot be composed, because this choice of a variant has no workload.
        choices = [line for line in lines if line.lstrip("+").partition("=")[0] in GROUPS]
        workload = self.compose(self.sweep, choices).get("shape_workload")
        names = [name for name, (owner, _) in variants().items() if owner.name == workload]
        return [(*(line for line in lines if line != own), f"variant={name}") for name in names]

    def values(self, lines: Sequence[str], index: int) -> dict[str, Any]:
        """Return the plain values of the cell. Raises JobError if a value refers to another one that does not exist."""
        config = self._of_choices(tuple(line for line in lines if not _FIELD.match(line)))
        if config is None:
            config = self._composed(lines, index)
        else:
            fields = OverridesParser.create().parse_overrides(list(filter(_FIELD.match, lines)))
            ConfigLoaderImpl._apply_overrides_to_config(fields, config := copy.deepcopy(config))
        OmegaConf.copy_cache(from_config=self.sweep, to_config=config)  # of resolvers such as ${now:}
        try:
            values: Any = OmegaConf.to_container(config, resolve=True)
        except (OmegaConfBaseException, RecursionError) as error:
            if refused := job_error(error):
                raise refused from None
            key, reason = getattr(error, "full_key", None), str(error).partition("\n")[0]
            place = f"{key}: " if key else ""
            raise JobError(f"a value refers to another one that cannot be found: {place}{reason}") from None
        return dict(values)

    def _of_choices(self, lines: tuple[str, ...]) -> DictConfig | None:
        """Return the configuration that cells with these choices have in common, or None if it refers to the cell.

        Cells that differ in fields alone share it: to compose each of 200 cells by itself took 43 s, this takes 5.
        """
        if lines not in self.shared:
            config = self._composed(lines)
            self.shared[lines] = None if "${hydra" in OmegaConf.to_yaml(config) else config
        return self.shared[lines]

    def _composed(self, lines: Sequence[str], index: int = 0) -> DictConfig:
        """Return the configuration without the node `hydra`, which `${hydra:...}` still finds."""
        config = self.compose(self.sweep, list(lines))
        with open_dict(config):
            config.hydra.job.id, config.hydra.job.num = str(index), index
            HydraConfig.instance().set_config(config)
            del config["hydra"]
        return config


def _difference(name: str, value: object, other_name: str, other: object) -> int:
    """Return `value - other`, of fields with these names. Raises JobError if it isn't a number above 0."""
    if not (isinstance(value, int) and isinstance(other, int) and value > other):
        raise JobError(f"{name}={value} includes {other_name}={other}: it must be a larger number")
    return value - other
