"""GPUs in simulated time: operations on streams run in the order that events, flags and durations allow.

Queued operations never block the host, so that one process can queue those of all ranks, one rank after the other.
Then `Machine.run` lets time pass. An operation reads and writes at its end: a buffer that is reused too early is read
wrong.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tpbench.comm import symmetric_buffers
from tpbench.comm.symmetric_buffers import StreamSignals

FLAG_SPACE = 1 << 20

Costs = Callable[[str, int], float]
"""Returns the seconds of an operation by its kind and size: multiplications of a product, elements of others."""


@dataclass
class Event:
    """A CUDA event: recorded on the current stream."""

    machine: Machine
    at: float | None = None

    def record(self) -> None:
        self.machine.current.queue.append(Operation(0.0, lambda: self.machine.now, done=self.fire))

    def fire(self, now: float) -> None:
        self.at = now


@dataclass
class Operation:
    seconds: float
    ready: Callable[[], float | None]
    """The earliest time, once that is known."""
    done: Callable[[float], None]


@dataclass
class Stream:
    machine: Machine
    queue: deque[Operation] = field(default_factory=deque)
    free: float = 0.0
    outer: list[Stream] = field(default_factory=list)
    cuda_stream: int = 0

    def __enter__(self) -> None:
        self.outer.append(self.machine.current)
        self.machine.current = self

    def __exit__(self, *_: Any) -> None:
        self.machine.current = self.outer.pop()

    def wait_event(self, event: Event) -> None:
        self.queue.append(Operation(0.0, lambda: event.at, done=lambda _: None))

    def record_event(self) -> Event:
        event = Event(self.machine)
        with self:
            event.record()
        return event

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Machine(TorchFunctionMode):
    """GPUs of one host, and the driver's memory operations.

    While entered, it queues torch's operations on matrices on the current stream.
    """

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self.costs, self.now = costs, 0.0
        self.streams: list[Stream] = []
        self.current = self.stream()
        self.memory: dict[tuple[int, int], Tensor] = {}
        self.flags: dict[int, list[float]] = {}
        """By address, the times at which the values 1, 2, ... were written."""
        self.barriers: dict[int, list[float]] = {}
        """By number, the times at which ranks reached a barrier."""
        self.log: list[tuple[Stream, str]] = []
        """Operations that ran: stream and kind."""

    def stream(self) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    @contextmanager
    def rank(self) -> Iterator[Stream]:
        """Queue a rank's operations on a new stream."""
        self.current = self.stream()
        with self:
            yield self.current

    def buffer(self, number: int, rank: int, nbytes: int) -> Tensor:
        return self.memory.setdefault((number, rank), torch.full((nbytes,), 255, dtype=torch.uint8))

    def owner(self, tensor: Tensor) -> int | None:
        """Return the rank whose symmetric memory holds the tensor, if any."""
        begin = tensor.untyped_storage().data_ptr()
        found = [rank for (_, rank), each in self.memory.items() if each.untyped_storage().data_ptr() == begin]
        return found[0] if found else None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in ("matmul", "__matmul__"):
            left, right = args
            result = left.new_empty(left.shape[0], right.shape[1])
            self.queue("product", left.numel() * right.shape[1], lambda: torch.mm(left, right, out=result))
            return result
        if name in ("mm", "addmm_"):
            left, right = args[-2:]
            self.queue("product", left.numel() * right.shape[1], lambda: function(*args, **kwargs))
            return kwargs.get("out", args[0])
        if name in ("copy_", "add_"):
            into, source = args[:2]
            others = {self.owner(each) for each in (into, source)} - {None, self.issuing}
            kind = "add" if name == "add_" else "transfer" if others else "copy"
            self.queue(kind, into.numel(), lambda: function(*args, **kwargs))
            return into
        return function(*args, **kwargs)

    issuing = 0
    """The rank that queues operations now."""

    def queue(self, kind: str, amount: int, run: Callable[[], Any]) -> None:
        stream, seconds = self.current, self.costs(kind, amount)

        def done(now: float) -> None:
            self.log.append((stream, kind))
            run()

        stream.queue.append(Operation(seconds, lambda: 0.0, done))

    def cuStreamWriteValue32_v2(self, stream: Any, address: Any, value: Any, flags: Any) -> int:
        times, value = self.flags.setdefault(address.value, []), value.value

        def write(now: float) -> None:
            times.append(now)
            assert len(times) == value, "a flag counts up"

        self.current.queue.append(Operation(self.costs("signal", 1), lambda: 0.0, write))
        return 0

    def cuStreamWaitValue32_v2(self, stream: Any, address: Any, value: Any, flags: Any) -> int:
        times, value = self.flags.setdefault(address.value, []), value.value
        ready = lambda: times[value - 1] if len(times) >= value else None  # noqa: E731
        self.current.queue.append(Operation(0.0, ready, done=lambda _: None))
        return 0

    def run(self) -> float:
        """Run all queued operations in the order of their ends, and return the time of the last end."""
        while waiting := [each for each in self.streams if each.queue]:
            ends = []
            for stream in waiting:
                ready = stream.queue[0].ready()
                if ready is not None:
                    ends.append((max(ready, stream.free) + stream.queue[0].seconds, len(ends), stream))
            assert ends, "all streams wait for each other"
            self.now, _, stream = min(ends, key=lambda each: each[:2])
            stream.free = self.now
            stream.queue.popleft().done(self.now)
        return self.now


