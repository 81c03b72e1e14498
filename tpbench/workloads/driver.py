"""CUDA's driver, for what torch has no call for."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


@cache
def cuda() -> Any:
    """Its library. OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")
