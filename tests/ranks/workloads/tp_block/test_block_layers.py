"""The layers alone, as a training code uses them: weights, gradients, a training loop and invalid options."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.tp_block import context, forward, problem, unshard
from tpbench.workloads.tp_block.execution.layers import (
    ColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    build,
    plan_for,
    random_weight,
)
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.problem import ShardedLinear

pytestmark = pytest.mark.skipif(not enough_gpus(4), reason="needs 4 GPUs, or none")

STEPS, RATE = 5, 0.5


def weights_of(here: Rank, use_overlap: bool) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {"use_overlap": use_overlap, "seed": 11, "dtype": torch.bfloat16, "device": here.device}
    column = ColumnParallelLinear(6, (8, 4, 4), here.group, **options)
    row = RowParallelLinear(12, 5, here.group, **options)
    return column.weight, row.weight


@pytest.mark.parametrize("use_overlap", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_are_the_full_weight_bit_for_bit(ranks: int, use_overlap: bool) -> None:
    columns, rows = zip(*run_on_ranks(ranks, weights_of, use_overlap), strict=True)
    column, row = ShardedLinear("column", "column", 6, (8, 4, 4)), ShardedLinear("row", "row", 12, (5,))
    assert torch.equal(unshard(column, columns), random_weight(column, 11, torch.bfloat16))
    assert torch.equal(unshard(row, rows), random_weight(row, 11, torch.bfloat16))
    assert not torch.equal(random_weight(row, 11), random_weight(row, 12))


def through_layers(here: Rank, use_overlap: bool) -> Tensor:
    """Return this rank's rows of down(relu(up(x))), for x (rows, batch, features)."""
    options: dict[str, Any] = {"use_overlap": use_overlap, "dtype": torch.float64, "device": here.device}
    up = ColumnParallelLinear(6, 12, here.group, seed=1, **options)
    down = RowParallelLinear(12, 6, here.group, seed=2, **options)
    y: Tensor = down(torch.relu(up(sequence().chunk(here.world_size)[here.rank].to(here.device))))
    y.sum().backward()  # the gradient is an expanded view, no contiguous matrix
    assert up.weight.grad is not None and up.weight.grad.count_nonzero()
    return y


