"""Import one module of another project without the code of the packages around it.

A package can need compiled parts, or many other packages, that one of its Triton kernels does not need. Only ranks that
run such a kernel import this module.
"""

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
    added = [package for package in without_code_of if package not in sys.modules]
    try:
        for package in added:
            if spec := importlib.util.find_spec(package):
                sys.modules[package] = importlib.util.module_from_spec(spec)
        return importlib.import_module(name)
    finally:
        for package in added:
            sys.modules.pop(package, None)
