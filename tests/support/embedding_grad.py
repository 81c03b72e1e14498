"""Small problems, contexts and dense reference means for the tests of the embedding gradient."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import Rank
from tpbench.measure import timers
from tpbench.measure.session import Context
from tpbench.workloads.embedding_grad import WORKLOAD, EmbeddingGrad
from tpbench.workloads.embedding_grad.exchanges import Exchange, ExchangeContext, sequence
from tpbench.workloads.embedding_grad.exchanges.counted import CountedCollectives
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs, leaving

DISTRIBUTIONS = ("uniform", "zipf_bigram", "fixed")
DTYPES = ("float32", "float16", "bfloat16")
ON_GPUS = torch.cuda.is_available()
HERE = sorted(
    name for name, each in WORKLOAD.variants.items() if not (each.cpu_only_reason if ON_GPUS else each.requires_cuda)
)
"""Variants that run on this name of device."""


def problem(**fields: Any) -> EmbeddingGrad:
    """Return a small problem whose number of table rows is prime."""
    return EmbeddingGrad(**{"table_rows": 101, "width": 12, "tokens": 10, "accumulate": 2, **fields})


def context(here: Rank | None = None, *, rank: int = 0, ranks: int = 2) -> Context:
    """Return the context of a rank in a real, wholly data-parallel group, or of a lone rank without a group."""
    if here is not None:
        rank, ranks = here.rank, here.world_size
    group: Any = None if here is None else here.group
    device = torch.device("cpu") if here is None else here.device
    return Context(rank, ranks, 0, 1, rank, ranks, group, group, device)


class FixedStopwatch:
    """Stopwatch that runs nothing and reports 1 ms, so that setting up takes no time."""

    def ms(self, run: Any, restore: Any = None, *, on_host: bool = False) -> float:
        return 1.0


def prepared(
    here: Rank, cell: EmbeddingGrad, name: str, tokens: list[Tensor] | None = None
) -> tuple[EmbeddingGradInputs, CountedCollectives, Exchange]:
    """Prepare a variant without the measurements of its session."""
    inputs = EmbeddingGradInputs(cell, context(here), tokens)
    comm = CountedCollectives(here.group, here.rank, here.world_size)
    fixed: Any = FixedStopwatch()
    return inputs, comm, WORKLOAD.variants[name].prepare(cell, ExchangeContext(inputs, comm, fixed))


def new_session(here: Rank, cell: EmbeddingGrad, name: str) -> Any:
    """Set up a session that measures each time once: these tests need no precise times."""
    with mock.patch.dict(timers.ITERATIONS, cpu=1, cuda=1):
        return WORKLOAD.set_up(cell, WORKLOAD.variants[name], context(here))


def run(exchange: Exchange, comm: CountedCollectives) -> Tensor:
    """Run one iteration and return its result."""
    comm.reset()
    sequence(exchange.phases)()
    return exchange.result()


def sent_by_formula(inputs: EmbeddingGradInputs, name: str) -> list[int]:
    """Return the bytes that each rank must send."""
    ranks, counts, row_bytes = len(inputs.touched), inputs.counts, inputs.row_bytes
    if name == "dense_reduce_scatter":
        return [(ranks - 1) * inputs.own_slice.nbytes] * ranks
    sent_counts = 0 if name == "sparse_symmetric" else (ranks - 1) * 8 * ranks
    return [rows * (row_bytes + 4) + sent_counts for rows in leaving(counts)]


def dense_mean(here: Rank, inputs: EmbeddingGradInputs) -> Tensor:
    """Return this rank's slice of the mean gradient, by a plain all-reduce in float64."""
    whole = inputs.grad.double()
    dist.all_reduce(whole, group=here.group)
    return inputs.slice_of(whole / here.world_size)
