"""Weights of a rank, and one line for each model that no variant can shard."""

from typing import Any

import pytest
import torch

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.train_step import (
    ARCHITECTURES,
    CPU,
    SHARDED,
    mesh_context,
    named,
    prepared,
    tiny_problem,
    whole,
)
from tpbench.packages import installed
from tpbench.workloads.train_step import WORKLOAD
from tpbench.workloads.train_step.estimates import parameters_per_rank
from tpbench.workloads.train_step.model.models import build, materialise
from tpbench.workloads.train_step.training.losses import local_shard

needs_two_gpus = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")


def initial_weights(here: Rank, name: str, tp_size: int, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    problem, context = tiny_problem(**fields), mesh_context(here, tp_size)
    model = prepared(name, problem, context).model
    return {parameter: whole(value, parameter, problem, context) for parameter, value in named(model)}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("name", "ranks", "tp_size"),
    [("ddp", 2, 1), ("fsdp", 2, 1), *((name, 2, 2) for name in SHARDED), ("fsdp_dtensor", 4, 2)],
)
def test_initial_weights_have_the_same_bits_however_sharded(name: str, ranks: int, tp_size: int, tied: bool) -> None:
    if not enough_gpus(ranks):
        pytest.skip(f"needs {ranks} GPUs, or none")
    problem = tiny_problem(tied=tied, vocab=97)
    model = build(problem)
    materialise(model, CPU, problem.seed)
    right = dict(model.named_parameters())
    for weights in run_on_ranks(ranks, initial_weights, name, tp_size, {"tied": tied, "vocab": 97}):
        assert set(weights) == set(right)
        assert [parameter for parameter in right if not torch.equal(weights[parameter], right[parameter])] == []


HELD: list[tuple[str, int, dict[str, Any]]] = [
    *((name, 48, {"tied": tied}) for name in ("fsdp_dtensor", "autotp") for tied in (False, True)),
    ("autotp", 96, {"vocab_parallel": False}),
]  # fmt: skip
"""Variant, rows of the embedding on a rank (of 96), and fields."""


def held_weights(here: Rank) -> list[tuple[int, int, int]]:
    """Return the rows of the embedding on this rank, its number of weights in matrices, and the estimated number."""
    result = []
    for name, _, fields in HELD:
        problem, context = tiny_problem(**fields), mesh_context(here, 2)
        shards = {parameter: local_shard(value) for parameter, value in named(prepared(name, problem, context).model)}
        held = sum(shard.numel() for shard in shards.values() if shard.dim() > 1)
        estimated = parameters_per_rank(problem, WORKLOAD.variants[name].distribution, 2)
        result.append((len(shards["model.embed_tokens.weight"]), held, estimated))
    return result


@needs_two_gpus
@pytest.mark.skipif(not installed("deepspeed"), reason="needs deepspeed")
def test_a_rank_holds_its_shards() -> None:
    for of_rank in run_on_ranks(2, held_weights):
        for (name, expected_rows, fields), (rows, held, estimated) in zip(HELD, of_rank, strict=True):
            assert rows == expected_rows, (name, fields)
            assert held <= estimated <= 1.02 * held, (name, fields)  # the estimate has norms too


REFUSED: list[tuple[dict[str, Any], str]] = [
    # Kinds of norms and of sharding that tpbench does not have: their results would be wrong.
    ({"architecture": "cohere"}, "no variant shards CohereLayerNorm of tiny (cohere)"),
    (
        {"architecture": "gemma2", "attention": "eager", "tied": True},
        "no variant shards Gemma2",
    ),
    ({"architecture": "olmo2"}, "as colwise_gather_output, which no variant does"),
    ({"architecture": "phi3"}, "as rowwise_split_input, which no variant does"),
    ({"architecture": "diffllama"}, "no variant shards DiffLlamaAttention of tiny (diffllama)"),
    ({"architecture": "stablelm"}, "no variant shards LayerNorm of tiny (stablelm)"),
    ({"architecture": "gpt2", "kv_heads": 4}, "gpt2 is no decoder of embed_tokens, layers"),
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
