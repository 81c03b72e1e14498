"""The copy engine's schedule without GPUs: ranks are threads that share memory, streams run in the order of issue.

That shows the addresses, the order of signals, the alternating buffers and the sums; what overlaps shows on GPUs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tpbench.workloads import arena
from tpbench.workloads.signals import StreamSignals
from tpbench.workloads.tp_block import operations
from tpbench.workloads.tp_block.copy_engine import CopyEngine, peer_runs

FLAG_SPACE = 1 << 20
PATIENCE_S = 20.0


class Machine:
    """Memory that all ranks map, and a driver whose waits block the thread."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.lock, self.changed = ranks, threading.Lock(), threading.Condition()
        self.memory: dict[tuple[int, int], Tensor] = {}
        self.flags: dict[int, int] = {}
        self.waited = 0

    def buffer(self, number: int, rank: int, nbytes: int) -> Tensor:
        with self.lock:
            return self.memory.setdefault((number, rank), torch.full((nbytes,), 255, dtype=torch.uint8))

    def cuStreamWriteValue32_v2(self, stream: Any, address: Any, value: Any, flags: Any) -> int:
        with self.changed:
            assert value.value == self.flags.get(address.value, 0) + 1, "a flag counts up"
            self.flags[address.value] = value.value
            self.changed.notify_all()
        return 0

    def cuStreamWaitValue32_v2(self, stream: Any, address: Any, value: Any, flags: Any) -> int:
        with self.changed:
            self.waited += self.flags.get(address.value, 0) < value.value
            arrived = self.changed.wait_for(lambda: self.flags.get(address.value, 0) >= value.value, PATIENCE_S)
        return 0 if arrived else 1


class Handle:
    """What a rendezvous gives."""

    def __init__(self, machine: Machine, number: int, nbytes: int) -> None:
        self.machine, self.number, self.nbytes = machine, number, nbytes

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        whole = self.machine.buffer(self.number, rank, self.nbytes).view(dtype)
        return whole[offset : offset + torch.Size(shape).numel()].view(shape)


class SharedArena(arena.Arena):
    """An arena on that machine."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self.machine, self.rank, self.size = machine, rank, machine.ranks
        nobody: Any = None
        self.group, self.device = nobody, torch.device("cpu")
        self.copies = Stream()
        self.memory, self.outgrown, self.uses, self.made = {}, [], {}, 0
        begins = [FLAG_SPACE * (1 + each) for each in range(self.size)]
        self.signals = StreamSignals(begins, rank, machine)

    def _allocated(self, nbytes: int) -> tuple[Tensor, Any]:
        self.made += 1
        mine = self.machine.buffer(self.made, self.rank, nbytes)
        return mine, Handle(self.machine, self.made, nbytes)


class Stream:
    """Work is done when it is issued: there is nothing to wait for."""

    cuda_stream = 0

    def __enter__(self) -> None: ...
    def __exit__(self, *_: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record(self) -> None: ...
    def record_event(self) -> Any: ...


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes: dict[str, Any] = {"stream": lambda it: it, "current_stream": Stream, "Event": Stream}
    for name, value in (fakes | {"is_current_stream_capturing": lambda: False}).items():
        monkeypatch.setattr(torch.cuda, name, value)


def on_all(ranks: int, work: Callable[[CopyEngine], Any], merged: bool) -> tuple[list[Any], Machine]:
    """What each rank's thread returns."""
    machine = Machine(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        engines = [CopyEngine(SharedArena(machine, rank), merged=merged) for rank in range(ranks)]
        return list(pool.map(work, engines)), machine


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_many_operations_in_a_row_are_right(ranks: int, merged: bool) -> None:
    """Of changing sizes, so that buffers alternate, are taken again, and grow."""

    def numbers(rank: int, turn: int, rows: int, columns: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * turn + rank)
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    def work(engine: CopyEngine) -> None:
        for turn in range(8):
            rows, k, n = ((2, 3, 5), (4, 6, 2), (1, 2, 3))[turn % 3]
            shards = [numbers(rank, turn, rows, k) for rank in range(ranks)]
            weight = numbers(engine.rank, turn + 50, n, k)
            whole, product = operations.column_forward(engine, shards[engine.rank], weight)
            assert torch.equal(whole, torch.cat(shards))
            torch.testing.assert_close(product, torch.cat(shards) @ weight.t())
            grads = [numbers(rank, turn + 20, rows * ranks, n) for rank in range(ranks)]
            weights = [numbers(rank, turn + 50, n, k) for rank in range(ranks)]
            kept = (torch.cat(shards), shards[engine.rank])[turn % 2]
            grad_x, grad_w = operations.column_backward(
                engine, grads[engine.rank], weight, kept, gathered=turn % 2 == 0
            )
            total = sum(grad @ each for grad, each in zip(grads, weights, strict=True))
            torch.testing.assert_close(grad_x, torch.as_tensor(total).chunk(ranks)[engine.rank])
            torch.testing.assert_close(grad_w, grads[engine.rank].t() @ torch.cat(shards))

    _, machine = on_all(ranks, work, merged)
    assert machine.waited  # ranks did meet


def test_parts_are_added_in_the_order_of_ranks() -> None:
    """1 + 2^60 - 2^60 in fp32 is 0 from the left and 1 from the right: all ranks have the sum from the left."""
    values = torch.tensor([1.0, 2.0**60, -(2.0**60)])

    def work(engine: CopyEngine) -> Tensor:
        return engine.matmul_scatter(values[engine.rank].expand(3, 1).contiguous(), torch.ones(1, 4))()

    for result in on_all(3, work, merged=False)[0]:
        assert torch.equal(result, torch.zeros(1, 4))


def test_a_signal_that_never_comes_is_an_error_here() -> None:
    machine = Machine(2)
    signals = StreamSignals([FLAG_SPACE, 2 * FLAG_SPACE], 0, machine)
    signals.send(3, 1)
    assert machine.flags == {2 * FLAG_SPACE + 4 * (3 * 2 + 0): 1}
    machine.cuStreamWaitValue32_v2 = lambda *_: 700  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="cuStreamWaitValue32_v2 failed with CUDA error 700"):
        signals.wait(0, 1)


def test_multicast_is_refused_before_memory_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    nobody: Any = None
    with pytest.raises(RuntimeError, match="symmetric memory needs TORCH_SYMM_MEM_DISABLE_MULTICAST=1, it is 0"):
        arena.enabled(nobody)


@pytest.mark.parametrize(
    ("rank", "single", "merged"),
    [(0, [1, 2, 3], [[1, 2, 3]]), (1, [2, 3, 0], [[2, 3], [0]]), (3, [0, 1, 2], [[0, 1, 2]])],
)
def test_peers_follow_the_own_rank(rank: int, single: list[int], merged: list[list[int]]) -> None:
    assert [list(run) for run in peer_runs(rank, 4, merged=False)] == [[each] for each in single]
    assert [list(run) for run in peer_runs(rank, 4, merged=True)] == merged
