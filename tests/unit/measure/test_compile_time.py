"""Compile times, with stand-ins for Triton and for torch.compile."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.lone_rank import lone_rank
from tests.support.sleeping_sessions import cpu_context
from tpbench.measure.compile_time import compile_columns, listen, spent_s


def test_compile_times_are_those_of_the_cell_on_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    context = cpu_context(lone_rank(monkeypatch))
    compilation: Any = SimpleNamespace(listener=None)
    spent = {"total_wall_time": 5.0}
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(compilation=compilation)))
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(calculate_time_spent=lambda: dict(spent)))
    for _ in range(2):
        before_s = spent_s()
        for _ in range(2):
            listen()  # each kernel counts once
        for microseconds in (250_000, 500_000):
            compilation.listener(times=SimpleNamespace(total=microseconds))
        spent["total_wall_time"] += 2.5
        # The second rank has twice the numbers.
        assert compile_columns(before_s, context) == pytest.approx({"triton_compile_s": 1.5, "torch_compile_s": 5.0})
