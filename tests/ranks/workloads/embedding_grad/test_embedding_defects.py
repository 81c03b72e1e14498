"""One defect of one rank makes an exchange's result wrong, in each dtype. Right results of several seeds are right."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.defects import LARGE_SEEDS, SEEDS
from tests.support.embedding_grad import DTYPES, HERE, prepared, problem, run
from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tpbench.workloads.embedding_grad import EmbeddingGrad
from tpbench.workloads.embedding_grad.bench import compare
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs

pytestmark = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")


def wide(**fields: object) -> EmbeddingGrad:
    """Return a problem with rows so wide that one element hardly changes their norm in bf16."""
    return problem(**{"table_rows": 64, "width": 4608, "tokens": 64, "accumulate": 1, **fields})


def touched_rows(inputs: EmbeddingGradInputs, ranks: int) -> Tensor:
    """Return the rows of this rank's slice that so many ranks touched, counted from the slice's first row."""
    first = inputs.bounds[inputs.rank]
    count = torch.bincount(torch.cat(inputs.touched), minlength=inputs.bounds[-1])
    return (count[first : first + inputs.rows_per_rank] == ranks).nonzero()[:, 0]


def lose_row(mean: Tensor, inputs: EmbeddingGradInputs) -> None:
    mean[touched_rows(inputs, 1)[0]] = 0


def double_row(mean: Tensor, inputs: EmbeddingGradInputs) -> None:
    mean[touched_rows(inputs, 1)[0]] *= 2


def swap_rows(mean: Tensor, inputs: EmbeddingGradInputs) -> None:
    rows = touched_rows(inputs, 1)[:2]
    mean[rows] = mean[rows.flip(0)]


def swap_columns(mean: Tensor, inputs: EmbeddingGradInputs) -> None:
    mean[:, 5:7] = mean[:, 5:7].flip(1)


def lose_column(mean: Tensor, inputs: EmbeddingGradInputs) -> None:
    mean[:, -1] = 0


def scale_column(mean: Tensor, inputs: EmbeddingGradInputs) -> None:
    mean[:, 3] *= 1.03


def scale_row(mean: Tensor, inputs: EmbeddingGradInputs) -> None:
    mean[touched_rows(inputs, 2)[0]] *= 1 + 2**-6


def scale_slice(mean: Tensor, inputs: EmbeddingGradInputs) -> None:
    mean *= 1 + 2**-6


def count_once(mean: Tensor, inputs: EmbeddingGradInputs) -> None:
    """Leave out the second rank's contribution to a row of both."""
    row = touched_rows(inputs, 2)[:1]
    mean[row] -= inputs.gradient_rows(1, row + inputs.bounds[inputs.rank]) / 2


def lose_rank(mean: Tensor, inputs: EmbeddingGradInputs) -> None:
    for row in touched_rows(inputs, 2):
        mean[row] -= inputs.gradient_rows(0, row[None] + inputs.bounds[inputs.rank])[0] / 2


DEFECTS: list[Callable[[Tensor, EmbeddingGradInputs], None]] = [
    lose_row, double_row, swap_rows, swap_columns, lose_column, scale_column, scale_row, scale_slice, count_once,
    lose_rank,
]  # fmt: skip


def verdicts(here: Rank, dtype: str, seed: int) -> dict[str, str | None]:
    """Return why a mean is wrong with each defect of rank 1's slice, with a stale slice, and with none."""
    inputs, comm, exchange = prepared(here, wide(dtype=dtype, seed=seed), "sparse_all_to_all")
    mean = run(exchange, comm).clone()
    found = {"": compare(inputs, mean).wrong}
    for defect in DEFECTS:
        spoiled = mean.clone()
        if here.rank == 1:
            defect(spoiled, inputs)
        found[defect.__name__] = compare(inputs, spoiled).wrong
    inputs.grad.copy_(inputs.with_seed(seed + 1))
    later = run(exchange, comm)
    found["stale"] = compare(inputs, mean if here.rank == 1 else later).wrong
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_defect_of_one_rank_is_wrong_and_named(dtype: str) -> None:
    for seed in LARGE_SEEDS:
        first, second = run_on_ranks(2, verdicts, dtype, seed)
        assert first == second and first.pop("") is None, (seed, first)
        missed = {name: why for name, why in first.items() if not re.search("rank 1: .*of the mean", why or "")}
        assert not missed, (seed, missed)


def found_wrong(here: Rank, seed: int) -> list[str]:
    """Return the problems of a seed whose right results are wrong by the oracle."""
    sizes = {"plain": {}, "narrow": {"width": 1, "table_rows": 601, "tokens": 601, "distribution": "fixed"}}
    found = []
    for fields in (*sizes.values(), {"table_rows": 1, "width": 1}):
        for dtype in DTYPES:
            for name in HERE:
                cell = problem(dtype=dtype, seed=seed, **fields)
                inputs, comm, exchange = prepared(here, cell, name)
                if (wrong := compare(inputs, run(exchange, comm)).wrong) is not None:
                    found.append(f"{name} {cell}: {wrong}")
    return found


def test_right_results_of_any_seed_are_right() -> None:
    for seed in SEEDS:
        for found in run_on_ranks(2, found_wrong, seed):
            assert not found, found
