"""Import one module of another project without the code of the packages around it.

A package can need compiled parts, or many other packages, that one of its Triton kernels does not need. Only ranks that
run such a kernel import this module.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType


def import_alone(name: str, without_code_of: Sequence[str]) -> ModuleType:
    """Import an installed module, such as `verl.utils.kernel.kernels`, and return it. An imported module stays.

    Args:
        name: The full name of the module. It comes from the code of a variant, never from a configuration.
        without_code_of: Packages whose `__init__` does not run, such as `verl` and `verl.utils`. A package comes after
            the package that contains it.

    The incomplete packages are removed from `sys.modules` at the end. Code that imports one of them later therefore
    gets the real package or the real error.
    """
    if name in sys.modules:
        return sys.modules[name]
    added = []
    try:
        for package in without_code_of:
            if package not in sys.modules:
                sys.modules[package] = _without_code(package)
                added.append(package)
        return importlib.import_module(name)
    finally:
        for each in added:
            del sys.modules[each]


def _without_code(package: str) -> ModuleType:
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    module = ModuleType(package)
    module.__path__ = list(spec.submodule_search_locations or ())
    return module
