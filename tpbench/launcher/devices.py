"""Which devices of this host are free: sweeps that run side by side, anybody's, never share one.

A device is taken by locking a file that is named after it. The kernel drops the lock with the last process that holds
it: the launcher, or a torchrun that outlives it by a moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tpbench.job import Job
from tpbench.launcher import gpus
from tpbench.settings import JobError

FOLDER = Path("/tmp/tpbench-devices")
"""Shared by all users of the host, so it does not follow a user's TMPDIR."""

MOST_SETS = 20_000
"""Sets of devices that are compared: those of sixteen GPUs, in less than a second."""


@dataclass(frozen=True)
class Device:
    """A GPU, or a core where jobs run side by side on a CPU."""

    name: str
    """Of its lock file: the same for everybody on this host."""
    visible: str
    """What CUDA_VISIBLE_DEVICES calls it, or the number of the core."""


@dataclass(frozen=True)
class Lease:
    """Devices that are ours until it is closed."""

    devices: tuple[Device, ...] = ()
    locks: tuple[int, ...] = ()
    """Open files to hand to the processes that use the devices, so that they keep the locks too."""
    beside_others: bool = False
    """Whether somebody else had devices of this host when these were taken."""
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    """Cores to run on; empty: any."""

    def close(self) -> None:
        """Give them back."""
        for each in self.locks:
            os.close(each)


class Devices:
    """The GPUs of this host that this process may use and, if jobs on a CPU are to share it, its cores."""

    def __init__(self, split_cpu: bool) -> None:
        self.gpus = [Device(each.uuid, each.visible) for each in gpus.usable()]
        self.links = gpus.links([each.name for each in self.gpus])
        cores = sorted(os.sched_getaffinity(0)) if split_cpu and hasattr(os, "sched_getaffinity") else []
        self.cores = [Device(f"core-{each}", str(each)) for each in cores]
        self.mine: set[str] = set()

    def lease(self, job: Job) -> Lease | None:
        """Devices for the job, those that are best connected, or None while there are not enough. A job on a CPU that
        is not split has all of it and needs none."""
        pool = self.gpus if job.device == "cuda" else self.cores
        if not pool:
            return Lease()
        wanted = min(job.world_size, len(pool))
        locks = {each: lock for each in pool if each.name not in self.mine and (lock := _lock(each)) is not None}
        others = len(locks) + len(self.mine & {each.name for each in pool}) < len(pool)
        chosen = choose(list(locks), wanted, self.links) if len(locks) >= wanted else ()
        for device, lock in locks.items():
            if device not in chosen:
                os.close(lock)
        if not chosen:
            return None
        self.mine |= {each.name for each in chosen}
        cuda = job.device == "cuda"
        return Lease(
            chosen,
            tuple(locks[each] for each in chosen),
            others,
            {"CUDA_VISIBLE_DEVICES": ",".join(each.visible for each in chosen)} if cuda else {},
            () if cuda else tuple(int(each.visible) for each in chosen),
        )

    def give_back(self, lease: Lease) -> None:
        """The devices are free again."""
        self.mine -= {each.name for each in lease.devices}
        lease.close()


def choose(free: Sequence[Device], count: int, links: Mapping[frozenset[str], float]) -> tuple[Device, ...]:
    """The `count` devices with the most bandwidth among themselves; of equals those that come first, and that leave
    the best connected ones to the next."""

    weights = {links.get(frozenset((a.name, b.name)), 0.0) for a, b in itertools.combinations(free, 2)}
    if len(weights) < 2:  # cores, or GPUs on one switch
        return tuple(free[:count])

    def bandwidth(devices: Sequence[Device]) -> float:
        return sum(links.get(frozenset((a.name, b.name)), 0.0) for a, b in itertools.combinations(devices, 2))

    def rank(chosen: tuple[Device, ...]) -> tuple[float, float]:
        return bandwidth(chosen), bandwidth([each for each in free if each not in chosen])

    if math.comb(len(free), count) <= MOST_SETS:
        return max(itertools.combinations(free, count), key=rank)

    def grown(first: Device) -> tuple[Device, ...]:
        """With that one, the others one by one, each the best connected to those before it."""
        chosen = [first]
        while len(chosen) < count:
            chosen.append(
                max((each for each in free if each not in chosen), key=lambda each: bandwidth([*chosen, each]))
            )
        return tuple(each for each in free if each in chosen)

    return max(map(grown, free), key=rank)


def _lock(device: Device) -> int | None:
    """The open, locked file of a device; None while somebody has it. Raises JobError where there can be none."""
    path = FOLDER / f"{device.name}.lock"
    try:
        file = _open(path)
    except OSError as error:
        raise JobError(
            f"{path} cannot be opened ({error.strerror}): devices are shared by locks in {FOLDER}, which all users of "
            "this host must be able to make files in"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file


def _open(path: Path) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, flags)  # without O_CREAT: fs.protected_regular forbids that for a file of somebody else's
    old = os.umask(0)  # everybody must be able to take it after us
    try:
        path.parent.mkdir(mode=0o1777, exist_ok=True)
        return os.open(path, flags | os.O_CREAT, 0o666)
    finally:
        os.umask(old)
