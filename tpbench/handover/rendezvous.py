"""Private means by which the agents and ranks of a job meet: a file on one host, a secret over several nodes."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

STORE_FILE = "TPBENCH_STORE_FILE"
"""Environment variable of a job on one host: the file of its key-value store, in a folder of mode 0700."""

SECRET = "TPBENCH_RENDEZVOUS_SECRET"
"""Environment variable of a job over several nodes: the prefix of all keys in its store.

Only the user who owns a process, and root, can read its environment. Every user can read its command line.
"""

_SECRET_FILE = "rendezvous.secret"


def create_secret(folder: Path) -> None:
    """Write a new secret of 128 bits into the folder of a cell, for its user only."""
    descriptor = os.open(folder / _SECRET_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(16))


def load_secret(folder: Path) -> str:
    """Return the secret of a cell."""
    return (folder / _SECRET_FILE).read_text()
