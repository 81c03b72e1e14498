"""Buffers in NCCL's windows: who gets which, and that the collectives use them."""

import contextlib
from collections import defaultdict
from typing import Any

import pytest
import torch

from tests.support.ranks import Rank, run_on_ranks
from tpbench.comm.collectives import Windows, algorithm_in, windows_of
from tpbench.comm.parallel_linears import SequentialSchedule, row_parallel


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Windows:
    return on_cpu(monkeypatch)


def on_cpu(patch: pytest.MonkeyPatch) -> Windows:
    """Windows whose buffers are ordinary memory of the CPU."""
    patch.setattr(torch.cuda, "use_mem_pool", lambda pool: contextlib.nullcontext())
    windows = object.__new__(Windows)
    windows.device, windows.pool, windows.gib = torch.device("cpu"), None, 0.0
    windows.buffers = defaultdict(list)
    return windows


def test_a_buffer_is_used_again_when_no_tensor_refers_to_it(windows: Windows) -> None:
    first = windows.new_empty((3, 4), dtype=torch.float32)
    rows = first[1:]
    second = windows.new_empty((5,), dtype=torch.bfloat16)
    places = [first.data_ptr(), second.data_ptr()]
    assert len(set(places)) == 2 and windows.gib == 2 * 10 * 2**20 / 2**30
    assert first.is_contiguous() and not first._is_view()
    del first
    assert windows.new_empty((12,), dtype=torch.float32).data_ptr() not in places, "its rows are still in use"
    del rows
    assert windows.new_empty((2, 2), dtype=torch.float64).data_ptr() == places[0]


def results(here: Rank) -> list[torch.Tensor]:
    """Results and gradients of a row-parallel product under the plain schedule, without windows and with them."""
    found: list[torch.Tensor] = []
    for on_windows in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if on_windows:
                patch.setitem(windows_of, here.group, on_cpu(patch))
            generator = torch.Generator().manual_seed(here.rank)
            x, weight = (torch.randn(8, 6, generator=generator).requires_grad_() for _ in range(2))
            schedule: Any = SequentialSchedule(here.group)
            row_parallel(x, weight, schedule).square().sum().backward()
            assert x.grad is not None and weight.grad is not None
            found += [x.grad, weight.grad]
            assert (getattr(schedule, "memory", None) is not None) == on_windows
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="its windows are on the CPU")
def test_collectives_on_windows_give_the_same_results() -> None:
    for plain_x, plain_weight, x, weight in run_on_ranks(2, results):
        torch.testing.assert_close((x, weight), (plain_x, plain_weight), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("text", "algorithm"),
    [
        ("_ncclDevKernel_AllGather_RING_LL24ncclDev", "AllGather_RING"),
        ("_ncclSymkDevKernel_AllGather_LL24ncclSymk", "symmetric AllGather_LL"),
        ("BATCH_MEM_OP", "copy engine"),
        ("", "unknown"),
    ],
)
def test_the_algorithm_of_an_all_gather_is_read_from_its_graph(text: str, algorithm: str) -> None:
    assert algorithm_in(text) == algorithm
