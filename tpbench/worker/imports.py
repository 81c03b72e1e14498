"""Imports of torch and of a workload, which every process of a job pays for."""

from __future__ import annotations

import gc
import importlib
import sys


def import_once(*names: str) -> None:
    """Import these modules without garbage collections, unless this process has imported them.

    A collection would visit all objects of the modules, which stay until the process ends. The collections during
    torch's imports take 0.2 s. Later collections leave the objects out too, also in processes that are forked later.
    """
    if all(name in sys.modules for name in names):
        return
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()
