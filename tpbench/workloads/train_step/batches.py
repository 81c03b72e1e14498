"""The tokens of every step: integer hashes of (seed, global position), the same at any mesh with as many replicas."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpbench.workloads.hashing import hash_index
from tpbench.workloads.train_step.problem import TrainStep

_STREAMS = (11, 12, 13)
_BITS = 20


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one replica."""

    tokens: Tensor
    """(batch_size, seq_length) int64."""
    labels: Tensor
    """Each token's successor, of the same shape: every position has one."""


def micro_batch(problem: TrainStep, step: int, micro: int, dp_rank: int, dp_size: int, device: torch.device) -> Batch:
    """That micro-batch of that replica. No two of a run share a sequence.

    A token is a product of three uniform numbers scaled to the vocabulary, so low numbers are frequent and the loss has
    something to learn: 1.15 nats below log(vocab), soon.
    """
    first = ((step * problem.accumulate + micro) * dp_size + dp_rank) * problem.batch_size
    samples = torch.arange(first, first + problem.batch_size)[:, None]
    positions = samples * (problem.seq_length + 1) + torch.arange(problem.seq_length + 1)
    product = torch.full_like(positions, 2**_BITS)
    for stream in _STREAMS:
        product = (product * (hash_index(problem.seed, stream, positions) >> (32 - _BITS))) >> _BITS
    drawn = ((product * problem.vocab) >> _BITS).to(device)
    return Batch(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())