class Handle:
    """The handle that a rendezvous returns."""

    def __init__(self, machine: Machine, number: int, nbytes: int) -> None:
        self.machine, self.number, self.nbytes = machine, number, nbytes

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        whole = self.machine.buffer(self.number, rank, self.nbytes).view(dtype)
        return whole[offset : offset + torch.Size(shape).numel()].view(shape)


class CapturedSignals(StreamSignals):
    """Signals that are allowed while a graph is captured."""

    def _call(self, name: str, address: int, flags: int) -> None:
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False):
            super()._call(name, address, flags)


class SimulatedBuffers(symmetric_buffers.SymmetricBuffers):
    """Symmetric buffers on a simulated machine."""

    def __init__(self, machine: Machine, rank: int, ranks: int) -> None:
        self.machine, self.rank, self.size = machine, rank, ranks
        nobody: Any = None
        self.group, self.device = nobody, torch.device("cpu")
        self.copies: Any = machine.stream()
        self.memory, self.outgrown, self.uses, self.allocations, self.capturing = {}, [], Counter(), 0, False
        addresses = [FLAG_SPACE * (1 + each) for each in range(ranks)]
        self.signals, self.captured_signals = StreamSignals(addresses, rank), CapturedSignals(addresses, rank)
        self.barriers = 0

    def barrier(self) -> None:
        reached = self.machine.barriers.setdefault(self.barriers, [])
        self.barriers += 1
        queue = self.machine.current.queue
        queue.append(Operation(0.0, lambda: 0.0, done=reached.append))
        queue.append(Operation(0.0, lambda: max(reached) if len(reached) == self.size else None, done=lambda _: None))

    def _allocated(self, nbytes: int) -> tuple[Tensor, Any]:
        self.allocations += 1
        mine = self.machine.buffer(self.allocations, self.rank, nbytes)
        return mine, Handle(self.machine, self.allocations, nbytes)


@pytest.fixture
def on_streams(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], None]:
    """Return a function that replaces torch.cuda's streams and the driver by a simulated machine."""

    def install(machine: Machine) -> None:
        fakes: dict[str, Any] = {
            "stream": lambda it: it,
            "current_stream": lambda: machine.current,
            "Event": lambda: Event(machine),
            "is_current_stream_capturing": lambda: False,
        }
        for name, value in fakes.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(symmetric_buffers, "cuda_driver", lambda: machine)

    return install
