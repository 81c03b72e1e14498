"""All that tpbench needs of Hydra's private functions: its options' parser, and the composition of a sweep's cells."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from tpbench.settings import JobError


def options_parser() -> ArgumentParser:
    """Return the parser of Hydra's options, such as -m and --cfg."""
    return get_args_parser()


class SweepComposer:
    """Composes the cells of one sweep. Hydra's sweeper, which would compose each to validate it, no longer does."""

    def __init__(self, loader: ConfigLoader, sweep: DictConfig) -> None:
        """`sweep`: the configuration of the whole sweep, with the node `hydra`."""
        self.sweep = sweep
        self.compose = loader.load_sweep_config
        setattr(loader, "load_sweep_config", lambda *args, **kwargs: None)  # noqa: B010  mypy forbids an assignment

    def values(self, lines: Sequence[str], index: int) -> dict[str, Any]:
        """Return the plain values of the cell with these overrides and this index.

        Raises:
            ConfigCompositionException: Hydra cannot compose the cell.
            JobError: a value refers to another one that does not exist.
        """
        config = self.compose(self.sweep, list(lines))
        with open_dict(config):
            config.hydra.job.id, config.hydra.job.num = str(index), index
            HydraConfig.instance().set_config(config)
            del config["hydra"]
        OmegaConf.copy_cache(from_config=self.sweep, to_config=config)  # of resolvers such as ${now:}
        return plain_values(config)


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
