"""CUDA's driver, for what torch has no call for."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch


@cache
def cuda() -> Any:
    """Its library. OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


def has(name: str) -> bool:
    """Whether it has a function of that name: older ones lack some."""
    return getattr(cuda(), name, None) is not None


def call(name: str, *arguments: Any) -> None:
    """Call its function, with ctypes' arguments. RuntimeError where that answers with an error."""
    if error := getattr(cuda(), name)(*arguments):
        raise RuntimeError(f"{name} failed with CUDA error {error}")


def current_stream() -> ctypes.c_void_p:
    """torch's, as an argument."""
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
