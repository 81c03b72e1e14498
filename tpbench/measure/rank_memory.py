"""Memory of a rank: limit it, measure its peak, and recognise errors that report a lack of it."""

import contextlib
import math
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from tpbench.measure import machine
from tpbench.measure.timers import synchronize
from tpbench.suggestions import message

_REQUESTED = re.compile(r"(?:[Tt]ried to|Unable to) allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB|PiB)?")
_UNITS = {None: 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


def limit(device: torch.device, wanted_gib: float | None, ranks_here: int) -> float:
    """Limit the memory that this rank may allocate from now on, and return the limit in GiB.

    By default it is the whole memory of a GPU, or this rank's share of a CPU's free memory (RLIMIT_DATA).
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
        if wanted_gib is not None:
            torch.cuda.set_per_process_memory_fraction(min(1.0, wanted_gib / total), device)
        return min(total, wanted_gib or total)
    gib = wanted_gib or machine.memory_share_gib(ranks_here)
    used = _status_bytes("VmData")
    if not math.isnan(used):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = int(used + gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    return gib


def lift_limit() -> None:
    """Remove the CPU limit, so that a process that ran out of memory can still report it."""
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def available_bytes(device: torch.device) -> int:
    """Return the bytes that this rank may still allocate: within the limit, and within the free memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        return min(free, allowed - torch.cuda.memory_reserved(device))
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    free, used = int(machine.available_memory_gib() * 2**30), _status_bytes("VmData")
    return free if soft == resource.RLIM_INFINITY or math.isnan(used) else int(max(0, min(free, soft - used)))


def shortage(error: BaseException) -> int | None:
    """Return the requested bytes (0 if unknown) if the error reports a lack of memory, else None."""
    text = message(error)
    by_type = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in text
    by_text = isinstance(error, RuntimeError) and re.search("out of memory|bad_alloc|STATUS_ALLOC_FAILED", text)
    if not by_type and not by_text:
        return None
    match = _REQUESTED.search(text)
    return int(float(match[1]) * _UNITS[match[2]]) if match else 0


def held_bytes(device: torch.device) -> int:
    """Return the bytes that this rank holds now: in torch's allocator on a GPU, in RAM on a CPU (0 if unknown)."""
    synchronize(device)
    held = _held_bytes(device)
    return 0 if math.isnan(held) else int(held)


class IterationMemory:
    """The memory of each iteration on this rank in GiB, above `above` bytes, and what is held at its end.

    It is the memory of torch's allocator on a GPU, and on a CPU the RAM of the process, or NaN. An iteration lasts from
    one call of `begin` to the next, or to `end`. torch doesn't count `graph_gib` of a CUDA graph between replays.
    """

    def __init__(self, device: torch.device, above: int, graph_gib: float = 0.0) -> None:
        self.device, self.above, self.graph_gib = device, above, graph_gib
        self.held_gib: list[float] = []
        self.peak_gib: list[float] = []
        self._begun, self._knows_peak = False, True

    def begin(self) -> None:
        """Begin an iteration, and end the one before."""
        self.end()
        self._begun = True
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:  # the peak would be that of the whole process
            self._knows_peak = False

    def end(self) -> None:
        """End the iteration, if one has begun."""
        if not self._begun:
            return
        self._begun = False
        held = _held_bytes(self.device)  # before the peak, which must not be smaller
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else _status_bytes("VmHWM")
        for gib, total in ((self.held_gib, held), (self.peak_gib, peak if self._knows_peak else math.nan)):
            extra = total - self.above
            gib.append((0.0 if extra < 0 else extra / 2**30) + self.graph_gib)


@contextlib.contextmanager
def extra_peak(device: torch.device) -> Iterator[IterationMemory]:
    """Measure the memory of a region as that of one iteration, above the memory at its start."""
    usage = IterationMemory(device, held_bytes(device))
    usage.begin()
    yield usage
    synchronize(device)
    usage.end()


def _held_bytes(device: torch.device) -> float:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _status_bytes("VmRSS")


def _status_bytes(name: str) -> float:
    """Return a number of Linux about this process, or NaN where it is not known."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return math.nan
