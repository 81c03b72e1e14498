"""Every registered variant of the block that runs here, against one process: a new variant needs no test of its own."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.support.ranks import Rank, enough_gpus, needs_cuda, run_on_ranks
from tests.support.tp_block import (
    HERE,
    PARTS,
    QUACK,
    block_context,
    context,
    errors_against_one_process,
    largest_error,
    one_process,
    problem,
    run_once,
)
from tpbench.workloads.tp_block import WORKLOAD, TpBlock
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.oracle import BlockResult, compare, expected_result
from tpbench.workloads.tp_block.problem import TOLERANCE


def on(*numbers: int) -> list[Any]:
    """Numbers of ranks. Those that exceed this machine's GPUs are skipped."""
    reason = "needs {} GPUs, or none"
    return [
        pytest.param(each, marks=pytest.mark.skipif(not enough_gpus(each), reason=reason.format(each)))
        for each in numbers
    ]


def cells(name: str) -> list[TpBlock]:
    """Every part, with gathered inputs kept or not, keys and values shared by heads or not, and all dtypes."""
    if name == "block_compile_async":
        return [problem(dtype="bfloat16", tokens=48)]  # the compiler takes half a minute for each
    sizes = QUACK if name == "block_quack" else {}
    keeps = (True, False) if "save_gathered" in WORKLOAD.variants[name].options else (True,)
    found = [problem(part=part, save_gathered=keep, **sizes) for part in PARTS for keep in keeps]
    if name == "block_quack":
        return found
    found += [
        problem(kv_heads=8),
        problem(rotary=True),
        *[problem(compile=True, dtype="float32")] * (name == "block_tp" or torch.cuda.is_available()),
        problem(dtype="float32", seed=3),
        problem(dtype="bfloat16", tokens=48),
    ]
    return found + [problem(signals="kernel")] * ("signals" in WORKLOAD.variants[name].options)


def everything_right(here: Rank, name: str) -> int:
    """Check each rank's part of every cell against one process, twice: the first pass must leave nothing behind.

    Four ranks check every third cell. On CPUs a compiled layer's operations are torch's own: without C++ kernels they
    need no compiler.
    """
    chosen = cells(name)[:: 1 if here.world_size == 2 else 3]
    for cell in chosen:
        where = block_context(here, cell)
        prepared = WORKLOAD.variants[name].prepare(cell, where)
        if cell.compile:
            torch._dynamo.reset()
        compiled = counters["stats"]["unique_graphs"]
        for _ in range(2):
            with inductor.patch(fallback_by_default=not torch.cuda.is_available()):
                output = run_once(cell, prepared)
            errors = errors_against_one_process(output, cell, where.inputs, prepared.size)
            assert max(errors.values()) <= TOLERANCE[cell.dtype], (here.rank, cell, errors)
        assert not cell.compile or counters["stats"]["unique_graphs"] > compiled, "nothing was compiled"
    return len(chosen)


@pytest.mark.parametrize("ranks", on(2, 4))
@pytest.mark.parametrize("name", HERE)
def test_forward_and_every_gradient_are_those_of_one_process(name: str, ranks: int) -> None:
    assert len(set(run_on_ranks(ranks, everything_right, name))) == 1


def error_in_pieces(here: Rank) -> float:
    """The largest error of three passes whose products are cut into pieces."""
    cell = problem(dtype="float32", save_gathered=False)
    where = block_context(here, cell)
    prepared = WORKLOAD.variants["block_copy_engine"].prepare(cell, where)
    with mock.patch("tpbench.workloads.tp_block.execution.copy_engine.MIN_PIECE_ELEMENTS", 1):
        return max(largest_error(cell, where, prepared) for _ in range(3))


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("ranks", on(2, 4))
def test_pieces_are_right_on_gpus(ranks: int) -> None:
    assert max(run_on_ranks(ranks, error_in_pieces)) <= TOLERANCE["float32"]


def errors_in_subgroups(here: Rank) -> dict[str, float]:
    """Errors by variant in two concurrent groups, each of two ranks that are not neighbours in the world."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    cell = problem()
    where = block_context(here, cell, groups[here.rank % 2])
    return {
        name: largest_error(cell, where, WORKLOAD.variants[name].prepare(cell, where))
        for name in HERE
        if WORKLOAD.variants[name].unsupported_reason(cell, 2) is None and name != "block_no_tp"
    }


@pytest.mark.skipif(not enough_gpus(4), reason="needs 4 GPUs, or none")
def test_variants_work_in_any_process_group() -> None:
    for errors in run_on_ranks(4, errors_in_subgroups):
        assert errors and max(errors.values()) <= TOLERANCE["float64"], errors


def oracle_errors(here: Rank) -> dict[str, float]:
    """The oracle's errors against one process, by part."""
    errors = {}
    for part in (*PARTS, "rotary"):
        cell = problem(rotary=True) if part == "rotary" else problem(part=part)
        inputs = BlockInputs(cell, context(here))
        found = errors_against_one_process(expected_result(inputs), cell, inputs, here.world_size)
        errors[part] = max(found.values())
    return errors


@pytest.mark.skipif(not enough_gpus(4), reason="needs 4 GPUs, or none")
def test_the_oracle_is_one_process() -> None:
    for errors in run_on_ranks(4, oracle_errors):
        assert set(errors) == {*PARTS, "rotary"} and max(errors.values()) < 1e-12, errors


def verdicts_of_few_tokens(here: Rank) -> dict[str, str | None]:
    """The oracle's verdicts of blocks by plain torch."""
    cells = [
        problem(tokens=tokens, hidden=64, ffn=160, dtype=dtype, seed=seed)
        for tokens in (1, 2, 4, 8)
        for dtype in ("bfloat16", "float32")
        for seed in range(4)
    ]
    verdicts = {}
    for cell in cells:
        inputs, found = BlockInputs(cell, context(here)), one_process(cell)
        grads = {name: each.to(inputs.device) for name, each in found.grads.items()}
        moved = BlockResult(found.output.to(inputs.device), found.grad_input.to(inputs.device), grads)
        verdicts[str(cell)] = compare(inputs, moved).wrong
    return verdicts


def test_gradients_that_cancel_to_almost_nothing_are_right() -> None:
    """With few tokens a row of a weight's gradient may be smaller than the roundings of what it is computed from."""
    (verdicts,) = run_on_ranks(1, verdicts_of_few_tokens)
    assert set(verdicts.values()) == {None}, verdicts
