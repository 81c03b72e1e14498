"""Weights and tokens of a rank in the mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.train_step import CPU, mesh_context, named, prepared, tiny_problem, whole
from tpbench.workloads.train_step.estimates import parameters_per_rank
from tpbench.workloads.train_step.model.configuration import UnknownArchitecture
from tpbench.workloads.train_step.model.inputs import micro_batch
from tpbench.workloads.train_step.model.models import build, materialise
from tpbench.workloads.train_step.sharding import by_modules
from tpbench.workloads.train_step.training.fsdp import device_mesh
from tpbench.workloads.train_step.training.losses import local_shard


def initial_weights(here: Rank, name: str, tp_size: int, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    problem, context = tiny_problem(**fields), mesh_context(here, tp_size)
    return {each: whole(value, each, problem, context) for each, value in named(prepared(name, problem, context).model)}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("name", "ranks", "tp_size"),
    [
        ("ddp", 2, 1),
        ("fsdp", 2, 1),
        ("fsdp_dtensor", 2, 2),
        ("fsdp_dtensor", 4, 2),
        ("dtensor_tp", 2, 2),
        ("autotp", 2, 2),
    ],
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
        assert [each for each in right if not torch.equal(weights[each], right[each])] == []


def held_weights(here: Rank, name: str, fields: dict[str, Any]) -> tuple[int, int, int]:
    """Return the rows of the embedding on this rank, its number of weights in matrices, and the estimated number."""
    problem, context = tiny_problem(**fields), mesh_context(here, 2)
    shards = {each: local_shard(value) for each, value in named(prepared(name, problem, context).model)}
    held = sum(shard.numel() for shard in shards.values() if shard.dim() > 1)
    return len(shards["model.embed_tokens.weight"]), held, parameters_per_rank(problem, name, 2)


@pytest.mark.parametrize("name", ["fsdp_dtensor", "autotp"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_embedding_is_sharded_with_the_vocabulary(name: str, tied: bool) -> None:
    if not enough_gpus(2):
        pytest.skip("needs 2 GPUs, or none")
    for rows, held, estimated in run_on_ranks(2, held_weights, name, {"tied": tied}):
        assert rows == 48  # of 96
        assert held <= estimated <= 1.02 * held  # the estimate has norms too


def test_gathered_logits_leave_autotps_embedding_whole() -> None:
    if not enough_gpus(2):
        pytest.skip("needs 2 GPUs, or none")
    for rows, held, estimated in run_on_ranks(2, held_weights, "autotp", {"vocab_parallel": False}):
        assert rows == 96 and held <= estimated <= 1.02 * held


@pytest.mark.parametrize("name", ["fsdp_dtensor", "autotp"])
def test_replicated_blocks_are_whole_on_every_rank(name: str) -> None:
    if not enough_gpus(2):
        pytest.skip("needs 2 GPUs, or none")
    mapping = {"tp_mapping": '{"layers.1.mlp.*": "replicated", "layers.0.self_attn.*": "replicated"}'}
    for _, held, estimated in run_on_ranks(2, held_weights, name, mapping):
        assert held <= estimated <= 1.02 * held


def test_layers_of_repeated_heads_are_whole_on_every_rank() -> None:
    if not enough_gpus(2):
        pytest.skip("needs 2 GPUs, or none")
    for _, held, estimated in run_on_ranks(2, held_weights, "fsdp_dtensor", {"kv_heads": 1}):
        assert held <= estimated <= 1.02 * held


def first_tokens(here: Rank, tp_size: int) -> tuple[int, int, list[int]]:
    context = mesh_context(here, tp_size)
    batch = micro_batch(tiny_problem(), 0, 0, context.dp_rank, context.dp_size, here.device)
    return context.dp_rank, context.tp_rank, batch.tokens.flatten().tolist()


def test_the_mesh_is_row_major_and_a_replicas_ranks_have_one_batch() -> None:
    if not enough_gpus(4):
        pytest.skip("needs 4 GPUs, or none")
    found = run_on_ranks(4, first_tokens, 2)
    assert [(dp, tp) for dp, tp, _ in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found[0][2] == found[1][2] != found[2][2] == found[3][2]


def mesh_of_dtensors(here: Rank) -> list[list[int]]:
    mesh = device_mesh(mesh_context(here, 2))
    assert mesh["tp"].get_local_rank() == here.rank % 2 and mesh["dp"].get_local_rank() == here.rank // 2
    return mesh.mesh.tolist()


def test_dtensors_have_the_same_mesh() -> None:
    if not enough_gpus(4):
        pytest.skip("needs 4 GPUs, or none")
    assert run_on_ranks(4, mesh_of_dtensors) == [[[0, 1], [2, 3]]] * 4


def error_of_an_unplanned_module(here: Rank) -> str:
    problem, context = tiny_problem(), mesh_context(here, 2)
    model = build(problem)
    model.model.layers[1].mlp.extra = torch.nn.Linear(4, 4, device="meta")
    try:
        by_modules.shard(problem, model, device_mesh(context)["tp"])
    except UnknownArchitecture as error:
        return str(error)
    return "no error"


def test_a_plan_that_misses_a_parameter_is_refused() -> None:
    if not enough_gpus(2):
        pytest.skip("needs 2 GPUs, or none")
    for said in run_on_ranks(2, error_of_an_unplanned_module):
        assert "the linear layers of model.layers.1.mlp cannot be sharded as" in said and "extra: replicated" in said
