"""Find functions that a variant replaced: a clock, a comparison or a collective that answers as the variant likes."""

from __future__ import annotations

import builtins
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy
import torch
import torch.distributed as dist

_WATCHED: dict[str, Any] = {
    "builtins": builtins,
    "time": time,
    "numpy": numpy,
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.cuda": torch.cuda,
    "torch.cuda.Event": torch.cuda.Event,
    "torch.distributed": dist,
    "torch.distributed.distributed_c10d": dist.distributed_c10d,
}
"""The functions that clocks and oracles call, by the names in messages."""

_OWN = "tpbench."
_REPLACED_BY_TORCH = {("torch", "manual_seed")}
"""Functions that the first import of torch._dynamo replaces. No clock and no oracle calls them."""

_NOT_OWN = ("tpbench.outside", "tpbench.api")
"""Modules of this package that load a variant's code, or that its author reads: no clock and no oracle calls them."""

_WRAPPERS = (staticmethod, classmethod, property)
"""Types of attributes that are called through another object."""


class FunctionsReplaced(Exception):
    """A variant replaced functions that clocks and oracles call, and the measurement failed."""


class Guard:
    """The functions as they were before any code of a variant ran.

    Make the guard when the modules of the clocks and of the oracle are imported: it does not know those imported later.
    """

    def __init__(self) -> None:
        self.functions = dict(_functions(self._owners()))

    def restored(self) -> list[str]:
        """Put the replaced functions back, and return their names, sorted."""
        owners = self._owners()
        now = dict(_functions(owners))
        known = self.functions.items()
        replaced = [at for at, function in known if now.get(at) is not function and at not in _REPLACED_BY_TORCH]
        for owner, name in replaced:
            setattr(owners[owner], name, self.functions[owner, name])
        return sorted(f"{owner}.{name}" for owner, name in replaced)

    @contextlib.contextmanager
    def naming_replaced(self) -> Iterator[None]:
        """Raise FunctionsReplaced for an exception after functions were replaced, and put them back.

        A clock that stands still lets a measurement divide by zero, for example.
        """
        try:
            yield
        except Exception as error:
            if replaced := self.restored():
                raise FunctionsReplaced(f"{replaced_by(replaced)}; then {type(error).__name__}: {error}") from error
            raise

    def _owners(self) -> dict[str, Any]:
        modules = {
            name: module
            for name, module in list(sys.modules.items())
            if name.startswith(_OWN) and not name.startswith(_NOT_OWN) and module is not None
        }
        classes = {
            f"{name}.{each.__qualname__}": each
            for name, module in modules.items()
            for each in vars(module).values()
            if isinstance(each, type) and each.__module__ == name
        }
        return _WATCHED | modules | classes


def replaced_by(functions: list[str]) -> str:
    """Return a sentence about functions that a variant replaced. Empty: it did so on another rank."""
    return f"the variant replaced {', '.join(functions) or 'functions on another rank'}"


def _functions(owners: dict[str, Any]) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield (owner, name) and the value of every callable attribute. A class has those that it inherits, too."""
    for owner, of in owners.items():
        attributes: dict[str, Any] = {}
        for each in reversed(of.__mro__[:-1]) if isinstance(of, type) else (of,):
            attributes |= vars(each)
        for name, value in attributes.items():
            if _is_called(type(value)):
                yield (owner, name), value


def _is_called(kind: type) -> bool:
    """Return True if objects of this type are called. `callable` would read attributes of deprecated objects, which
    warn."""
    return issubclass(kind, _WRAPPERS) or any("__call__" in vars(each) for each in kind.__mro__)
