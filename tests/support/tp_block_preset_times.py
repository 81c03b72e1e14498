"""A stopwatch with preset times: it recognises a step by its products, collectives and activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tpbench.comm import collectives
from tpbench.measure.stopwatch import do_nothing


class OperationLog(TorchDispatchMode):
    """While entered, logs each product as rows x inner x columns, and both passes of the MLP's activation."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, str]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name == "mm":
            (rows, inner), columns = args[0].shape, args[1].shape[1]
            self.operations.append(("product", f"{rows}x{inner}x{columns}"))
        elif name in ("silu", "silu_backward"):
            self.operations.append((name, ""))
        return function(*args, **(kwargs or {}))

    def collective(self, kind: str, of: Any, which: int) -> Any:
        """Return a collective that logs the bytes of its argument number `which`."""

        def call(*args: Any, **options: Any) -> Any:
            self.operations.append((kind, str(args[which].nbytes)))
            return of(*args, **options)

        return call


def operations_of(run: Callable[[], None]) -> str:
    """Return the operations that run: one or two with their sizes, or the number of each kind."""
    log = OperationLog()
    with (
        mock.patch.object(collectives, "all_gather", log.collective("gather", collectives.all_gather, 1)),
        mock.patch.object(collectives, "reduce_scatter", log.collective("scatter", collectives.reduce_scatter, 1)),
        mock.patch.object(dist, "all_reduce", log.collective("sum", dist.all_reduce, 0)),
        log,
    ):
        run()
    if len(log.operations) <= 2:
        return ", ".join(f"{kind} {size}" for kind, size in sorted(log.operations))
    kinds = Counter(kind for kind, _ in log.operations)
    return ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds))


class PresetStopwatch:
    """Preset times by the operations that run: of single steps, and of interleaved ones."""

    def __init__(self, alone: Mapping[str, float], interleaved: Mapping[str, list[float]]) -> None:
        self.alone, self.interleaved = alone, interleaved

    def ms(self, run: Callable[[], None], restore: Callable[[], None] = do_nothing) -> float:
        restore()
        return self.alone[operations_of(run)]

    def interleaved_ms(self, *timed: tuple[Callable[[], None], Callable[[], None]]) -> list[list[float]]:
        times = []
        for run, restore in timed:
            restore()
            times.append(self.interleaved[operations_of(run)])
        return times
