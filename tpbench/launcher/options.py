"""Options of a whole sweep. No option changes a cell's result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tpbench.settings import setting


@dataclass(frozen=True)
class Conduct:
    """Options that apply to all cells of a sweep. They have flat names on the command line, like a job's fields."""

    resume: bool = setting(False, help="run only cells that have no finished row, or one of other software or hardware")
    retries: int = setting(0, help="times that a cell which ended as error or timeout is run again", low=0, high=100)
    reuse: bool = setting(False, help="keep one torchrun for each world size and environment and feed it jobs")
    parallel: Literal["none", "auto"] = setting("none", help="auto: jobs run side by side on disjoint sets of devices")
    order: Literal["sequential", "interleaved"] = setting(
        "sequential", help="interleaved: cells that differ only in variant and its options alternate (A B B A)"
    )
    dry_run: bool = setting(False, help="show the plan: cells, GPUs, expected minutes and OOMs; run nothing")
    skip_predicted_oom: bool = setting(False, help="skip cells that are predicted to run out of memory")
    wait: bool = setting(True, help="false: submit the jobs to the cluster and leave")
