"""Rules by which the processes of a job end: with their parent, and recognisable by their environment."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

MARKER = "TPBENCH_ROW_ID"
"""Environment variable of every process of a job: it tells these processes from all others of the host."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends. Does nothing but on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


def parent_runs_job(row_id: str) -> bool:
    """Return False if the parent of this process is not of the same job.

    Then the parent ended before `die_with_parent` was called, and no signal will come.
    """
    try:
        environ = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except FileNotFoundError:
        return sys.platform != "linux"
    except OSError:
        return False
    return any(variable.startswith(f"{MARKER}={row_id}".encode()) for variable in environ.split(b"\0"))
