"""The GPUs of this host as NVML sees them: which this process may use, and how they are connected."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpbench.measure.machine import nvml_session, nvml_text

NVLINK = 100.0
"""What a link weighs: more than any way over PCIe."""


@dataclass(frozen=True)
class Gpu:
    """One that CUDA_VISIBLE_DEVICES admits."""

    uuid: str
    visible: str
    """Its name in CUDA_VISIBLE_DEVICES: as the person wrote it, else its UUID, which is the same in any order."""


def usable() -> list[Gpu]:
    """Those that a job started here could use."""
    with nvml_session() as nvml:
        if nvml is None:
            return []
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        present = [nvml_text(nvml.nvmlDeviceGetUUID(each)) for each in handles]
    admitted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if admitted is None:
        return [Gpu(uuid, uuid) for uuid in present]
    found = []
    for name in filter(None, (each.strip() for each in admitted.split(","))):
        if name.isdigit() and int(name) < len(present):
            found.append(Gpu(present[int(name)], name))
        else:  # what is not known by that name has at least a lock of that name
            found.append(Gpu(next((each for each in present if each.startswith(name)), name), name))
    return found


def links(uuids: Sequence[str]) -> dict[frozenset[str], float]:
    """How well each two are connected: their NVLinks, or else how near they are over PCIe."""
    with nvml_session() as nvml:
        if nvml is None:
            return {}
        handles: dict[str, Any] = {}
        for uuid in uuids:
            with contextlib.suppress(nvml.NVMLError):
                handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(uuid)
        direct = {uuid: _peers(nvml, handle) for uuid, handle in handles.items()}
        weights = {}
        for (one, a), (two, b) in itertools.combinations(handles.items(), 2):
            with contextlib.suppress(nvml.NVMLError):
                bus = nvml_text(nvml.nvmlDeviceGetPciInfo(b).busId).lower()
                # Levels grow with distance, from the same board (0) to another socket (50).
                weights[frozenset((one, two))] = (
                    NVLINK * direct[one].count(bus) + 1 - nvml.nvmlDeviceGetTopologyCommonAncestor(a, b) / 100
                )
        return weights


def _peers(nvml: Any, handle: Any) -> list[str]:
    """The PCI address at the far end of each active NVLink: of a switch, where there is one and all are alike."""
    found = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        with contextlib.suppress(nvml.NVMLError):
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                found.append(nvml_text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId).lower())
    return found
