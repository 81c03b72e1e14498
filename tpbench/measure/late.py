"""The cost of a late rank for the others: their own time, and that of work on another stream of their GPUs.

The last rank starts each iteration some time after the others. Those have to wait for it. An exchange inside a kernel
keeps the multiprocessors while it waits, an exchange between kernels leaves them to other streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch

from tpbench.measure.clock import ITERATIONS, Clock, do_nothing
from tpbench.measure.ranks import gather_numbers
from tpbench.measure.session import LATE_MS, Context, Session

PRODUCTS, SIZE = 3, 4096
"""Products of square bf16 matrices on the other stream, and their size."""
CALIBRATION_CYCLES = 10_000_000


def late_columns(step: Callable[[], None], session: Session, clock: Clock, context: Context) -> dict[str, Any]:
    """Return the columns `late_ms` and, on GPUs, `beside_ms` and `beside_alone_ms`. Collective.

    `step`: what the clocks time of the session. `clock`: lines the ranks up before each iteration.
    """
    device, iterations = context.device, ITERATIONS[context.device.type]
    delay, products = _Durations(device), _Durations(device)
    is_late = context.rank == context.world_size - 1
    wait = _waiting(device)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    matrices = torch.randn(3, SIZE, SIZE, device=device, dtype=torch.bfloat16) if stream else torch.empty(0)

    def late_step(delay_ms: float) -> None:
        with delay.timed():
            wait(delay_ms if is_late else 0.0)
        step()

    def beside(run: Callable[[], None]) -> None:
        """Run products on the other stream of the ranks that are not late, from the same moment on."""
        if stream is None or is_late:
            run()
            return
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), products.timed():
            for _ in range(PRODUCTS):
                torch.mm(matrices[0], matrices[1], out=matrices[2])
        run()
        torch.cuda.current_stream(device).wait_stream(stream)

    def others_ms(of_rank: Sequence[float]) -> list[float]:
        """Return the slowest time of the ranks that are not late, for each iteration."""
        return [float(ranks[:-1].max()) for ranks in gather_numbers(of_rank, context)]

    late_ms, beside_ms = [], []
    for delay_ms in LATE_MS:
        times = others_ms(clock.samples(partial(late_step, delay_ms), session.restore, iterations))
        delays = [ranks[-1] for ranks in gather_numbers(delay.last_ms(iterations), context)]
        late_ms.append(median(own - waited for own, waited in zip(times, delays, strict=True)))
        if stream is not None:
            clock.samples(partial(beside, partial(late_step, delay_ms)), session.restore, iterations)
            beside_ms.append(median(others_ms(products.last_ms(iterations))))
    if stream is None:
        return {"late_ms": late_ms}
    clock.samples(partial(beside, do_nothing), do_nothing, iterations)
    return {
        "late_ms": late_ms,
        "beside_ms": beside_ms,
        "beside_alone_ms": median(others_ms(products.last_ms(iterations))),
    }


class _Durations:
    """Durations of something that happens in each iteration: on GPUs by events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[Any, Any]] = []

    @contextmanager
    def timed(self) -> Iterator[None]:
        begin = self._mark()
        yield
        self.marks.append((begin, self._mark()))

    def last_ms(self, count: int) -> list[float]:
        """Return the last `count` durations, or zeros if nothing happened on this rank."""
        marks = self.marks[-count:]
        if not marks:
            return [0.0] * count
        if self.device.type == "cpu":
            return [(end - begin) * 1e3 for begin, end in marks]
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) for begin, end in marks]

    def _mark(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _waiting(device: torch.device) -> Callable[[float], None]:
    """Return a function that delays this rank by some milliseconds: on a GPU its current stream, without the host."""
    if device.type == "cpu":
        return lambda delay_ms: time.sleep(delay_ms / 1e3)
    duration = _Durations(device)
    for _ in range(2):  # the first launch is slow
        with duration.timed():
            torch.cuda._sleep(CALIBRATION_CYCLES)
    cycles_per_ms = CALIBRATION_CYCLES / duration.last_ms(1)[0]
    return lambda delay_ms: torch.cuda._sleep(int(delay_ms * cycles_per_ms))
