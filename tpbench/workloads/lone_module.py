"""Import one module of another project without the packages around it, whose parts its Triton kernels don't need."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType


def import_alone(name: str, without_code_of: Sequence[str]) -> ModuleType:
    """Import a module, such as `verl.utils.kernel.kernels`, and return it.

    without_code_of: packages whose `__init__` does not run, each after the one that contains it. `sys.modules` forgets
    them at the end, so that a later import gets the real package or the real error.
    """
    added = [package for package in without_code_of if package not in sys.modules]
    try:
        for package in added:
            if spec := importlib.util.find_spec(package):
                sys.modules[package] = importlib.util.module_from_spec(spec)
        return importlib.import_module(name)
    finally:
        for package in added:
            sys.modules.pop(package, None)
