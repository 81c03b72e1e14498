"""The cost of a late rank for the others: their own time, and that of work on another stream of their GPUs.

An exchange inside a kernel keeps the multiprocessors while it waits, one between kernels leaves them to other streams.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from tpbench.measure.clocks import LATE_MS
from tpbench.measure.ranks import gather_numbers
from tpbench.measure.session import Context, Session
from tpbench.measure.timers import ITERATIONS, SLEEP_CYCLES_PER_S, Timer, do_nothing, mark, ms_between

PRODUCTS, SIZE = 3, 4096
"""Products of square bf16 matrices on the other stream, and their size."""


def late_columns(step: Callable[[], None], session: Session, timer: Timer, context: Context) -> dict[str, Any]:
    """Return the columns `late_ms` and, on GPUs, `beside_ms` and `beside_alone_ms`. Collective."""
    device, iterations = context.device, ITERATIONS[context.device.type]
    is_late = context.rank == context.world_size - 1
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    matrices = torch.randn(3, SIZE, SIZE, device=device, dtype=torch.bfloat16) if stream else torch.empty(0)
    delays: list[tuple[Any, Any]] = []
    products: list[tuple[Any, Any]] = []

    def late_step(delay_ms: float) -> None:
        begin = mark(device)
        if is_late and stream is None:
            time.sleep(delay_ms / 1e3)
        elif is_late:
            torch.cuda._sleep(int(delay_ms / 1e3 * SLEEP_CYCLES_PER_S))
        delays.append((begin, mark(device)))
        step()

    def beside(run: Callable[[], None]) -> None:
        """Run products on the other stream of the ranks that are not late, from the same moment on."""
        if stream is None or is_late:
            run()
            return
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            begin = mark(device)
            for _ in range(PRODUCTS):
                torch.mm(matrices[0], matrices[1], out=matrices[2])
            products.append((begin, mark(device)))
        run()
        torch.cuda.current_stream(device).wait_stream(stream)

    def others_ms(of_rank: Sequence[float]) -> list[float]:
        return [float(ranks[:-1].max()) for ranks in gather_numbers(of_rank, context)]

    def last_ms(marks: Sequence[tuple[Any, Any]]) -> list[float]:
        """Return the durations of the timed iterations, or zeros if this rank has none."""
        return [ms_between(*pair) for pair in marks[-iterations:]] or [0.0] * iterations

    late_ms, beside_ms = [], []
    for delay_ms in LATE_MS:
        times = others_ms(timer.samples(partial(late_step, delay_ms), session.restore, iterations))
        waited = [ranks[-1] for ranks in gather_numbers(last_ms(delays), context)]
        late_ms.append(median(own - delay for own, delay in zip(times, waited, strict=True)))
        if stream is not None:
            timer.samples(partial(beside, partial(late_step, delay_ms)), session.restore, iterations)
            beside_ms.append(median(others_ms(last_ms(products))))
    if stream is None:
        return {"late_ms": late_ms}
    timer.samples(partial(beside, do_nothing), do_nothing, iterations)
    alone_ms = median(others_ms(last_ms(products)))
    return {"late_ms": late_ms, "beside_ms": beside_ms, "beside_alone_ms": alone_ms}
