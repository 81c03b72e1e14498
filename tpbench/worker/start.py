"""How the processes of a job start and end: how they meet, what marks them, and that they end with their parent."""

import ctypes
import gc
import importlib
import os
import secrets
import signal
import sys
from pathlib import Path

MARKER = "TPBENCH_ROW_ID"
"""Environment variable of every process of a job: it tells these processes from all others of the host."""

AGENT = "TPBENCH_AGENT"
"""Environment variable of ranks: the number of torchrun's process."""

BACKEND = "tpbench"
"""Name of the rendezvous on torchrun's command line."""

STORE_FILE = "TPBENCH_STORE_FILE"
"""Environment variable of a job on one host: the file of its key-value store, in a folder of mode 0700."""

SECRET = "TPBENCH_RENDEZVOUS_SECRET"
"""Environment variable of a job over several nodes: the prefix of all keys in its store. Other users cannot read it."""

STACK_SIGNAL = signal.SIGUSR1
"""Signal that makes a rank write the stack of its main thread to its log."""

ERROR = 70
"""Exit code of a rank: the job failed (EX_SOFTWARE). The result says how."""

PEER_LOST = 71
"""Exit code of a rank: a collective broke because another rank had ended. That rank is the cause."""

SECRET_FILE = "rendezvous.secret"
_PR_SET_PDEATHSIG = 1


def create_secret(folder: Path) -> None:
    """Write a new secret of 128 bits into the folder of a cell, for its user only."""
    descriptor = os.open(folder / SECRET_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(16))


def die_with_parent(number: int = signal.SIGKILL, parent: int = 0) -> None:
    """Ask the kernel to send this process a signal when its parent, of that number if known, ends or has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
    if parent and os.getppid() != parent:
        os._exit(ERROR)


def import_once(*names: str) -> None:
    """Import these modules, unless this was done, without garbage collections: during torch's they take 0.2 s."""
    if all(name in sys.modules for name in names):
        return
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()
