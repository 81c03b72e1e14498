"""One defect on one rank makes a block's result wrong, in each dtype. Right results of several seeds are right."""

import math
import re
from collections.abc import Callable
from unittest import mock

import pytest
from torch import Tensor

from tests.support.defects import LARGE_SEEDS, SEEDS
from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.tp_block import block_context, problem, run_once
from tpbench.workloads.tp_block import WORKLOAD, oracle
from tpbench.workloads.tp_block.oracle import BlockResult, compare

SIZES = {"tokens": 128, "hidden": 1024, "ffn": 512, "heads": 8, "kv_heads": 4, "head_dim": 64}
"""A lost column of a matrix this wide changes the norm of a row by less than the tolerance in bf16."""


def zero(part: Tensor) -> None:
    part.zero_()


def swap(rows: Tensor) -> None:
    rows.copy_(rows.flip(0))


def largest(values: Tensor) -> Tensor:
    """Return the largest element, as a view: a small one that is wrong remains unseen."""
    return values.view(-1)[values.abs().argmax()]


def largest_row(matrix: Tensor) -> int:
    """Return the row of the largest norm: the wrong scale of a small one remains unseen."""
    return int(matrix.float().norm(dim=1).argmax())


def scaled(factor: float) -> Callable[[Tensor], object]:
    return lambda part: part.mul_(factor)


DEFECTS: dict[str, tuple[Callable[[BlockResult], Tensor], Callable[[Tensor], object], str]] = {
    "the query gradient of a head": (lambda of: of.grads["qkv"][64:128], zero, "the gradient of qkv"),
    "the output of a head": (lambda of: of.grads["out"][:, 64:128], zero, "the gradient of out"),
    "a row": (lambda of: of.grads["up"][-1], zero, "the gradient of up"),
    "a column": (lambda of: of.grads["up"][:, -1], zero, "the gradient of up"),
    "a column of the output": (lambda of: of.output[:, 7], zero, "output"),
    "an element": (lambda of: largest(of.grad_input), zero, "the gradient of input"),
    "an element of a norm": (lambda of: largest(of.grads["mlp_norm"]), scaled(1.5), "the gradient of mlp_norm"),
    "a gradient of nan": (lambda of: of.grad_input[-1], scaled(math.nan), "the gradient of input"),
    "two rows": (lambda of: of.grads["down"][5:7], swap, "the gradient of down"),
    "two columns": (lambda of: of.grads["qkv"].t()[5:7], swap, "the gradient of qkv"),
    "64 rows": (lambda of: of.grads["down"][64:128], scaled(1.03), "the gradient of down"),
    "64 columns": (lambda of: of.grads["up"][:, 64:128], scaled(1.03), "the gradient of up"),
    "a row's scale": (lambda of: of.grads["up"][largest_row(of.grads["up"])], scaled(1.0625), "the gradient of up"),
    "a weight's scale": (lambda of: of.grads["out"], scaled(1 + 2**-6), "the gradient of out"),
    "a norm's scale": (lambda of: of.grads["attention_norm"], scaled(1 + 2**-6), "the gradient of attention_norm"),
    "the output's scale": (lambda of: of.output, scaled(1 - 2**-6), "output"),
    "the input gradient's scale": (lambda of: of.grad_input, scaled(1 + 2**-6), "the gradient of input"),
}
"""By name: the part of rank 1's result that is wrong, what becomes of it, and its name in the reason."""


def verdicts(here: Rank, dtype: str, seed: int) -> dict[str, str | None]:
    """Return why a result is wrong with each defect, and with none."""
    cell = problem(dtype=dtype, seed=seed, **SIZES)
    context = block_context(here, cell)
    result = run_once(cell, WORKLOAD.variants["block_tp"].prepare(cell, context))
    verdicts = {"": compare(context.inputs, result).wrong}
    with mock.patch.object(oracle, "expected_result", return_value=oracle.expected_result(context.inputs)):
        for name, (part, change, _) in DEFECTS.items():
            grads = {name: grad.clone() for name, grad in result.grads.items()}
            spoiled = BlockResult(result.output.detach().clone(), result.grad_input.clone(), grads)
            if here.rank == 1:
                change(part(spoiled))
            verdicts[name] = compare(context.inputs, spoiled).wrong
    # A slice of the last call, whose activations had other numbers.
    context.inputs.activation_seed += 1
    later = run_once(cell, WORKLOAD.variants["block_tp"].prepare(cell, context))
    if here.rank == 1:
        later.grads["down"][:] = result.grads["down"]
    verdicts["stale"] = compare(context.inputs, later).wrong
    return verdicts


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_defect_of_one_rank_is_wrong_and_named(dtype: str) -> None:
    for seed in LARGE_SEEDS:
        first, second = run_on_ranks(2, verdicts, dtype, seed)
        assert first == second and first.pop("") is None, (seed, first)
        places = {name: DEFECTS[name][2] if name in DEFECTS else "down" for name in first}
        missed = {name: why for name, why in first.items() if not re.search(f"rank 1: .*{places[name]}", why or "")}
        assert not missed, (seed, missed)


def found_wrong(here: Rank, seed: int) -> list[str]:
    """Return the problems of a seed whose right results are wrong by the oracle."""
    cells = [
        problem(dtype=dtype, seed=seed, **sizes)
        for sizes in ({}, {"tokens": 2, "hidden": 64, "ffn": 160}, {"tokens": 128, "hidden": 256, "head_dim": 32})
        for dtype in ("bfloat16", "float32")
    ]
    found = []
    for cell in cells:
        context = block_context(here, cell)
        result = run_once(cell, WORKLOAD.variants["block_tp"].prepare(cell, context))
        if (wrong := compare(context.inputs, result).wrong) is not None:
            found.append(f"{cell}: {wrong}")
    return found


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
def test_right_results_of_any_seed_are_right() -> None:
    for seed in SEEDS:
        for found in run_on_ranks(2, found_wrong, seed):
            assert not found, found
