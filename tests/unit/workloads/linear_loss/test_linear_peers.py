"""Problems that other projects' linear losses cannot do, and the chunks of QuACK."""

from typing import Any

import pytest

from tests.support.linear_loss import problem
from tpbench.workloads.linear_loss import WORKLOAD
from tpbench.workloads.linear_loss.problem import quack_chunk_rows


@pytest.mark.parametrize(
    ("tokens", "hidden", "rows"),
    [
        (8192, 8192, 4096), (8192, 4096, 8192), (4096, 4096, 2048), (65536, 4096, 8192), (4200, 128, 8192),
        (2048, 2048, 1024), (100, 4096, 4096),
        (100, 128, None),
    ],
)  # fmt: skip
def test_no_chunk_of_quack_has_as_many_rows_as_hidden_columns(tokens: int, hidden: int, rows: int | None) -> None:
    assert quack_chunk_rows(problem(tokens=tokens, hidden=hidden)) == rows


@pytest.mark.parametrize(
    ("name", "fields", "tp_size", "said"),
    [
        ("linear_verl", {"hidden": 64}, 1, "hidden to be a multiple of 128, got 64"),
        ("linear_verl", {"hidden": 128, "loss": "forward_kl"}, 1, "no forward_kl"),
        ("linear_verl", {"hidden": 128}, 2, None),
        ("linear_verl", {"hidden": 128, "loss": "logprob", "temperature": 1.9}, 2, None),
        ("linear_cce", {"loss": "logprob"}, 1, "no logprob, only cross_entropy"),
        ("linear_cce", {"dtype": "float32"}, 1, "gradients in bfloat16 or float16"),
        ("linear_cce", {"dtype": "float32", "mode": "forward"}, 1, None),
        ("linear_quack", {"tokens": 9, "vocab": 96}, 1, "that 8 divides"),
        ("linear_quack", {"tokens": 16, "vocab": 96}, 1, None),
        ("linear_quack", {"tokens": 16, "vocab": 96, "hidden": 128}, 1, "more or fewer rows than hidden=128"),
        ("linear_liger_cutedsl", {"tokens": 128, "vocab": 256}, 1, None),
        ("linear_liger_cutedsl", {"tokens": 128, "vocab": 256, "mode": "forward"}, 1, "in its forward pass"),
        ("linear_liger_cutedsl", {"tokens": 64, "vocab": 256}, 1, "tokens that 128 divides"),
        ("linear_liger_cutedsl", {"tokens": 128, "vocab": 384}, 1, "a vocab that 256 divides"),
        ("linear_liger_cutedsl", {"tokens": 128, "vocab": 256, "dtype": "float16"}, 1, "needs bfloat16"),
    ],
)
def test_problems_that_a_peer_does_not_do(name: str, fields: dict[str, Any], tp_size: int, said: str | None) -> None:
    reason = WORKLOAD.variants[name].unsupported_reason(problem(**fields), tp_size)
    assert reason is None if said is None else said in str(reason)
