"""Inputs of every step: tokens and labels of a micro-batch, positions and attention masks.

Tokens are hashed from (seed, global position), so every mesh with the same number of replicas has the same tokens.
Masks are of whole sequences: a model with a share of the tokens would make masks of the share's length.
"""

from dataclasses import dataclass
from typing import Any

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
    """(batch_size, seq_length) int64: the successor of each token. Every position has one."""


def replica_batches(problem: TrainStep, step: int, dp_rank: int, dp_size: int, device: torch.device) -> list[Batch]:
    """Return the micro-batches of one replica in one step."""
    return [micro_batch(problem, step, micro, dp_rank, dp_size, device) for micro in range(problem.accumulate)]


def micro_batch(problem: TrainStep, step: int, micro: int, dp_rank: int, dp_size: int, device: torch.device) -> Batch:
    """Return one micro-batch of one replica. No two micro-batches of a run share a sequence, unless `batches` is set:
    then the steps repeat that number of batches. Losses of the same batch show every update, while losses of new
    batches differ by more than small updates change them.

    A token is the product of three uniform numbers, scaled to the vocabulary. Low tokens are therefore frequent, and
    the loss can soon fall to 1.15 nats below log(vocab).
    """
    if problem.batches is not None:
        step %= problem.batches
    first = ((step * problem.accumulate + micro) * dp_size + dp_rank) * problem.batch_size
    samples = torch.arange(first, first + problem.batch_size)[:, None]
    positions = samples * (problem.seq_length + 1) + torch.arange(problem.seq_length + 1)
    product = torch.full_like(positions, 2**_BITS)
    for stream in _STREAMS:
        product = (product * (hash_index(problem.seed, stream, positions) >> (32 - _BITS))) >> _BITS
    tokens = ((product * problem.vocab) >> _BITS).to(device)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def model_inputs(problem: TrainStep, device: torch.device) -> dict[str, Any]:
    """Return the arguments of a model's forward pass besides the tokens.

    `position_ids`, (1, S) int64, are explicit because a sequence-parallel rank would count its own tokens from 0. The
    mask (1, 1, S, S) of causal attention is for eager attention, which adds it to its scores.
    """
    mask = None
    if problem.attention == "eager":
        dtype = getattr(torch, problem.dtype)
        blocked = torch.full((problem.seq_length, problem.seq_length), torch.finfo(dtype).min, dtype=dtype)
        mask = blocked.triu(1)[None, None].to(device)
    positions = torch.arange(problem.seq_length, device=device)[None]
    return {"position_ids": positions, "attention_mask": mask, "use_cache": False}
