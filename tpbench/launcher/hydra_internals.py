"""All that tpbench needs of Hydra's private functions: its options' parser, and quick composition of a sweep's cells.

Hydra's loader reads all files and merges Hydra's own configuration again for each cell, twice. Here each file is read
once, each combination of choices is merged once, and Hydra's own configuration stays that of the sweep.
"""

from __future__ import annotations

import copy
import functools
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from tpbench.settings import JobError

MAX_COMBINATIONS = 1000
"""Most combinations of choices whose values are kept. Each takes some kilobytes."""


def options_parser() -> ArgumentParser:
    """Return the parser of Hydra's options, such as -m and --cfg."""
    return get_args_parser()


class SweepComposer:
    """Composes the cells of one sweep."""

    def __init__(self, loader: ConfigLoader, sweep: DictConfig) -> None:
        """`sweep`: the configuration of the whole sweep, with the node `hydra`."""
        assert isinstance(loader, ConfigLoaderImpl)
        self.loader, self.sweep = loader, sweep
        self.compose_with_hydra = loader.load_sweep_config
        options: Any = OmegaConf.to_container(sweep.hydra.overrides.hydra)
        _, self.files = loader._parse_overrides_and_create_caching_repo(sweep.hydra.job.config_name, options)
        self.parse = functools.cache(OverridesParser.create().parse_override)
        self.values_of_choices = functools.lru_cache(MAX_COMBINATIONS)(self._values_of_choices)

    def disable_composition_by_sweepers(self) -> None:
        """Keep Hydra's sweeper from composing each cell to validate it. The sweeper has no option for that."""
        setattr(self.loader, "load_sweep_config", lambda *args, **kwargs: None)  # noqa: B010  mypy forbids an assignment

    def values(self, lines: Sequence[str], index: int) -> dict[str, Any]:
        """Return the plain values of the cell with these overrides and this index.

        Raises:
            ConfigCompositionException: Hydra cannot compose the cell.
            JobError: a value refers to another one that does not exist.
        """
        overrides = list(map(self.parse, lines))
        is_choice = [self.files.group_exists(override.key_or_group) for override in overrides]
        choices = tuple(line for line, choice in zip(lines, is_choice, strict=True) if choice)
        try:
            config = OmegaConf.create(self.values_of_choices(choices))
            OmegaConf.set_struct(config, True)
            fields = [override for override, choice in zip(overrides, is_choice, strict=True) if not choice]
            self.loader._apply_overrides_to_config(fields, config)
        except OmegaConfBaseException as error:
            raise ConfigCompositionException from error
        if "${hydra:" in str(config):
            whole = self.compose_with_hydra(self.sweep, list(lines))
            with open_dict(whole):
                whole.hydra.job.id, whole.hydra.job.num = str(index), index
            HydraConfig.instance().set_config(whole)
        OmegaConf.copy_cache(from_config=self.sweep, to_config=config)  # of resolvers such as ${now:}
        return plain_values(config)

    def _values_of_choices(self, choices: Sequence[str]) -> dict[str, Any]:
        """Return the values of the files that these choices select, with interpolations unresolved."""
        defaults = create_defaults_list(
            self.files,
            self.sweep.hydra.job.config_name,
            list(map(self.parse, choices)),
            prepend_hydra=True,  # files may override choices of Hydra's own groups
            skip_missing=False,
        )
        parts = [part for part in defaults.defaults if not str(part.config_path).startswith("hydra/")]
        files = copy.copy(self.files)  # the merge changes what it merges
        files.cache = copy.deepcopy(
            {key: files.cache[key] for part in parts if (key := f"config_path={part.config_path}")}
        )
        config = self.loader._compose_config_from_defaults_list(parts, files)
        OmegaConf.set_struct(config, True)
        self.loader._apply_overrides_to_config(defaults.config_overrides, config)
        values: Any = OmegaConf.to_container(config)
        return {name: value for name, value in values.items() if name != "hydra"}


def plain_values(config: DictConfig) -> dict[str, Any]:
    """Return the resolved values. Raises JobError if one refers to a value that does not exist."""
    try:
        values: Any = OmegaConf.to_container(config, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        key, reason = getattr(error, "full_key", None), str(error).partition("\n")[0]
        raise JobError(
            f"a value refers to another one that cannot be found: {f'{key}: ' * bool(key)}{reason}"
        ) from None
    return dict(values)
