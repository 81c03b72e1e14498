"""The kernel between two linears against torch's formulas, with plain tensors of one process as the ranks' memory."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tpbench.workloads.tp_block.execution.junction import join_rows

EPS = 1e-5
ROWS = 3
"""Rows of each rank."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES = [
    (ranks, width, dtype)
    for ranks in (1, 2, 3)
    for width, dtype in ((24, torch.float64), (37, torch.float32), (128, torch.bfloat16))
]


def draw(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def assert_close(got: Tensor, right: Tensor) -> None:
    """Compare with a result in float64, which a correct one rounds once."""
    error = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.0**-7}[got.dtype]
    torch.testing.assert_close(got.double(), right, rtol=error, atol=error)


def tensors_of(rank: int, *lists: list[Tensor]) -> list[list[Tensor]]:
    """Return a rank's rows of the tensors of each list."""
    return [[tensor[ROWS * rank : ROWS * (rank + 1)] for tensor in tensors] for tensors in lists]


def shared(ranks: int, width: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return every rank's product, and its memory for the gathered rows."""
    parts = [draw(rank, ranks * ROWS, width, dtype=dtype) for rank in range(ranks)]
    return parts, [torch.full_like(part, torch.nan) for part in parts]


@pytest.mark.parametrize(("ranks", "width", "dtype"), CASES)
def test_every_rank_gets_every_row_normalised(ranks: int, width: int, dtype: torch.dtype) -> None:
    parts, gathered = shared(ranks, width, dtype)
    residual, weight = draw(10, ranks * ROWS, width, dtype=dtype), draw(11, width, dtype=dtype)
    shards = (tensors_of(rank, parts, gathered, [residual]) for rank in range(ranks))
    summed = torch.cat([join_rows(mine, places, own, weight, EPS)[0] for mine, places, (own,) in shards])
    assert_close(summed, residual.double() + sum(part.double() for part in parts))
    expected = functional.rms_norm(summed.double(), (width,), weight.double(), EPS)
    for whole in gathered:
        assert_close(whole, expected)
        assert torch.equal(whole, gathered[0])


@pytest.mark.parametrize("programs", [1, 2, 528])
@pytest.mark.parametrize(("ranks", "width", "dtype"), CASES)
def test_every_rank_gets_the_gradient_of_every_row(ranks: int, width: int, dtype: torch.dtype, programs: int) -> None:
    parts, gathered = shared(ranks, width, dtype)
    summed, upstream = (draw(10 + number, ranks * ROWS, width, dtype=dtype) for number in range(2))
    weight = draw(12, width, dtype=dtype)
    shards = (tensors_of(rank, parts, gathered, [summed, upstream]) for rank in range(ranks))
    found = [join_rows(mine, places, own, weight, EPS, above, programs) for mine, places, (own, above) in shards]
    of_sum, of_weight = zip(*found, strict=True)
    x, scale = summed.double().requires_grad_(), weight.double().requires_grad_()
    normed = functional.rms_norm(x, (width,), scale, EPS)
    torch.autograd.backward((normed, x), (sum(part.double() for part in parts), upstream.double()))
    assert x.grad is not None and scale.grad is not None
    assert_close(torch.cat(of_sum), x.grad)
    assert_close(sum(each.double() for each in of_weight if each is not None).to(dtype), scale.grad)
    for whole in gathered:
        assert torch.equal(whole, torch.cat(of_sum))
