"""From rows to the measured cells that a model is fitted to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from tpbench.report.grids import arrange_rows
from tpbench.report.records import caveat_mark
from tpbench.settings import JobError

WORKLOAD = "entropy_loss"
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_NEEDS = ("time_ms", "device_ms", "peak_gib", "bytes_communicated", "memory_limit_gib", "gpu_name", "nodes")


@dataclass(frozen=True)
class Size:
    """A problem, as far as its cost depends on it."""

    tokens: int
    vocab: int
    tp_size: int
    loss: str
    dtype: str = "bfloat16"

    @property
    def shard(self) -> int:
        """Logits on the rank that holds the most."""
        return self.tokens * math.ceil(self.vocab / self.tp_size)

    @property
    def full(self) -> int:
        """Logits of the whole vocabulary."""
        return self.tokens * self.vocab

    @property
    def item(self) -> int:
        """Bytes of one of them."""
        return ITEM_BYTES[self.dtype]

    @property
    def inputs_gib(self) -> float:
        """What the inputs take: the shard of the logits, and as much again of target logits, or labels."""
        labels = self.loss == "cross_entropy"
        return (self.shard * self.item * (1 if labels else 2) + (8 * self.tokens if labels else 0)) / 2**30


@dataclass(frozen=True)
class Cell:
    """One cell that was run on a GPU."""

    head: str
    """The variant, with the options that it was run with."""
    size: Size
    status: str
    time_ms: float | None
    device_ms: float | None
    peak_gib: float | None
    bytes_communicated: float | None


@dataclass(frozen=True)
class Measured:
    """All usable cells of one kind of GPU."""

    gpu: str
    cells: tuple[Cell, ...]

    @property
    def heads(self) -> list[str]:
        """The variants of these cells, most measured first."""
        return [head for head, _ in Counter(cell.head for cell in self.cells if cell.status == "ok").most_common()]


def measured(frame: pd.DataFrame, gpu: str | None = None, *, block_caps: bool = False) -> Measured:
    """The newest row of each cell of the entropy loss that was measured, or ran out of memory, on one kind of GPU.

    Without `gpu`, the one with the most cells. Cells with a block cap of their own are a study, not a choice, and left
    out unless asked for. Raises JobError where nothing is left.
    """
    by_gpu: dict[str, list[Cell]] = {}
    arranged = arrange_rows(frame[frame["workload"] == WORKLOAD], _NEEDS)
    for grid in arranged.grids:
        for row in grid.rows:
            for head, record in zip(grid.columns, row.records, strict=True):
                fits = record and record["device"] == "cuda" and (record["nodes"] or 1) == 1 and not caveat_mark(record)
                if not (record and fits and record["status"] in ("ok", "oom") and record["gpu_name"]):
                    continue
                sizes = [record[name] for name in ("tokens", "vocab", "tp_size", "loss", "dtype")]
                if None in sizes or sizes[-1] not in ITEM_BYTES or (" block_cap=" in head and not block_caps):
                    continue
                by_gpu.setdefault(record["gpu_name"], []).append(_cell(head, Size(*sizes), record))
    if gpu is not None and gpu not in by_gpu:
        raise JobError(f"no row was measured on {gpu} (there are: {', '.join(sorted(by_gpu)) or 'none'})")
    if not by_gpu:
        raise JobError(
            f"no row of {WORKLOAD} was measured on a GPU: name a folder that has some, say outputs/reference"
        )
    chosen = gpu or max(by_gpu, key=lambda name: len(by_gpu[name]))
    return Measured(chosen, tuple(by_gpu[chosen]))


def _cell(head: str, size: Size, record: dict[str, object]) -> Cell:
    values = [record[name] for name in ("time_ms", "device_ms", "peak_gib", "bytes_communicated")]
    numbers = [float(value) if isinstance(value, (int, float)) else None for value in values]
    return Cell(head, size, str(record["status"]), *numbers)


def span(cells: Iterable[Cell]) -> dict[str, tuple[float, float]]:
    """The smallest and largest of each size that was measured."""
    sizes = [cell.size for cell in cells if cell.status == "ok"]
    return {
        name: (min(getattr(size, name) for size in sizes), max(getattr(size, name) for size in sizes))
        for name in ("tokens", "vocab", "tp_size")
    }
