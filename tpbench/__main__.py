"""`python -m tpbench`: Hydra's entry. Sweeps and single jobs take the same path through the launcher."""

from __future__ import annotations

import os
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import tpbench
from tpbench import console
from tpbench.launcher import plugin
from tpbench.launcher.overrides import check_overrides, flat_names, force_fields, quote_numbers
from tpbench.launcher.process import Terminated, raise_on_sigterm
from tpbench.settings import JobError

CONF = str(Path(__file__).resolve().parent / "conf")


def _sweep_id() -> str:
    """Sorts by time, and differs between sweeps that start in the same second."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"


_failures: list[HydraException] = []
"""Of a job without `-m`: raised from within, Hydra would announce it with a line of its own."""


@hydra.main(version_base="1.3", config_path=CONF, config_name="config")
def _hydra_main(config: DictConfig) -> None:
    try:
        plugin.run_single(config)
    except HydraException as error:
        _failures.append(error)


def main() -> None:
    """Run the command line; exits 0 unless a cell ended as error, timeout or wrong, or the input was refused."""
    if sys.argv[1:] == ["--version"]:
        print(f"tpbench {tpbench.__version__}")
        return
    if (code := console.answer(sys.argv[1:])) is not None:
        sys.exit(code)
    OmegaConf.register_new_resolver("tpbench.sweep_id", _sweep_id, use_cache=True, replace=True)
    plugin.register()
    raise_on_sigterm()
    # Hydra then leaves errors to us, who print no stack for a mistake in the input.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        arguments = flat_names(sys.argv[1:])
        if not {"-sc", "--shell-completion"} & set(arguments):  # whose words are Hydra's own
            check_overrides(arguments, Path(CONF))
        sys.argv[1:] = force_fields(quote_numbers(arguments))
        _hydra_main()
        if _failures:
            raise _failures[0]
    except plugin.DryRun as planned:
        print(planned, end="")
    except (JobError, HydraException) as error:
        cause = f"\n{error.__cause__}" if isinstance(error.__cause__, OmegaConfBaseException) else ""
        sys.exit(f"tpbench: {error}{cause}")
    except OSError as error:  # folders that cannot be made, a disk that is full: Hydra makes some before we look
        sys.exit(f"tpbench: {error}")
    except (KeyboardInterrupt, Terminated):
        sys.exit(130)


if __name__ == "__main__":
    main()
