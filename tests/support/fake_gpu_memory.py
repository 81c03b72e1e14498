"""The memory of a GPU of 100 GiB: a stand-in for torch's functions."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

GIB = 2**30


class FakeMemory:
    """Numbers that torch's functions return, in bytes, and the calls that change something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fraction, self.held, self.peak, self.reserved, self.free = 1.0, 0, 0, 0, 100 * GIB
        self.calls: list[str] = []

        def reset(device: torch.device) -> None:
            self.peak = self.held
            self.calls.append("reset")

        functions: dict[str, Any] = {
            "get_device_properties": lambda device: SimpleNamespace(total_memory=100 * GIB),
            "set_per_process_memory_fraction": lambda fraction, device: setattr(self, "fraction", fraction),
            "get_per_process_memory_fraction": lambda device: self.fraction,
            "mem_get_info": lambda device: (self.free, 100 * GIB),
            "memory_reserved": lambda device: self.reserved,
            "memory_allocated": lambda device: self.held,
            "max_memory_allocated": lambda device: self.peak,
            "reset_peak_memory_stats": reset,
            "synchronize": lambda device: self.calls.append("synchronize"),
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)
