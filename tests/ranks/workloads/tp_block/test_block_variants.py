"""Every registered variant of the block that runs here against one process: a new one needs no test of its own."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.tp_block import PARTS, context, one_process, place, problem
from tpbench.workloads.tp_block import WORKLOAD, TpBlock, oracle
from tpbench.workloads.tp_block.block import gradients
from tpbench.workloads.tp_block.inputs import Inputs
from tpbench.workloads.tp_block.oracle import Result
from tpbench.workloads.tp_block.prepared import Prepared, prepare


def on(*numbers: int) -> list[Any]:
    """Numbers of ranks, of which too many for this machine's GPUs are skipped."""
    reason = "needs {} GPUs, or none"
    return [
        pytest.param(each, marks=pytest.mark.skipif(not enough_gpus(each), reason=reason.format(each)))
        for each in numbers
    ]


HERE = sorted(name for name, each in WORKLOAD.variants.items() if torch.cuda.is_available() or not each.needs_cuda)
one_process = functools.cache(one_process)


def cells(name: str) -> list[TpBlock]:
    """Every part, keeping what was gathered or not; keys and values shared by heads or not; rounded dtypes."""
    if name == "block_compile_async":
        return [problem(dtype="bfloat16", tokens=48)]  # each takes a compiler half a minute
    keeps = (True, False) if "save_gathered" in WORKLOAD.variants[name].takes else (True,)
    found = [problem(part=part, save_gathered=keep) for part in PARTS for keep in keeps]
    found += [problem(kv_heads=8), problem(dtype="float32", seed=3), problem(dtype="bfloat16", tokens=48)]
    return found + [problem(signals="kernel")] * ("signals" in WORKLOAD.variants[name].takes)


def passed(cell: TpBlock, prepared: Prepared) -> Result:
    """One pass."""
    output = prepared.run(prepared.x)
    output.backward(prepared.grad)
    assert prepared.x.grad is not None
    grads = gradients(cell, prepared.module)
    result = Result(output.detach(), prepared.x.grad, {name: each for name, each in grads.items() if each is not None})
    prepared.x.grad = None
    prepared.module.zero_grad(set_to_none=True)
    return result


def everything_right(here: Rank, name: str) -> int:
    """Each rank's part against the same part of one process; twice, as the first pass must leave nothing behind."""
    for cell in cells(name):
        where = place(here, cell)
        prepared = WORKLOAD.variants[name].prepare(cell, where)
        for _ in range(2):
            errors = differences(passed(cell, prepared), cell, where.inputs, prepared.size)
            limit = oracle.TOLERANCE[cell.dtype]
            assert max(errors.values()) <= limit, (here.rank, cell, errors)
    return len(cells(name))


def differences(got: Result, cell: TpBlock, inputs: Inputs, size: int) -> dict[str, float]:
    """By tensor, the largest relative error of a row."""
    if size != inputs.size:
        got = oracle.own_part(got, inputs)
    expected = oracle.own_part(one_process(cell), inputs)
    assert set(got.grads) == set(expected.grads)
    pairs = {"output": (got.output, expected.output), "input": (got.grad_input, expected.grad_input)}
    pairs |= {name: (got.grads[name], each) for name, each in expected.grads.items()}
    return {name: oracle.row_error(mine.cpu(), right.double()) for name, (mine, right) in pairs.items()}


@pytest.mark.parametrize("ranks", on(2, 4))
@pytest.mark.parametrize("name", HERE)
def test_forward_and_every_gradient_are_those_of_one_process(name: str, ranks: int) -> None:
    assert len(set(run_on_ranks(ranks, everything_right, name))) == 1


def merged_right(here: Rank, in_pieces: bool) -> float:
    from tpbench.comm.symmetric_buffers import SymmetricBuffers
    from tpbench.workloads.tp_block import copy_engine

    cell = problem(dtype="float32", save_gathered=False)
    where = place(here, cell)
    engine = copy_engine.CopyEngine(SymmetricBuffers(here.group, here.device, "stream"), merged=True)
    prepared = prepare(where, engine)
    with mock.patch.object(copy_engine, "PIECE", 1 if in_pieces else copy_engine.PIECE):
        errors = [differences(passed(cell, prepared), cell, where.inputs, prepared.size) for _ in range(3)]
    return max(max(each.values()) for each in errors)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("ranks", on(2, 4))
def test_merged_chunks_and_pieces_are_right_on_gpus(ranks: int, in_pieces: bool) -> None:
    assert max(run_on_ranks(ranks, merged_right, in_pieces)) <= oracle.TOLERANCE["float32"]


def in_subgroups(here: Rank, name: str) -> float:
    """Two groups at once, each of two ranks that are not neighbours and whose numbers in it are not the world's."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    cell = problem()
    where = place(here, cell, groups[here.rank % 2])
    errors = differences(passed(cell, WORKLOAD.variants[name].prepare(cell, where)), cell, where.inputs, 2)
    return max(errors.values())


@pytest.mark.skipif(not enough_gpus(4), reason="needs 4 GPUs, or none")
@pytest.mark.parametrize("name", [name for name in HERE if name != "block_no_tp"])
def test_it_works_in_any_process_group(name: str) -> None:
    assert max(run_on_ranks(4, in_subgroups, name)) <= oracle.TOLERANCE["float64"]


def norms_not_summed(here: Rank) -> float:
    """What is found of a block whose norms' gradients stay each rank's own."""
    cell = problem()
    where = place(here, cell)
    prepared = WORKLOAD.variants["block_tp"].prepare(cell, where)
    for module in prepared.module.modules():
        if hasattr(module, "eps"):
            broken: Any = module
            broken.group = None
    errors = differences(passed(cell, prepared), cell, where.inputs, 2)
    assert max(error for name, error in errors.items() if "norm" not in name) <= oracle.TOLERANCE["float64"]
    return min(errors["attention_norm"], errors["mlp_norm"])


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
def test_without_the_sum_over_ranks_norms_are_wrong() -> None:
    assert min(run_on_ranks(2, norms_not_summed)) > 0.1


def oracle_error(here: Rank, cell: TpBlock) -> float:
    inputs = Inputs(cell, context(here))
    return max(differences(oracle.right(inputs), cell, inputs, here.world_size).values())


@pytest.mark.skipif(not enough_gpus(4), reason="needs 4 GPUs, or none")
@pytest.mark.parametrize("part", PARTS)
def test_the_oracle_is_one_process(part: str) -> None:
    assert max(run_on_ranks(4, oracle_error, problem(part=part))) < 1e-12
