"""Plans of transformers, and one line for each model or mapping that a variant cannot shard.

test_train_variants.py trains these architectures.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.train_step import ARCHITECTURES, SHARDED, tiny_problem
from tpbench.workloads.train_step import WORKLOAD
from tpbench.workloads.train_step.model.models import build
from tpbench.workloads.train_step.sharding.plan import blocks

MIXED_NORMS = json.dumps({"layers.*.self_attn.o_proj": "rowwise", "layers.*.self_attn.?_proj": "colwise"})
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architecture": "diffllama"}, "self_attn of tiny (diffllama)"),
    ({"architecture": "stablelm"}, "no tensor-parallel plan of model.layers.0.self_attn of tiny (stablelm)"),
    ({"architecture": "gpt2", "kv_heads": 4, "ffn_matrices": 2}, "gpt2 is no decoder of an embedding, layers"),
    (
        {"tp_mapping": '{"layers.*.mlp.up": "colwise"}'},
        "tp_mapping: layers.*.mlp.up matches no module in the blocks of tiny, did you mean layers.*.mlp.up_proj?",
    ),
    (
        {"tp_mapping": '{"layers.*.mlp.up_proj": "rowwise"}'},
        "the linear layers of model.layers.0.mlp cannot be sharded as gate_proj: colwise, up_proj: rowwise",
    ),
    (
        {"tp_mapping": '{"layers.*.mlp.up_proj": "replicated"}'},
        "the linear layers of model.layers.0.mlp cannot be sharded as gate_proj: colwise, up_proj: replicated",
    ),
    (
        {"architecture": "olmo2", "tp_mapping": MIXED_NORMS},
        "model.layers.0.self_attn.q_norm of tiny normalises 32 columns, and a rank would have a share of them: ",
    ),
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


def test_a_mapping_comes_before_the_models_plan() -> None:
    problem = tiny_problem(tp_mapping=json.dumps({"model.layers.1.mlp.*": "replicated"}))
    styles = {block.name: set(block.styles.values()) for block in blocks(problem, build(problem))}
    assert styles["model.layers.0.mlp"] == {"colwise", "rowwise"} and styles["model.layers.1.mlp"] == {"replicated"}
