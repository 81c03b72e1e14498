"""Problems that other projects' entropy losses cannot do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.entropy_loss import problem
from tpbench.workloads.entropy_loss import WORKLOAD


@pytest.mark.parametrize(
    "name, fields, tp_size, said",
    [
        ("flash_attn", {"loss": "reverse_kl"}, 1, "it has no reverse_kl"),
        ("flash_attn", {"vocab": 101}, 2, "a vocab that tp_size divides"),
        ("quack", {"logits_scale": 2.0}, 1, "it has no logits_scale"),
        ("megatron", {}, 1, "it needs a group of ranks"),
    ],
)
def test_a_variant_refuses_what_its_function_cannot_do(
    name: str, fields: dict[str, Any], tp_size: int, said: str
) -> None:
    cell = problem(**{"loss": "cross_entropy", "dtype": "bfloat16"} | fields)
    assert said in (WORKLOAD.variants[name].unsupported_reason(cell, tp_size) or "")


def test_a_prediction_needs_no_python_that_a_variant_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction comes from rows, perhaps of another machine. A job on this machine is skipped."""
    monkeypatch.setattr("tpbench.workloads.entropy_loss.problem.sys", SimpleNamespace(version_info=(3, 11)))
    cell = problem(loss="cross_entropy", dtype="bfloat16")
    assert WORKLOAD.variants["fast_llm"].unsupported_reason(cell, 1) is None
    assert WORKLOAD.unsupported_reason(SimpleNamespace(variant="fast_llm")) == "it needs Python 3.12"
