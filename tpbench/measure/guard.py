"""Find what a variant replaced: a clock, a comparison or a collective that answers as the variant likes, or a limit.

Functions are watched with their code and their defaults. Of this package's modules, the modules that they import and
their constants are watched, too.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
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

_PLAIN = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))
"""Types of constants. A dictionary of them is a constant, too: of tolerances, for example."""


class FunctionsReplaced(Exception):
    """A variant replaced functions that clocks and oracles call, and the measurement failed."""


class Guard:
    """The functions as they were before any code of a variant ran.

    Make the guard when the modules of the clocks and of the oracle are imported. It does not watch later ones.
    """

    def __init__(self) -> None:
        self.known = {at: _Watched.of(value) for at, value in _watched(self._owners())}

    def restored(self) -> list[str]:
        """Put back what was replaced, and return the names, sorted."""
        owners = self._owners()
        now = dict(_watched(owners))
        missing = object()
        replaced = [
            at
            for at, watched in self.known.items()
            if at not in _REPLACED_BY_TORCH and watched.differs(now.get(at, missing))
        ]
        for owner, name in replaced:
            watched = self.known[owner, name]
            watched.restore()
            setattr(owners[owner], name, watched.value)
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


@dataclass(frozen=True)
class _Code:
    """The code of a function, with its defaults."""

    function: FunctionType
    code: CodeType
    defaults: tuple[Any, ...] | None
    keyword_defaults: dict[str, Any] | None

    def __eq__(self, other: object) -> bool:
        # Defaults are compared by identity: they may be tensors or arrays.
        mine = (self.function, self.code, self.defaults, self.keyword_defaults)
        if not isinstance(other, _Code):
            return False
        theirs = (other.function, other.code, other.defaults, other.keyword_defaults)
        return all(one is two for one, two in zip(mine, theirs, strict=True))

    def restore(self) -> None:
        self.function.__code__, self.function.__defaults__ = self.code, self.defaults
        self.function.__kwdefaults__ = self.keyword_defaults


@dataclass(frozen=True)
class _Watched:
    """An attribute, and what can change inside it."""

    value: Any
    code: tuple[_Code, ...]
    """The code of a function, and of those that its decorators wrap."""
    items: dict[Any, Any] | None
    """The items of a dictionary."""

    @classmethod
    def of(cls, value: Any) -> _Watched:
        return cls(value, _code_of(value), dict(value) if isinstance(value, dict) else None)

    def differs(self, now: Any) -> bool:
        return now is not self.value or _code_of(now) != self.code or (self.items is not None and now != self.items)

    def restore(self) -> None:
        """Put back what changed inside the value."""
        for code in self.code:
            code.restore()
        if self.items is not None:
            self.value.clear()
            self.value.update(self.items)


def replaced_by(functions: list[str]) -> str:
    """Return a sentence about functions that a variant replaced. Empty: it did so on another rank."""
    return f"the variant replaced {', '.join(functions) or 'functions on another rank'}"


def _watched(owners: dict[str, Any]) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield (owner, name) and the value of every watched attribute. A class has those that it inherits, too."""
    for owner, of in owners.items():
        attributes: dict[str, Any] = {}
        for each in reversed(of.__mro__[:-1]) if isinstance(of, type) else (of,):
            attributes |= vars(each)
        for name, value in attributes.items():
            if _is_called(type(value)) or (owner.startswith(_OWN) and _is_constant(name, value)):
                yield (owner, name), value


def _is_constant(name: str, value: Any) -> bool:
    """Return True for an imported module and for a constant, whose name is in capitals.

    A dictionary of another class is none: that of transformers' models imports hundreds of modules when it is read.
    """
    if isinstance(value, ModuleType):
        return True
    values = value.values() if type(value) in (dict, OrderedDict) else (value,)
    return name.isupper() and all(isinstance(each, _PLAIN) for each in values)


def _code_of(value: Any) -> tuple[_Code, ...]:
    """Return the code of the Python functions behind an attribute: it, and those that its decorators wrap."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    code = []
    while isinstance(value, FunctionType):
        code.append(_Code(value, value.__code__, value.__defaults__, value.__kwdefaults__))
        value = vars(value).get("__wrapped__")
    return tuple(code)


def _is_called(kind: type) -> bool:
    """Return True if objects of this type are called. `callable` would read attributes of deprecated objects, which
    warn."""
    return issubclass(kind, _WRAPPERS) or any("__call__" in vars(each) for each in kind.__mro__)
