"""Plans of transformers, and one line for each model that a variant cannot shard.

test_train_variants.py trains these architectures.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.train_step import ARCHITECTURES, SHARDED, tiny_problem
from tpbench.workloads.train_step import WORKLOAD

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architecture": "diffllama"}, "self_attn of tiny (diffllama)"),
    ({"architecture": "stablelm"}, "no tensor-parallel plan of model.layers.0.self_attn of tiny (stablelm)"),
    ({"architecture": "gpt2", "kv_heads": 4, "ffn_matrices": 2}, "gpt2 is no decoder of an embedding, layers"),
]


@pytest.mark.parametrize(
    ("fields", "message"), [*((fields, None) for fields in ARCHITECTURES), *REFUSED], ids=lambda value: str(value)[:50]
)
def test_a_model_that_no_variant_can_shard_is_refused_before_the_launch(
    fields: dict[str, Any], message: str | None
) -> None:
    for name in SHARDED:
        reason = WORKLOAD.variants[name].unsupported_reason(tiny_problem(**fields), 2)
        if message is None:
            assert reason is None
        else:
            assert reason is not None and message in reason and "\n" not in reason
