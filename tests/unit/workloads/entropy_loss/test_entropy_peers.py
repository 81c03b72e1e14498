"""Problems that other projects' entropy losses cannot do."""

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
        ("torch_loss_parallel", {}, 1, "it needs a group of ranks"),
    ],
)
def test_a_variant_refuses_what_its_function_cannot_do(
    name: str, fields: dict[str, Any], tp_size: int, said: str
) -> None:
    cell = problem(**{"loss": "cross_entropy", "dtype": "bfloat16"} | fields)
    assert said in (WORKLOAD.variants[name].unsupported_reason(cell, tp_size) or "")
