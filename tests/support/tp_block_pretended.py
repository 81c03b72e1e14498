"""A stopwatch that knows by what ran what it was given to time, and says what that takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tpbench.comm import collectives
from tpbench.measure.stopwatch import do_nothing


class Noted(TorchDispatchMode):
    """While it is entered: each product, by rows x inner x columns, and both passes of the MLP's activation."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, str]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name == "mm":
            (rows, inner), columns = args[0].shape, args[1].shape[1]
            self.ran.append(("product", f"{rows}x{inner}x{columns}"))
        elif name in ("silu", "silu_backward"):
            self.ran.append((name, ""))
        return function(*args, **(kwargs or {}))

    def collective(self, kind: str, of: Any, which: int) -> Any:
        """One that notes the bytes of an argument."""

        def call(*args: Any, **options: Any) -> Any:
            self.ran.append((kind, str(args[which].nbytes)))
            return of(*args, **options)

        return call


def what(run: Callable[[], None]) -> str:
    """What runs: a single operation or two with their sizes, or how many of each kind."""
    noted = Noted()
    with (
        mock.patch.object(collectives, "all_gather", noted.collective("gather", collectives.all_gather, 1)),
        mock.patch.object(collectives, "reduce_scatter", noted.collective("scatter", collectives.reduce_scatter, 1)),
        mock.patch.object(dist, "all_reduce", noted.collective("sum", dist.all_reduce, 0)),
        noted,
    ):
        run()
    if len(noted.ran) <= 2:
        return ", ".join(f"{kind} {size}" for kind, size in sorted(noted.ran))
    kinds = Counter(kind for kind, _ in noted.ran)
    return ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds))


class Pretended:
    """Times by what runs: alone, and in turns."""

    def __init__(self, alone: Mapping[str, float], in_turns: Mapping[str, list[float]]) -> None:
        self.alone, self.turns = alone, in_turns

    def ms(self, run: Callable[[], None], restore: Callable[[], None] = do_nothing) -> float:
        restore()
        return self.alone[what(run)]

    def interleaved_ms(self, *timed: tuple[Callable[[], None], Callable[[], None]]) -> list[list[float]]:
        found = []
        for run, restore in timed:
            restore()
            found.append(self.turns[what(run)])
        return found
