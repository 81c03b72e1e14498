"""Commands of `python -m tpbench` that run no job: help, list, new and doctor. Nothing here imports torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

HELP = """\
tpbench: which implementation of a tensor-parallel operation is correct, fastest
and smallest on your machines, and how close is it to the hardware limit?

  python -m tpbench list          what there is, and whether it can run here
  python -m tpbench doctor        problems of this machine, each with a fix
  python -m tpbench new FILE.py   a variant of your own to start from
  python -m tpbench               one small job
  python -m tpbench -m variant=triton_tp,pytorch_gather shape=v131k_tp8  a sweep
  python -m tpbench -m +experiment=tp_entropy_loss                 a whole table
  python scripts/report.py outputs                            what was measured

Write NAME=VALUE; with -m, NAME=VALUE1,VALUE2 makes a job of each combination.
  variant shape model loss block_cap measure     groups: `list` shows values
  tokens vocab tp_size dp_size dtype seed   the problem
  device=auto|cuda|cpu  graph=true          where and how it is timed
  memory_limit_gib timeout_s                limits at which a job is ended
  output_dir=DIR  resume=true               where rows go; only what is missing
  dry_run=true                              with -m: show the plan, run nothing

  --cfg job     the configuration of a job, all fields (of these arguments)
  --hydra-help  Hydra's own options, among them shell completion
  --version     the version
"""


def information(arguments: Sequence[str]) -> int | None:
    """Run the command that the arguments name and return its exit code, or return None if they name a job."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: Sequence[str]) -> int | None:
    if arguments and arguments[0] == "new":  # it has a --help of its own
        from tpbench.console import new

        return new.main(arguments[1:])
    if {"-h", "--help"} & set(arguments) or list(arguments) == ["help"]:
        print(HELP, end="")
        return 0
    if arguments and arguments[0] == "list":
        from tpbench.console import listing

        return listing.main(arguments[1:])
    if arguments and arguments[0] == "doctor":
        from tpbench.console import doctor

        return doctor.main(arguments[1:])
    return None
