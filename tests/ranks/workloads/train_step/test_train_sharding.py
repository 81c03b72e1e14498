"""Weights and tokens of a rank in the mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.train_step import CPU, SHARDED, mesh_context, named, prepared, tiny_problem, whole
from tpbench.workloads.train_step.estimates import parameters_per_rank
from tpbench.workloads.train_step.model.configuration import UnknownArchitecture
from tpbench.workloads.train_step.model.inputs import micro_batch
from tpbench.workloads.train_step.model.models import build, materialise
from tpbench.workloads.train_step.sharding import by_modules
from tpbench.workloads.train_step.training.fsdp import device_mesh
from tpbench.workloads.train_step.training.trainer import local_shard

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
        result.append((len(shards["model.embed_tokens.weight"]), held, parameters_per_rank(problem, name, 2)))
    return result


@needs_two_gpus
def test_a_rank_holds_its_shards() -> None:
    for of_rank in run_on_ranks(2, held_weights):
        for (name, expected_rows, fields), (rows, held, estimated) in zip(HELD, of_rank, strict=True):
            assert rows == expected_rows, (name, fields)
            assert held <= estimated <= 1.02 * held, (name, fields)  # the estimate has norms too


def place_in_the_mesh(here: Rank) -> tuple[int, int, list[int], list[list[int]]]:
    context = mesh_context(here, 2)
    batch = micro_batch(tiny_problem(), 0, 0, context.dp_rank, context.dp_size, here.device)
    mesh = device_mesh(context)
    assert mesh["tp"].get_local_rank() == here.rank % 2 and mesh["dp"].get_local_rank() == here.rank // 2
    return context.dp_rank, context.tp_rank, batch.tokens.flatten().tolist(), mesh.mesh.tolist()


@pytest.mark.skipif(not enough_gpus(4), reason="needs 4 GPUs, or none")
def test_the_mesh_is_row_major_and_a_replicas_ranks_have_one_batch() -> None:
    places = run_on_ranks(4, place_in_the_mesh)
    assert [(dp, tp) for dp, tp, *_ in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert places[0][2] == places[1][2] != places[2][2] == places[3][2]
    assert [mesh for *_, mesh in places] == [[[0, 1], [2, 3]]] * 4


def error_of_an_unplanned_module(here: Rank) -> str:
    problem, context = tiny_problem(), mesh_context(here, 2)
    model = build(problem)
    model.model.layers[1].mlp.extra = torch.nn.Linear(4, 4, device="meta")
    with pytest.raises(UnknownArchitecture) as error:
        by_modules.shard(problem, model, device_mesh(context)["tp"])
    return str(error.value)


@needs_two_gpus
def test_a_plan_that_misses_a_parameter_is_refused() -> None:
    for message in run_on_ranks(2, error_of_an_unplanned_module):
        assert "the linear layers of model.layers.1.mlp cannot be sharded as" in message
        assert "extra: replicated" in message
