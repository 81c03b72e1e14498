"""Buffers in NCCL's windows: who gets which, and that the collectives use them."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.ranks import Rank, run_on_ranks
from tpbench.comm.collectives import Windows, nccl_algorithm, windows_of
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


def algorithms(here: Rank) -> list[str]:
    """Return what is read from graphs with these texts, after a failed capture, and without memory on rank 1."""
    zeros, empty = torch.zeros, torch.empty
    found = []
    texts = "_ncclDevKernel_AllGather_RING_LL24ncclDev", "_ncclSymkDevKernel_AllGather_LL24ncclSymk", "BATCH_MEM_OP"
    for text in (*texts, "fails", "full"):

        def empty_here(*sizes: Any, case: str = text, **options: Any) -> torch.Tensor:
            if (case, here.rank, options.get("device")) == ("full", 1, "cuda"):
                raise torch.OutOfMemoryError
            return empty(*sizes, **{**options, "device": "cpu"})

        @contextlib.contextmanager
        def graph(*_: Any, case: str = text, **__: Any) -> Iterator[None]:
            yield
            if (case, here.rank) == ("fails", 1):
                raise RuntimeError("operation not permitted when stream is capturing")

        with pytest.MonkeyPatch.context() as patch:
            captured = mock.Mock(debug_dump=lambda name, case=text: Path(name).write_text(case))
            patch.setattr(torch, "zeros", lambda *sizes, **options: zeros(*sizes, **{**options, "device": "cpu"}))
            patch.setattr(torch, "empty", empty_here)
            fakes = {"CUDAGraph": mock.Mock(return_value=captured), "graph": graph, "current_stream": lambda: None}
            for name, fake in {**fakes, "stream": contextlib.nullcontext}.items():
                patch.setattr(torch.cuda, name, fake)
            found.append(nccl_algorithm((2, 4), torch.float32, here.group))
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="its graphs are texts")
def test_the_algorithm_is_named_or_unknown_and_no_rank_is_left_waiting() -> None:
    named = ["AllGather_RING", "symmetric AllGather_LL", "copy engine"]
    assert run_on_ranks(2, algorithms) == [[*named, "unknown", "unknown"]] * 2
