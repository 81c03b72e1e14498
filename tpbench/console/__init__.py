"""Commands of `python -m tpbench` beside jobs and sweeps. Nothing here imports torch."""

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import tpbench
from tpbench.files import explained
from tpbench.launcher.options import COMMANDS
from tpbench.settings import JobError

HELP = """\
tpbench: which implementation of a tensor-parallel operation is correct, fastest
and smallest on your machines, and how close is it to the hardware limit?

  python -m tpbench list          what there is, and whether it can run here
  python -m tpbench doctor        problems of this machine, each with a fix
  python -m tpbench test          every variant on tiny shapes: right or wrong
  python -m tpbench new FILE.py   a variant of your own to start from
  python -m tpbench               one small job
  python -m tpbench -m variant=triton_tp,pytorch_gather shape=v131k_tp8  a sweep
  python -m tpbench -m +experiment=tp_entropy_loss                 a whole table
  python -m tpbench report outputs                            what was measured
  python -m tpbench docs [PAGE]   the guides
  Also: compare, history, predict, collect, compact, rows, profile (--help).

Write NAME=VALUE; with -m, NAME=VALUE1,VALUE2 makes a job of each combination.
  variant shape model loss block_cap measure     groups: `list` shows values
  tokens vocab tp_size dp_size dtype seed   the problem
  device=auto|cuda|cpu  graph=true          where and how it is timed
  memory_limit_gib timeout_s                limits at which a job is ended
  output_dir=DIR  resume=true               where rows go; only what is missing
  dry_run=true                              with -m: show the plan, run nothing

  --cfg job     the configuration of a job, all fields (of these arguments)
  --hydra-help  Hydra's own options
  --version     the version
"""


def information(arguments: Sequence[str]) -> int | None:
    """Run the command that the arguments name and return its exit code, or return None if they name a job.

    A wrong request of any command is a JobError, or an OSError that names a file: its message is printed, and the exit
    code is 2.
    """
    if sys.stdout is None:  # the shell has closed it: `>&-`
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    if not os.environ.get("COLUMNS", "").strip("0"):  # no width: rich would print nothing
        os.environ.pop("COLUMNS", None)
    warnings.formatwarning = lambda message, *_: f"tpbench: warning: {message}\n"  # those of sweeps, too
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except JobError as error:
        print(f"tpbench: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.filename is None:  # the output
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the exit would flush, and fail again
            if isinstance(error, BrokenPipeError):  # `| head` has read enough
                return 0
        print(f"tpbench: {explained(error)}", file=sys.stderr)
        return 1 if error.filename is None else JobError.exit_code


def _run(arguments: Sequence[str]) -> int | None:
    name, rest = arguments[0] if arguments else "", list(arguments[1:])
    if name in COMMANDS and not (name in ("list", "doctor") and {"-h", "--help"} & set(rest)):
        of_command = list(arguments) if name in ("test", "profile") else rest  # one module has both
        code: int = importlib.import_module(COMMANDS[name]).main(of_command)
        return code
    if arguments == ["--version"]:
        print(f"tpbench {tpbench.__version__}")
        return 0
    if {"-h", "--help"} & set(arguments) or name == "help":
        print(HELP, end="")
        return 0
    return None
