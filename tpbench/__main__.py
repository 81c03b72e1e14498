"""Entry point of `python -m tpbench`: Hydra composes the jobs, and the launcher runs single jobs and sweeps alike."""

from __future__ import annotations

import os
import sys
import time
import traceback
import uuid
from pathlib import Path

import tpbench
from tpbench import packages

with packages.explain_missing():
    import hydra
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from tpbench import console
    from tpbench.files import explained
    from tpbench.launcher import interrupts, sweep
    from tpbench.launcher.command_line import rewrites
    from tpbench.launcher.command_line.checks import check_overrides, options_first
    from tpbench.launcher.command_line.rewrites import flat_names, force_fields, quote_numbers
    from tpbench.settings import JobError, user_path
    from tpbench.suggestions import printable

CONF = str(Path(__file__).resolve().parent / "conf")


def _sweep_id() -> str:
    """Return an identifier that sorts by time and is unique among sweeps that start in the same second."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:6]}"


_failures: list[HydraException | JobError | ModuleNotFoundError | OSError] = []
"""Errors of a job without `-m`. Hydra would print a line of its own before an error that a job raises."""


@hydra.main(version_base="1.3", config_path=CONF, config_name="config")
def _hydra_main(config: DictConfig) -> None:
    try:
        sweep.run_single(config)
    except (HydraException, JobError, ModuleNotFoundError, OSError) as error:
        _failures.append(error)


def _run(arguments: list[str]) -> None:
    """Run the job or the sweep that the arguments describe."""
    rewrites.typed[:] = arguments
    completes = bool({"-sc", "--shell-completion"} & set(arguments))  # then Hydra has arguments of its own
    arguments = arguments if completes else options_first(rewrites.own_names(arguments))
    arguments = flat_names(rewrites.replace_file_variants(arguments))
    arguments += rewrites.shape_of_workload(arguments)
    if not completes:
        check_overrides(arguments)
    sys.argv[1:] = force_fields(quote_numbers(arguments))
    _hydra_main()
    if _failures:
        raise _failures[0]


@packages.explain_missing()
def main() -> None:
    """Run the command line. Exit with 0 unless the input is invalid or a cell ends as error, timeout or wrong."""
    if sys.argv[1:] == ["--version"]:
        print(f"tpbench {tpbench.__version__}")
        return
    if (code := console.information(sys.argv[1:])) is not None:
        sys.exit(code)
    OmegaConf.register_new_resolver("tpbench.sweep_id", _sweep_id, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("tpbench.path", lambda name, path: str(user_path(path, name)), replace=True)
    sweep.register()
    interrupts.exit_at_once()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors, which are printed here without a stack
    try:
        _run(sys.argv[1:])
    except (JobError, HydraException) as error:
        cause = f"\n{error.__cause__}" if isinstance(error.__cause__, OmegaConfBaseException) else ""
        sys.exit(_message(f"{error}{cause}"))
    except OSError as error:  # Hydra creates folders, which fails on a full disk or without permission
        folder, of_sweep, _ = str(error.filename).partition("/sweeps/")
        why = f"output_dir={folder} cannot be written: {error.strerror}" if of_sweep else explained(error)
        sys.exit(_message(why))
    except interrupts.Terminated:
        sys.exit(interrupts.EXIT_CODE)
    except Exception as error:
        if refused := _job_error(error):
            sys.exit(_message(str(refused)))
        if _passed_through_tpbench(error):
            raise
        sys.exit(_message(f"Hydra cannot use this configuration: {type(error).__name__}: {error}"))


def _job_error(error: BaseException | None) -> JobError | None:
    """Return the JobError that caused another error: OmegaConf wraps those of a path that is refused."""
    while error:
        if isinstance(error, JobError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _message(text: str) -> str:
    """Return an error message for the terminal. Each line is printable and not too long."""
    return "tpbench: " + "\n".join(printable(line, 2000) for line in text.splitlines())


def _passed_through_tpbench(error: Exception) -> bool:
    """Return True if the error came from code that tpbench's own modules called, other than this one."""
    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)} - {__file__, packages.__file__}
    return any(Path(file).is_relative_to(Path(__file__).parent) for file in files)


if __name__ == "__main__":
    main()
