"""Problems and contexts for the tests of this workload."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.ranks import Rank
from tpbench.kernels import LOSSES as LOSSES
from tpbench.measure.session import Context
from tpbench.workloads.entropy_loss import EntropyLoss
from tpbench.workloads.entropy_loss.bench import Oracle, inputs
from tpbench.workloads.entropy_loss.inputs import Output, Shard

DTYPES = ("float32", "float16", "bfloat16")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def context(
    here: Rank | None = None, *, tp_rank: int = 0, tp_size: int = 1, dp_rank: int = 0, dp_size: int = 1
) -> Context:
    """Return the context of a rank of a real, tensor-parallel group, or of a single rank at any place of a mesh."""
    if here is not None:
        tp_rank, tp_size = here.rank, here.world_size
    group: Any = None if here is None else here.group
    where = device() if here is None else here.device
    return Context(tp_rank, tp_size * dp_size, tp_rank, tp_size, dp_rank, dp_size, group, group, where)


def problem(**fields: Any) -> EntropyLoss:
    """Return a small problem with a prime number of columns."""
    return EntropyLoss(**{"tokens": 13, "vocab": 101, **fields})


def alone(cell: EntropyLoss) -> Shard:
    """Return the whole problem on one rank."""
    return inputs(cell, context())


def right_loss(oracle: Oracle) -> float:
    """Return the mean loss over the rows that count."""
    return float(oracle.row_loss.sum()) * oracle.inverse_count


def right_gradient(oracle: Oracle) -> torch.Tensor:
    """Return the gradient of the mean loss by the local logits, in float64."""
    rows = slice(None)
    log_p, log_q = oracle.log_probabilities(rows)
    return oracle.gradient_of_mean(*oracle.losses(log_p, log_q, rows)[1:], rows)[0]


def right(oracle: Oracle) -> Output:
    """Return a perfect variant's output: the oracle's, rounded."""
    grad = right_gradient(oracle).to(oracle.shard.logits.dtype)
    return Output(torch.tensor(right_loss(oracle), device=grad.device).float(), oracle.row_loss.float(), grad)
