"""The GPUs of this host as NVML reports them, and the limit of the ranks on its CPU cores."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpbench.job import Job
from tpbench.measure.machine import nvml_session, nvml_text, visible_gpus

NVLINK_WEIGHT = 100.0
"""Weight of one NVLink. It is greater than the weight of any path over PCIe, which is at most 1."""


@dataclass(frozen=True)
class Device:
    """A GPU, or a CPU core if jobs run side by side on a CPU."""

    name: str
    """Name that is the same for all users of this host: the UUID of a GPU."""
    visible: str
    """Name in CUDA_VISIBLE_DEVICES, as the user wrote it, else the UUID, which does not depend on an order; or the
    number of the core."""


def usable_gpus() -> list[Device]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES admits: a job started by this process could use them."""
    return [Device(uuid, name) for uuid, name in visible_gpus()]


def smallest_memory_gib() -> float | None:
    """Return the memory of the smallest GPU in GiB, or None if there is no GPU."""
    with nvml_session() as nvml:
        if nvml is None:
            return None
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return min((int(nvml.nvmlDeviceGetMemoryInfo(each).total) / 2**30 for each in handles), default=None)


def links(uuids: Sequence[str]) -> dict[frozenset[str], float]:
    """Return a weight for each pair of GPUs: their number of NVLinks first, then their closeness over PCIe."""
    with nvml_session() as nvml:
        if nvml is None:
            return {}
        handles: dict[str, Any] = {}
        for uuid in uuids:
            with contextlib.suppress(nvml.NVMLError):
                handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(uuid)
        peers = {uuid: _nvlink_peers(nvml, handle) for uuid, handle in handles.items()}
        weights = {}
        for (one, a), (two, b) in itertools.combinations(handles.items(), 2):
            with contextlib.suppress(nvml.NVMLError):
                bus = nvml_text(nvml.nvmlDeviceGetPciInfo(b).busId).lower()
                # NVML's levels grow with the distance, from the same board (0) to another socket (50).
                closeness = 1 - nvml.nvmlDeviceGetTopologyCommonAncestor(a, b) / 100
                weights[frozenset((one, two))] = NVLINK_WEIGHT * peers[one].count(bus) + closeness
        return weights


def _nvlink_peers(nvml: Any, handle: Any) -> list[str]:
    """Return the PCI address at the far end of each active NVLink.

    With NVSwitch that is the address of a switch. All pairs of GPUs are then connected equally well.
    """
    peers = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        with contextlib.suppress(nvml.NVMLError):
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                peers.append(nvml_text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId).lower())
    return peers


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def too_many_ranks(job: Job, cores: int, ranks_per_core: int) -> str | None:
    """Return why a job on the CPU has too many ranks for that many cores, or None if it has not."""
    if job.device != "cpu" or job.world_size <= ranks_per_core * cores:
        return None
    needed = math.ceil(job.world_size / cores)
    return (
        f"{job.world_size} ranks would share {cores} CPU core{'s' * (cores > 1)}, and max_ranks_per_core="
        f"{ranks_per_core} allows {ranks_per_core * cores}: set max_ranks_per_core={needed} to run them"
    )
