"""Calls of the CUDA driver that torch does not offer."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch


@cache
def cuda() -> Any:
    """Load the driver's library. Raise OSError if there is none."""
    return ctypes.CDLL("libcuda.so.1")


def has(name: str) -> bool:
    """Return true if the installed driver has a function of this name: older drivers lack some."""
    return getattr(cuda(), name, None) is not None


def call(name: str, *arguments: Any) -> None:
    """Call a driver function with ctypes arguments. Raise RuntimeError if it returns an error code."""
    if error := getattr(cuda(), name)(*arguments):
        raise RuntimeError(f"{name} failed with CUDA error {error}")


def current_stream() -> ctypes.c_void_p:
    """Return torch's current stream as an argument for `call`."""
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
