"""Problems, contexts and oracles by other means for the tests of this workload."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import Rank
from tpbench.measure.session import Context
from tpbench.workloads.embedding_grad import WORKLOAD, EmbeddingGrad
from tpbench.workloads.embedding_grad.bench import Place
from tpbench.workloads.embedding_grad.exchange import Exchange, sequence
from tpbench.workloads.embedding_grad.inputs import Inputs
from tpbench.workloads.embedding_grad.wire import Wire

DISTRIBUTIONS = ("uniform", "zipf", "bigram", "fixed", "one_owner", "one_rank", "none")
DTYPES = ("float32", "float16", "bfloat16")
ON_GPUS = torch.cuda.is_available()
HERE = sorted(
    name for name, each in WORKLOAD.variants.items() if not (each.cpu_only_reason if ON_GPUS else each.requires_cuda)
)
"""The variants that run on this kind of device."""


def problem(**fields: Any) -> EmbeddingGrad:
    """A small problem whose table nothing divides."""
    return EmbeddingGrad(**{"table_rows": 101, "width": 12, "tokens": 10, "accumulate": 2, **fields})


def context(here: Rank | None = None, *, rank: int = 0, ranks: int = 2) -> Context:
    """A rank of a real group (all of it data-parallel), or a lone rank that says it stands somewhere."""
    if here is not None:
        rank, ranks = here.rank, here.world_size
    group: Any = None if here is None else here.group
    where = torch.device("cpu") if here is None else here.device
    return Context(rank, ranks, 0, 1, rank, ranks, group, group, where)


class FixedStopwatch:
    """Says that everything takes equally long: setting up is then no matter of time."""

    def ms(self, run: Any, restore: Any = None, *, on_host: bool = False) -> float:
        return 1.0


def prepared(
    here: Rank, cell: EmbeddingGrad, name: str, tokens: list[Tensor] | None = None
) -> tuple[Inputs, Wire, Exchange]:
    """A variant without what its session measures."""
    inputs = Inputs(cell, context(here), tokens)
    wire = Wire(here.group, here.rank, here.world_size)
    stopwatch: Any = FixedStopwatch()
    return inputs, wire, WORKLOAD.variants[name].prepare(cell, Place(inputs, wire, stopwatch))


def run(exchange: Exchange, wire: Wire) -> Tensor:
    """One iteration."""
    wire.reset()
    sequence(exchange.phases)()
    return exchange.result()


def dense_mean(here: Rank, inputs: Inputs, *, of_sizes: bool = False) -> Tensor:
    """This rank's slice of the mean, by a plain all-reduce in float64 of the gradients as they are, or of their sizes:
    what rounding errors on the way can be compared with where gradients cancel."""
    whole = inputs.grad.double()
    whole = whole.abs() if of_sizes else whole
    dist.all_reduce(whole, group=here.group)
    return inputs.slice_of(whole / here.world_size)
