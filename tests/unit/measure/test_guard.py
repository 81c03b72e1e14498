"""The guard names functions that a variant replaced, and puts them back."""

from __future__ import annotations

import sys
import time
from types import ModuleType
from typing import Any

import pytest
import torch

from tpbench.measure.guard import FunctionsReplaced, Guard


class _Base:
    def inherited(self) -> int:
        return 1


class _Own(_Base):
    limit = 3

    def plain(self) -> int:
        return 2

    @staticmethod
    def fixed() -> int:
        return 3

    @classmethod
    def of_class(cls) -> int:
        return 4

    @property
    def read(self) -> int:
        return 5


def module(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Return a new module that is imported as `name`, with a function, a number and a class."""
    made = ModuleType(name)
    own = type("Own", (_Own,), {**vars(_Own), "__module__": name, "__qualname__": "Own"})
    vars(made).update(compute=lambda: 1, limit=3, Own=own, Foreign=_Base)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def test_nothing_is_replaced_at_first() -> None:
    assert Guard().restored() == []


def test_replaced_functions_are_named_in_order_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, equal, absolute = time.perf_counter, torch.equal, torch.Tensor.abs
    guard = Guard()
    monkeypatch.setattr(torch, "equal", lambda one, other: True)
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    monkeypatch.setattr(torch.Tensor, "abs", lambda self: self)  # a function of a base class
    assert guard.restored() == ["time.perf_counter", "torch.Tensor.abs", "torch.equal"]
    assert (time.perf_counter, torch.equal, torch.Tensor.abs) == (clock, equal, absolute)
    assert guard.restored() == []


def test_functions_and_classes_of_this_package_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    made = module(monkeypatch, "tpbench.made_for_a_test")
    compute, guard = made.compute, Guard()
    made.compute = lambda: 2
    for name in ("plain", "fixed", "of_class", "read", "inherited"):
        setattr(made.Own, name, lambda *_: 0)
    made.limit = made.Own.limit = 4  # values are not watched
    made.later = made.Own.later = lambda *_: 0  # new functions are not called by this package
    in_class = [f"tpbench.made_for_a_test.Own.{name}" for name in ("fixed", "inherited", "of_class", "plain", "read")]
    assert guard.restored() == [*in_class, "tpbench.made_for_a_test.compute"]
    own = made.Own()
    assert made.compute is compute and made.limit == own.limit == 4
    assert (own.inherited(), own.plain(), own.fixed(), own.of_class(), own.read) == (1, 2, 3, 4, 5)


def test_a_removed_function_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made = module(monkeypatch, "tpbench.made_for_a_test")
    compute, guard = made.compute, Guard()
    del made.compute
    assert guard.restored() == ["tpbench.made_for_a_test.compute"] and made.compute is compute


@pytest.mark.parametrize("name", ["tpbench.outside.made", "tpbench.api.made", "made_by_a_user"])
def test_modules_of_users_are_not_watched(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    made = module(monkeypatch, name)
    guard = Guard()
    made.compute = made.Own.plain = lambda *_: 0
    assert guard.restored() == [] and made.compute() == 0


def test_a_class_belongs_to_the_module_that_defines_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch, "tpbench.made_for_a_test")
    guard = Guard()
    monkeypatch.setattr(_Base, "inherited", lambda self: 0)
    assert guard.restored() == ["tpbench.made_for_a_test.Own.inherited"]


def test_a_module_that_was_not_imported_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tpbench.blocked_for_a_test", None)  # type: ignore[arg-type]
    assert Guard().restored() == []


def test_a_failure_after_functions_were_replaced_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, guard = time.perf_counter, Guard()
    with pytest.raises(FunctionsReplaced) as found, guard.naming_replaced():
        monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
        _ = 1.0 / (time.perf_counter() - time.perf_counter())
    assert str(found.value) == "the variant replaced time.perf_counter; then ZeroDivisionError: float division by zero"
    assert time.perf_counter is clock and isinstance(found.value.__cause__, ZeroDivisionError)


def test_another_failure_stays_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError), Guard().naming_replaced():
        _ = 1 / 0
    with Guard().naming_replaced():
        pass


def test_what_torch_itself_replaces_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard()
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_group_count", 7)
    assert guard.restored() == []


class _LazyDictionary(dict[str, Any]):
    def values(self) -> Any:
        raise AssertionError("it was read")


def test_a_dictionary_that_loads_its_values_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made = module(monkeypatch, "tpbench.made_for_a_test")
    made.LAZY = _LazyDictionary(one=1)
    made.PLAIN = {"one": 1}
    guard = Guard()
    made.LAZY["one"] = made.PLAIN["one"] = 2
    assert guard.restored() == ["tpbench.made_for_a_test.PLAIN"]
