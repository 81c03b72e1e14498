"""Locks: sweeps that run at the same time never share a GPU of this host, and never run the same cell.

The kernel drops a lock when the last process that holds it ends: the launcher, or a torchrun that outlives it."""

import contextlib
import fcntl
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tpbench.job import Job
from tpbench.measure.machine import visible_gpus
from tpbench.settings import JobError

FOLDER = Path("/tmp/tpbench-devices")
"""Folder of the lock files. All users of the host share it, so it does not depend on a user's TMPDIR."""

_EXCLUSIVE = fcntl.LOCK_EX | fcntl.LOCK_NB


@dataclass(frozen=True)
class Lease:
    """GPUs that a torchrun has until it ends. A job on a CPU has none: it may use all cores."""

    environment: Mapping[str, str] = field(default_factory=dict)
    locks: tuple[int, ...] = ()
    """Open lock files. The processes that use the GPUs inherit them, so that they keep the locks too."""
    beside_others: bool = False
    """True if another sweep had GPUs of this host when these were leased."""

    def release(self) -> None:
        for lock in self.locks:
            os.close(lock)


def lease(job: Job) -> Lease | None:
    """Lease the first free GPUs of this host for the job, or return None if too few are free."""
    gpus = visible_gpus() if job.device == "cuda" else []
    count = min(job.world_size, len(gpus))
    locks = {name: lock for uuid, name in gpus if (lock := _lock(uuid)) is not None}
    chosen = list(locks)[:count] if len(locks) >= count else []
    for name in locks.keys() - set(chosen):
        os.close(locks[name])
    if len(chosen) < count:
        return None
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(chosen)} if chosen else {}
    return Lease(variables, tuple(locks[name] for name in chosen), beside_others=len(locks) < len(gpus))


def _lock(uuid: str) -> int | None:
    """Return the open, locked file of a GPU, or None if another process has the lock."""
    path, flags = FOLDER / f"{uuid}.lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    old = os.umask(0)  # other users must be able to lock the file later
    try:
        FOLDER.mkdir(mode=0o1777, exist_ok=True)
        # fs.protected_regular forbids O_CREAT for a file of another user.
        file = os.open(path, flags if path.exists() else flags | os.O_CREAT, 0o666)
        fcntl.flock(file, _EXCLUSIVE)  # also of the processes that inherit the file; ends with the last of them
        return file
    except BlockingIOError:
        os.close(file)
        return None
    except OSError as error:
        advice = "sweeps share GPUs by locks, so all users of this host must be able to create and lock files there"
        raise JobError(f"{path} cannot be locked ({error.strerror}): {advice}") from None
    finally:
        os.umask(old)


class CellLocks:
    """Locks on cells, bytes of a hidden file, so that sweeps that run at the same time do not run a cell twice."""

    def __init__(self, output_dirs: Iterable[str]) -> None:
        self._files: dict[str, int] = {}
        for output_dir in output_dirs:
            with contextlib.suppress(OSError):
                path = Path(output_dir, "rows", ".claims")
                self._files[output_dir] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def acquire(self, job: Job) -> bool:
        """Return False if another live sweep holds the cell's lock."""
        try:
            fcntl.lockf(self._files[job.output_dir], _EXCLUSIVE, 1, int(job.key[:15], 16))
        except (BlockingIOError, PermissionError):
            return False
        except (KeyError, OSError):
            pass  # no file, or no locks
        return True

    def release(self, job: Job) -> None:
        with contextlib.suppress(KeyError, OSError):
            fcntl.lockf(self._files[job.output_dir], fcntl.LOCK_UN, 1, int(job.key[:15], 16))