def sequence() -> Tensor:
    return torch.randn(16, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("use_overlap", [False, True])
def test_layers_take_a_batch_of_sequences(use_overlap: bool) -> None:
    up = random_weight(ShardedLinear("up", "column", 6, (12,)), 1, torch.float64)
    down = random_weight(ShardedLinear("down", "row", 12, (6,)), 2, torch.float64)
    expected = torch.relu(sequence() @ up.T) @ down.T
    found = torch.cat(run_on_ranks(2, through_layers, use_overlap))
    torch.testing.assert_close(found, expected)


def gradients_by_default(here: Rank) -> list[Tensor]:
    """Return the gradients of down(relu(up(norm(x)))) in layers without a group, on this rank."""
    options: dict[str, Any] = {"dtype": torch.float64, "device": here.device}
    norm = RMSNorm(scale().to(here.device))
    up, down = ColumnParallelLinear(6, 12, seed=1, **options), RowParallelLinear(12, 6, seed=2, **options)
    x = sequence().chunk(here.world_size)[here.rank].to(here.device).requires_grad_()
    down(torch.relu(up(norm(x)))).square().sum().backward()
    return [each.grad for each in (x, norm.weight, up.weight, down.weight) if each.grad is not None]


def scale() -> Tensor:
    return torch.linspace(0.5, 1.5, 6, dtype=torch.float64)


def test_layers_without_a_group_use_the_world() -> None:
    linears = ShardedLinear("up", "column", 6, (12,)), ShardedLinear("down", "row", 12, (6,))
    up, down = (random_weight(each, seed, torch.float64).requires_grad_() for seed, each in enumerate(linears, 1))
    x, weight = sequence().requires_grad_(), scale().requires_grad_()
    y = torch.relu(nn.functional.rms_norm(x, (6,), weight, 1e-5) @ up.T) @ down.T
    y.square().sum().backward()
    assert x.grad is not None and up.grad is not None and down.grad is not None
    for rank, (mine, of_norm, *of_weights) in enumerate(run_on_ranks(2, gradients_by_default)):
        torch.testing.assert_close(mine, x.grad.chunk(2)[rank])
        torch.testing.assert_close(of_norm, weight.grad)
        for linear, found, whole in zip(linears, of_weights, (up.grad, down.grad), strict=True):
            torch.testing.assert_close(found, linear.shard(whole, rank, 2))


def trained(here: Rank, use_overlap: bool) -> list[tuple[float, float]]:
    """Return the loss and gradient norm of each step of gradient descent on a mean squared error."""
    cell = problem()
    inputs = BlockInputs(cell, context(here))
    rank, size = here.rank, here.world_size
    plan = plan_for(here.group, use_overlap)
    block = build(cell, inputs.weights, lambda linear: plan)
    x, target = inputs.x(rank, size), inputs.grad(rank, size)
    found = []
    for _ in range(STEPS):
        loss = (block(x) - target).square().sum() / (cell.tokens * cell.hidden)
        loss.backward()
        norms = {f"{name}.weight" for name in cell.norms}
        square = sum(
            parameter.grad.square().sum() / (size if name in norms else 1)  # norms are whole on every rank
            for name, parameter in block.named_parameters()
            if parameter.grad is not None
        )
        sums = torch.stack([loss.detach(), torch.as_tensor(square)])
        dist.all_reduce(sums, group=here.group)
        found.append((float(sums[0]), float(sums[1].sqrt())))
        descend(dict(block.named_parameters()))
    return found


def descend(parameters: dict[str, nn.Parameter] | dict[str, Tensor]) -> None:
    with torch.no_grad():
        for parameter in parameters.values():
            assert parameter.grad is not None
            parameter -= RATE * parameter.grad
            parameter.grad = None


@functools.cache
def trained_alone() -> list[tuple[float, float]]:
    cell = problem()
    inputs = BlockInputs(cell, context())
    weights = {name: each.requires_grad_() for name, each in inputs.weights_of(0, 1).items()}
    found = []
    for _ in range(STEPS):
        loss = (forward(cell, weights, inputs.x(0, 1)) - inputs.grad(0, 1)).square().mean()
        loss.backward()
        norm = (
            torch.stack([each.grad.square().sum() for each in weights.values() if each.grad is not None]).sum().sqrt()
        )
        found.append((float(loss.detach()), float(norm)))
        descend(weights)
    return found


@pytest.mark.parametrize("use_overlap", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_training_follows_one_process(ranks: int, use_overlap: bool) -> None:
    expected = trained_alone()
    assert expected[-1][0] < expected[0][0] and min(norm for _, norm in expected) > 1e-3
    for found in run_on_ranks(ranks, trained, use_overlap):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=0.0)


def saved_bytes(here: Rank, save_gathered: bool) -> int:
    """Return the bytes that a column-parallel linear saves for its backward pass beside its weight."""
    layer = ColumnParallelLinear(6, 8, here.group, save_gathered=save_gathered, device=here.device)
    sizes = {}

    def note(tensor: Tensor) -> Tensor:
        sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(torch.zeros(10, 6, device=here.device))
    return sum(sizes.values()) - layer.weight.nbytes


def test_gathering_again_keeps_only_the_own_rows() -> None:
    assert run_on_ranks(4, saved_bytes, True) == [4 * 10 * 6 * 4] * 4
    assert run_on_ranks(4, saved_bytes, False) == [10 * 6 * 4] * 4


def complaints(attempts: list[Callable[[], Any]]) -> list[str]:
    """Return the messages of the attempts that raise a ValueError."""
    messages = []
    for attempt in attempts:
        try:
            attempt()
        except ValueError as error:
            messages.append(str(error))
    return messages


def refused(here: Rank) -> list[str]:
    attempts: list[Callable[[], Any]] = [
        lambda: ColumnParallelLinear(6, (8, 5), here.group),
        lambda: RowParallelLinear(7, 4, here.group),
        lambda: RowParallelLinear(8, 4, here.group)(torch.zeros(3, 4)),
        lambda: RowParallelLinear(8, 4, here.group, use_overlap=True)(torch.zeros(6, 4)),
        lambda: ColumnParallelLinear(6, 8, here.group, use_overlap=True)(torch.zeros(3, 6)),
        lambda: ColumnParallelLinear(6, 8, here.group, weight=torch.zeros(8, 6)),
    ]
    return complaints(attempts)


def test_sizes_that_do_not_divide_are_refused() -> None:
    assert run_on_ranks(2, refused)[0] == [
        "5 features cannot be shared equally by 2 ranks",
        "7 features cannot be shared equally by 2 ranks",
        "3 rows cannot be shared equally by 2 ranks",
        "6 rows must be divisible by 4, the square of the ranks, to overlap",
        "6 gathered rows must be divisible by 4 to overlap in the backward pass",
        "a rank's weight must be (4, 6), it is (8, 6)",
    ]


def given(here: Rank) -> list[Any]:
    """Return dtypes and devices of given weights, and the messages about options beside their replacements."""
    plan = plan_for(here.group, False)
    column, row = torch.ones(6, 6, dtype=torch.float32), torch.ones(6, 6, dtype=torch.float32)
    made = [
        ColumnParallelLinear(6, 12, weight=column, dtype=torch.float64, device=torch.device("meta")).weight,
        RowParallelLinear(12, 6, weight=row, dtype=torch.float64, device=torch.device("meta")).weight,
        ColumnParallelLinear(6, 12, weight=column).weight,
    ]
    found: list[Any] = [(each.dtype, each.device.type) for each in made]
    attempts: list[Callable[[], Any]] = [
        lambda: ColumnParallelLinear(6, 12, weight=column, seed=0),
        lambda: ColumnParallelLinear(6, 12, plan=plan, use_overlap=True),
        lambda: ColumnParallelLinear(6, 12, here.group, plan=plan),
        lambda: RowParallelLinear(12, 6, weight=row, seed=0),
        lambda: RowParallelLinear(12, 6, plan=plan, use_overlap=True),
        lambda: RowParallelLinear(12, 6, here.group, plan=plan),
        lambda: RMSNorm(torch.ones(6), here.group, summed=False),
    ]
    return found + [said.partition(":")[0] for said in complaints(attempts)]


def test_no_option_is_ignored() -> None:
    refused = ["seed and weight", "use_overlap and plan", "group and plan"]
    assert run_on_ranks(2, given)[0] == [
        (torch.float64, "meta"),
        (torch.float64, "meta"),
        (torch.float32, "cpu"),
        *refused,
        *refused,
        "group and summed=False",
    ]


def few_rows(here: Rank) -> list[int]:
    """Use one row of each of two sequences on a rank: p^2 divides the gathered rows of both, not those of one."""
    layer = ColumnParallelLinear(6, 8, here.group, use_overlap=True, device=here.device)
    x = torch.ones(1, 2, 6, device=here.device, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert x.grad is not None and x.grad.count_nonzero()
    return list(y.shape)


def test_rows_of_a_batch_are_counted_together() -> None:
    assert run_on_ranks(2, few_rows) == [[2, 2, 4]] * 2
