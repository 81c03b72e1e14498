"""Calls that torch.compile leaves out of its graphs. Importing this module takes seconds: only compiled code does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_disable: Any = torch.compiler.disable  # torch gives it no types


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


eager: Callable[..., Any] = _disable(
    _call, reason="tpbench launches its kernels itself, outside of the graphs of torch.compile"
)
"""Calls the function, the first argument, with the other arguments as uncompiled code."""
