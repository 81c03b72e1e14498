"""The cost model of the entropy loss: its terms of time, memory and communication.

    time = launches(loss) + bytes worked on / effective bandwidth(loss)
         + latency of the collectives, which grows with the logarithm of the world size
         + bytes sent / bandwidth of the collectives

The bytes worked on are those of a rank's shard, or those of all logits for a variant that gathers them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tpbench.workloads.cost_model import CostModel, FeasibilityPlot, Question
from tpbench.workloads.item_bytes import ITEM_BYTES


@dataclass(frozen=True)
class LossSize:
    """The part of the problem that its cost depends on."""

    tokens: int = 4096
    vocab: int = 131072
    tp_size: int = 8
    loss: str = "cross_entropy"
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.loss}, tokens={self.tokens} vocab={self.vocab} tp_size={self.tp_size}, {self.dtype}"

    @property
    def kind(self) -> str:
        return f"loss={self.loss}"

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
        """Bytes of one logit."""
        return ITEM_BYTES[self.dtype]

    @property
    def inputs_gib(self) -> float:
        """Memory of the inputs: the shard of the logits, and target logits of the same size or int64 labels."""
        labels = self.loss == "cross_entropy"
        return (self.shard * self.item * (1 if labels else 2) + (8 * self.tokens if labels else 0)) / 2**30


def size_of(values: Mapping[str, Any]) -> LossSize | None:
    """Return the size of a row or of a job's flat fields, or None if one is missing or unknown."""
    found = {each.name: values.get(each.name) for each in fields(LossSize)}
    return None if None in found.values() or found["dtype"] not in ITEM_BYTES else LossSize(**found)  # type: ignore


def time_terms(size: LossSize, sent_bytes: float, *, gathers: bool) -> dict[str, float]:
    """Return the terms of an iteration's time, for a variant that works on the shard or on the gathered logits."""
    work = size.full if gathers else size.shard
    terms = {f"launches {size.loss}": 1.0, f"bytes {size.loss}": float(work * size.item)}
    if size.tp_size > 1:
        terms |= {
            "collective start": 1.0,
            "collective latency": math.log2(size.tp_size),
            "collective bytes": sent_bytes,
        }
    return terms


def memory_terms(size: LossSize) -> dict[str, float]:
    """Return the terms of the extra peak memory."""
    terms = {
        "constant": 1.0,
        "a row": float(size.tokens),
        f"shard {size.loss}": float(size.shard * size.item),
        f"full {size.loss}": float(size.full * size.item),
    }
    if size.tp_size > 1:  # on one rank there is nothing to gather
        terms[f"gathered {size.loss}"] = float(size.full * size.item)
    return terms


def sent_terms(size: LossSize) -> dict[str, float]:
    """Return the terms of the bytes that the busiest rank sends."""
    if size.tp_size == 1:
        return {}
    return {
        f"once {size.loss}": float(size.tokens),
        f"each peer {size.loss}": float(size.tokens * (size.tp_size - 1)),
        f"shards {size.loss}": float(size.shard * (size.tp_size - 1) * size.item),
    }


def interpreter_core_s(size: LossSize) -> float:
    """Return the interpreter's seconds on one core. It took 45 s for one rank's 4096 x 16384 logits."""
    return 45.0 * size.shard / (4096 * 16384)


COST_MODEL = CostModel(
    size=LossSize,
    size_of=size_of,
    time_terms=(functools.partial(time_terms, gathers=False), functools.partial(time_terms, gathers=True)),
    memory_terms=memory_terms,
    sent_terms=sent_terms,
    tuning_options=("block_cap",),
    interpreter_core_s=interpreter_core_s,
    plot=FeasibilityPlot(
        variants=("pytorch_gather", "triton_tp"),
        x=("vocab", (32768, 65536, 131072, 262144)),
        lines=("tp_size", (1, 2, 4, 8)),
    ),
    question=Question("pytorch_gather", "The gather", "gather"),
)
