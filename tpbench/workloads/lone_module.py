"""Import one module of another project without the code of the packages around it.

A package can need compiled parts, or many other packages, that one of its Triton kernels does not need. Only ranks that
run such a kernel import this module.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any


def import_alone(
    name: str, without_code_of: Sequence[str], stand_ins: Mapping[str, Mapping[str, Any]] | None = None
) -> ModuleType:
    """Import an installed module, such as `verl.utils.kernel.kernels`, and return it. An imported module stays.

    Args:
        name: The full name of the module. It comes from the code of a variant, never from a configuration.
        without_code_of: Packages whose `__init__` does not run, such as `verl` and `verl.utils`. A package comes after
            the package that contains it.
        stand_ins: Contents of modules that the module imports and that cannot be imported here.

    The incomplete packages and the stand-ins are removed from `sys.modules` at the end. Code that imports one of these
    packages later, such as Megatron-LM, therefore gets the real package or the real error.
    """
    if name in sys.modules:
        return sys.modules[name]
    added = []
    try:
        for package in without_code_of:
            if package not in sys.modules:
                sys.modules[package] = _without_code(package)
                added.append(package)
        for module, contents in (stand_ins or {}).items():
            if module not in sys.modules:
                sys.modules[module] = ModuleType(module)
                vars(sys.modules[module]).update(contents)
                added.append(module)
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
