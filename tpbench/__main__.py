"""Entry point of `python -m tpbench`: Hydra composes the jobs, and the launcher runs single jobs and sweeps alike."""

import os
import re
import shlex
import sys
import tempfile
import time
import traceback
import uuid
from pathlib import Path
from typing import NoReturn

from tpbench import packages

with packages.explain_missing():
    import hydra
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from tpbench import console
    from tpbench.files import explained
    from tpbench.launcher import interrupts, sweep
    from tpbench.launcher.command_line import arguments as command_line
    from tpbench.launcher.options import COMMANDS, CONF, SlurmSettings, unknown_choice
    from tpbench.settings import JobError, job_error
    from tpbench.suggestions import printable, unknown


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def _hydra_main(config: DictConfig) -> None:
    """Raise JobError: the launchers of tpbench run jobs in processes of their own, and never call this."""
    raise JobError(
        "a file of -cn begins with `defaults: [config, _self_]`, and hydra/launcher is torchrun or torchrun_slurm"
    )


@packages.explain_missing()
def main() -> None:
    """Run the command line. The exit code is 1 if a cell ends as error, timeout or wrong, and 2 for invalid input."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _leave_torchrun()
    command_line.typed[:] = sys.argv[1:]
    if (code := console.information(sys.argv[1:])) is not None:
        sys.exit(code)
    # A temporary folder for Hydra, with the sweep's unique name, which sorts by time.
    folder = f"{tempfile.gettempdir()}/{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:6]}"
    OmegaConf.register_new_resolver("tpbench.sweep_dir", lambda: folder, replace=True)
    sweep.register()
    interrupts.exit_at_once()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors, which are printed here without a stack
    try:
        if not {"-sc", "--shell-completion"} & set(sys.argv):  # then Hydra has arguments of its own
            sys.argv[1:] = command_line.for_hydra(sys.argv[1:])
        _hydra_main()
    except HydraException as error:
        _exit(_hydra_message(error))
    except OSError as error:  # Hydra creates folders, which fails on a full disk or without permission
        _exit(explained(error))
    except interrupts.Terminated:
        sys.exit(interrupts.EXIT_CODE)
    except Exception as error:
        if refused := job_error(error):
            _exit(str(refused), refused.exit_code)
        files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)} - {__file__, packages.__file__}
        if any(Path(file).is_relative_to(Path(__file__).parent) for file in files):  # tpbench's own modules called it
            raise
        _exit(f"Hydra cannot use this configuration: {type(error).__name__}: {error}")


def _leave_torchrun() -> None:
    """End unless this is rank 0 of a torchrun, which does the work as without torchrun."""
    if os.environ["RANK"] != "0":
        sys.exit()
    if sys.argv[1:] and sys.argv[1] not in COMMANDS:
        sys.argv[1:] = command_line.without_dashes(sys.argv[1:])
    line = printable(f"write python -m tpbench {shlex.join(sys.argv[1:])}", 2000)
    print(f"tpbench starts its ranks itself, so rank 0 does the work: {line}", file=sys.stderr)
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
        del os.environ[name]


def _hydra_message(error: HydraException) -> str:
    """Return an error of Hydra's for the user, with the valid names if a choice or an option does not exist."""
    if isinstance(error, MissingConfigException):
        if name := re.match(r"(?:hydra/)?(\w+)/(.*)", str(error.missing_cfg_file)):
            return unknown_choice(name[1], name[2], set(error.options or ()) - {"all", "basic"})
    if match := re.search(r"Could not override 'hydra\.launcher\.(\w+)", str(error)):
        valid = SlurmSettings.__dataclass_fields__.keys()
        needed = f"hydra.launcher.{match[1]} needs hydra/launcher=torchrun_slurm"
        return needed if match[1] in valid else unknown("option of torchrun_slurm", match[1], valid)
    return f"{error}\n{error.__cause__}" if isinstance(error.__cause__, OmegaConfBaseException) else str(error)


def _exit(text: str, code: int = JobError.exit_code) -> NoReturn:
    """End with an error message, of which each line is printable and not too long."""
    print("tpbench: " + "\n".join(printable(line, 2000) for line in text.splitlines()), file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
