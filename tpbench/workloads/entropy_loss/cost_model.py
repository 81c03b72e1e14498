"""The cost model of the entropy loss: what a variant works on and sends. `tpbench.predict` fits it to measured rows.

device time = launches(loss) + bytes worked on / effective bandwidth(loss)
            + latency of the collectives, which grows with the logarithm of the world size
            + bytes sent / bandwidth of the collectives
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from tpbench.kernels import COMPARING_LOSSES, LABEL_LOSSES
from tpbench.workloads.entropy_loss.problem import TERMS, WORKLOAD
from tpbench.workloads.sizes import ITEM_BYTES

Terms: TypeAlias = Mapping[str, float]
"""Counted terms of a cost by name, which begins with `collective` for communication and `bytes` for memory traffic. A
fit multiplies each with a coefficient that is not negative."""


@dataclass(frozen=True)
class Counts:
    """What one variant does on one problem."""

    memory: Terms  # of the extra peak memory of a rank
    sent: Terms  # of the bytes that the busiest rank sends, if it sends any
    time: Terms  # of the device


@dataclass(frozen=True)
class LossSize:
    """The part of the problem that its cost depends on. Every field is an option of `tpbench predict`."""

    tokens: int = 4096
    vocab: int = 131072
    tp_size: int = 8
    loss: str = "cross_entropy"
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.loss}, tokens={self.tokens} vocab={self.vocab} tp_size={self.tp_size}, {self.dtype}"

    @property
    def kind(self) -> str:
        """Problems of one kind share coefficients."""
        return f"loss={self.loss}"

    def gathered(self, ranks: int) -> float:
        """Return the bytes of the logits of so many shards, of which none is larger than this rank's."""
        columns = min(self.vocab, ranks * math.ceil(self.vocab / self.tp_size))
        return float(self.tokens * columns * ITEM_BYTES[self.dtype])

    @property
    def inputs_gib(self) -> float:
        """Memory of the inputs: the shard of the logits, and target logits of the same size or int64 labels."""
        shard = self.gathered(1)
        return (shard + (8 * self.tokens if self.loss in LABEL_LOSSES else shard)) / 2**30


def size_of(values: Mapping[str, Any]) -> LossSize | None:
    """Return the size of a row or of a job's flat fields, or None if one is missing or unknown, or with other terms."""
    sizes = {field.name: values.get(field.name) for field in fields(LossSize)}
    if any(map(values.get, ("top_k", *TERMS))) or None in sizes.values() or sizes["dtype"] not in ITEM_BYTES:
        return None
    return LossSize(**sizes)  # type: ignore[arg-type]


def counts(label: str, size: LossSize) -> Counts:
    """Return what a variant does, by its name and options, such as `pytorch_tp_manual exchange=all_reduce`."""
    name, *options = label.split()
    exchanges, ranks = exchanges_of(name), size.tp_size
    gathers, reduces = exchanges == "logits", exchanges == "sums" or "exchange=all_reduce" in options
    worked = size.gathered(ranks if gathers else 1)
    memory = {"a row": float(size.tokens), f"worked {size.loss}": worked}
    time = {f"bytes {size.loss}": worked, f"launches {size.loss}": 1.0}
    if ranks == 1:
        return Counts(memory, {}, time)
    if gathers:
        memory[f"gathered {size.loss}"] = worked
        unit = size.gathered(1) * (ranks - 1)
    else:
        unit = size.tokens * (ranks - 1) / (ranks if reduces else 1)
        if sends_parts(label):
            unit *= parts_of_row(size, "entropy=true" in options)
    time |= {
        f"bytes over ranks {size.loss}": worked,
        "collective latency": math.log2(2 * ranks),
        f"collective {size.loss}": unit,
    }
    return Counts(memory, {f"sent {size.loss}": unit}, time)


def exchanges_of(name: str) -> str:
    """Return what the ranks of a variant exchange. One that this package doesn't have exchanges numbers."""
    return getattr(WORKLOAD.variants.get(name), "exchanges", "numbers")


def sends_parts(label: str) -> bool:
    """Return true if ranks exchange the numbers of each part of a row, through memory that they share."""
    name, *options = label.split()
    return exchanges_of(name) == "numbers of parts" and "exchange=nccl" not in options


def parts_of_row(size: LossSize, entropy: bool = False) -> int:
    """Return for how many parts of a row each rank of Hopper GPUs sends numbers, some of them empty.

    It is a power of two, for shards of up to 1.5 times the even share. `tpbench.kernels.one_pass.tiling` decides it,
    which needs torch. entropy: rows of labels have entropies, too.
    """
    matrices = 1 if size.loss in LABEL_LOSSES else 2
    row_bytes, part_bytes = int(size.gathered(1) / size.tokens) * matrices, 2**17
    if size.loss in COMPARING_LOSSES:
        part_bytes = 2**15
    elif matrices == 1 and row_bytes > 2**15:
        padded = 1 << (row_bytes - 1).bit_length()
        if entropy or row_bytes < (0.95 * padded if padded <= 2**17 else padded):
            part_bytes = 7 * 2**13  # two programs share a multiprocessor
    return 1 << (math.ceil(1.5 * math.ceil(row_bytes / part_bytes)) - 1).bit_length()


def is_replaced(row: Mapping[str, Any]) -> bool:
    """Return true for a row of kernels that were replaced after version 0.1: they took longer, and sent other bytes."""
    if row["tpbench_version"] != "0.1.0" or exchanges_of(row["variant"]) != "numbers of parts":
        return False
    return row["loss"] in COMPARING_LOSSES or not is_power_of_two(row["vocab"])


def is_power_of_two(number: int) -> bool:
    """Return true for 1, 2, 4 and so on."""
    return number & (number - 1) == 0
