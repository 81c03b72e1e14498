"""Devices and locks: sweeps that run at the same time never share a device of this host, and never run the same cell.

The kernel drops a lock when the last process that holds it ends: the launcher, or a torchrun that outlives the launcher
by a moment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tpbench import files
from tpbench.job import Job
from tpbench.measure.machine import nvml_session, visible_gpus
from tpbench.settings import JobError


def usable_gpus() -> dict[str, str]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES admits: a job started by this process could use them.

    Each has a name that is the same for all users of this host, its UUID, and the name in CUDA_VISIBLE_DEVICES, as the
    user wrote it, else the UUID again, which does not depend on an order.
    """
    return dict(visible_gpus())


def smallest_memory_gib() -> float | None:
    """Return the memory of the smallest GPU in GiB, or None if there is no GPU."""
    with nvml_session() as nvml:
        if nvml is None:
            return None
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return min((int(nvml.nvmlDeviceGetMemoryInfo(each).total) / 2**30 for each in handles), default=None)


FOLDER = Path("/tmp/tpbench-devices")
"""Folder of the lock files. All users of the host share it, so it does not depend on a user's TMPDIR."""


@dataclass(frozen=True)
class Lease:
    """Devices that this process has until it closes the lease: GPUs, or CPU cores if jobs run side by side on a CPU."""

    devices: Mapping[str, str] = field(default_factory=dict)
    """The name of each device, with its name in CUDA_VISIBLE_DEVICES or its number as a core."""
    locks: tuple[int, ...] = ()
    """Open lock files. The processes that use the devices inherit them, so that they keep the locks too."""
    beside_others: bool = False
    """True if another process had devices of this host when these were leased."""
    cuda: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the processes that use the devices."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices.values())} if self.cuda else {}

    @property
    def cores(self) -> tuple[int, ...]:
        """Cores to run on. If empty, all cores."""
        return () if self.cuda else tuple(map(int, self.devices.values()))

    def close(self) -> None:
        """Drop the locks of this process."""
        for each in self.locks:
            os.close(each)


class Devices:
    """The GPUs of this host that this process may use and, if `split_cpu`, its CPU cores."""

    def __init__(self, split_cpu: bool) -> None:
        self.gpus = usable_gpus()
        cores = sorted(os.sched_getaffinity(0)) if split_cpu and hasattr(os, "sched_getaffinity") else []
        self.cores = {f"core-{each}": str(each) for each in cores}
        self.leased: set[str] = set()

    def lease(self, job: Job) -> Lease | None:
        """Lease the first free devices for the job, or return None if too few are free.

        A job on a CPU whose cores are not split gets an empty lease: it may use all cores.
        """
        pool = self.gpus if job.device == "cuda" else self.cores
        if not pool:
            return Lease()
        count = min(job.world_size, len(pool))
        free = pool.keys() - self.leased
        locks = {name: file for name in pool if name in free and (file := _locked_file(name)) is not None}
        chosen = list(locks)[:count] if len(locks) >= count else []
        for name in locks.keys() - set(chosen):
            os.close(locks[name])
        if not chosen:
            return None
        self.leased |= set(chosen)
        devices, held = {name: pool[name] for name in chosen}, tuple(locks[name] for name in chosen)
        return Lease(devices, held, beside_others=len(locks) < len(free), cuda=job.device == "cuda")

    def release(self, lease: Lease) -> None:
        """Make the devices of a lease free again."""
        self.leased -= lease.devices.keys()
        lease.close()


def _locked_file(device: str) -> int | None:
    """Return the open, locked file of a device, or None if another process has the lock.

    Raises JobError if the file cannot be opened or locked.
    """
    path = FOLDER / f"{device}.lock"
    try:
        file = _open(path)
        if files.lock(file):
            return file
    except OSError as error:
        raise JobError(
            f"{path} cannot be locked ({error.strerror}): sweeps share devices by locks in {FOLDER}, so all users of "
            "this host must be able to create and lock files there"
        ) from None
    os.close(file)
    return None


def _open(path: Path) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, flags)  # no O_CREAT: fs.protected_regular forbids it for a file of another user
    old = os.umask(0)  # other users must be able to lock the file later
    try:
        path.parent.mkdir(mode=0o1777, exist_ok=True)
        return os.open(path, flags | os.O_CREAT, 0o666)
    finally:
        os.umask(old)


class CellLocks:
    """Locks on cells, so that sweeps that run at the same time on one output folder do not run a cell twice.

    Each lock is one byte of a hidden file, held until it is released or this process ends. All cells of an output
    folder share one file, so nothing has to be cleaned up.
    """

    def __init__(self, output_dirs: Iterable[str]) -> None:
        self._files: dict[str, int] = {}
        for output_dir in output_dirs:
            with contextlib.suppress(OSError):
                path = Path(output_dir, "rows", ".claims")
                self._files[output_dir] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def acquire(self, job: Job) -> bool:
        """Lock the cell. Return False if another live sweep holds its lock, and True if locks are unavailable."""
        with contextlib.suppress(KeyError, OSError):
            return files.lock(self._files[job.output_dir], _byte(job))
        return True

    def release(self, job: Job) -> None:
        """Unlock the cell."""
        with contextlib.suppress(KeyError, OSError):
            files.unlock(self._files[job.output_dir], _byte(job))

    def close(self) -> None:
        """Release all locks."""
        while self._files:
            os.close(self._files.popitem()[1])


def _byte(job: Job) -> int:
    return int(job.key[:15], 16)
