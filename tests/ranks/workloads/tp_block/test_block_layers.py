"""The layers alone, as a training code uses them: weights, outputs, gradients and wrong sizes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tpbench.workloads.tp_block.execution.layers import ColumnParallelLinear, RMSNorm, RowParallelLinear, random_weight
from tpbench.workloads.tp_block.problem import ShardedLinear

pytestmark = pytest.mark.skipif(not enough_gpus(4), reason="needs 4 GPUs, or none")


def sequence() -> Tensor:
    """Rows of a batch of three sequences."""
    return torch.randn(16, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def scale() -> Tensor:
    return torch.linspace(0.5, 1.5, 6, dtype=torch.float64)


def through_layers(here: Rank, use_overlap: bool) -> list[Tensor]:
    """Return y = down(relu(up(norm(x)))) of layers without a group, and the gradients of x and all weights."""
    options: dict[str, Any] = {"use_overlap": use_overlap, "dtype": torch.float64, "device": here.device}
    norm = RMSNorm(scale().to(here.device))
    up, down = ColumnParallelLinear(6, 12, seed=1, **options), RowParallelLinear(12, 6, seed=2, **options)
    x = sequence().chunk(here.world_size)[here.rank].to(here.device).requires_grad_()
    y = down(torch.relu(up(norm(x))))
    (y.square().sum() + y.sum()).backward()  # the gradient of the sum is an expanded view, no contiguous matrix
    return [y, *(weight.grad for weight in (x, norm.weight, up.weight, down.weight) if weight.grad is not None)]


@pytest.mark.parametrize("use_overlap", [False, True])
def test_layers_without_a_group_use_the_world(use_overlap: bool) -> None:
    linears = ShardedLinear("up", "column", 6, (12,)), ShardedLinear("down", "row", 12, (6,))
    up, down = (random_weight(linear, seed, torch.float64).requires_grad_() for seed, linear in enumerate(linears, 1))
    x, weight = sequence().requires_grad_(), scale().requires_grad_()
    y = torch.relu(nn.functional.rms_norm(x, (6,), weight, 1e-5) @ up.T) @ down.T
    (y.square().sum() + y.sum()).backward()
    assert x.grad is not None and up.grad is not None and down.grad is not None
    for rank, (rows, of_x, of_norm, *of_weights) in enumerate(run_on_ranks(2, through_layers, use_overlap)):
        torch.testing.assert_close((rows, of_x), (y.chunk(2)[rank], x.grad.chunk(2)[rank]))
        torch.testing.assert_close(of_norm, weight.grad)
        for linear, part, whole in zip(linears, of_weights, (up.grad, down.grad), strict=True):
            torch.testing.assert_close(part, linear.shard(whole, rank, 2))


def saved_bytes(here: Rank, save_gathered: bool) -> int:
    """Return the bytes that a column-parallel linear saves for its backward pass beside its weight."""
    layer = ColumnParallelLinear(6, 8, here.group, save_gathered=save_gathered, device=here.device)
    sizes = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() != layer.weight.data_ptr():
            sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(torch.ones(10, 6, device=here.device))
    return sum(sizes.values())


def test_without_save_gathered_a_rank_keeps_only_its_own_rows() -> None:
    assert run_on_ranks(4, saved_bytes, True) == [4 * 10 * 6 * 4] * 4
    assert run_on_ranks(4, saved_bytes, False) == [10 * 6 * 4] * 4


def refuse_wrong_sizes(here: Rank) -> None:
    """Check that each size that two ranks cannot share is named."""
    attempts: dict[str, Callable[[], Any]] = {
        "5 features": lambda: ColumnParallelLinear(6, (8, 5), here.group),
        "7 features": lambda: RowParallelLinear(7, 4, here.group),
        "3 rows": lambda: RowParallelLinear(8, 4, here.group)(torch.zeros(3, 4)),
        "6 rows .* by 4": lambda: RowParallelLinear(8, 4, here.group, use_overlap=True)(torch.zeros(6, 4)),
        r"\(4, 6\), it is \(8, 6\)": lambda: ColumnParallelLinear(6, 8, here.group, weight=torch.zeros(8, 6)),
    }
    for sizes, attempt in attempts.items():
        with pytest.raises(ValueError, match=sizes):
            attempt()


def test_wrong_sizes_are_refused() -> None:
    run_on_ranks(2, refuse_wrong_sizes)
