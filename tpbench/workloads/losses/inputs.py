"""Random labels and matrices of the losses: the same numbers at any world size and on any device.

Each number is an integer hash of (seed, stream, global row, global column), converted exactly and rounded once to the
dtype (`tpbench.workloads.hashing`). A rank makes its shard without communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpbench.kernels import TopK
from tpbench.workloads.hashing import hash_index, normal
from tpbench.workloads.losses import SEQUENCE, LossProblem
from tpbench.workloads.sizes import IGNORED, shard_bounds

if TYPE_CHECKING:
    from tpbench.measure.session import Context


def place(problem: LossProblem, context: Context) -> dict[str, Any]:
    """Return the fields of a shard that say which columns a rank holds, and with which ranks."""
    return {
        "vocab_start": shard_bounds(problem.vocab, context.tp_size, context.tp_rank)[0],
        "vocab_size": problem.vocab,
        "group": context.tp_group if context.tp_size > 1 else None,
        "tp_rank": context.tp_rank,
        "tp_size": context.tp_size,
    }


CHUNK = {"cuda": 2**23, "cpu": 2**18}
"""Elements that are computed at once, by type of device. A chunk needs about five temporaries of 4 bytes per element:
160 MiB on a GPU, for few launches. A CPU's chunk fits into its cache."""


def labels(problem: LossProblem, streams: tuple[int, int], rows: range, device: torch.device) -> Tensor:
    """Return labels (rows,) int64, uniform over the vocabulary. A share `ignored` of them is IGNORED.

    streams: those of the labels, and of the choice of rows to ignore.
    """
    of_labels, of_ignored = streams
    row = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=device)
    label = (hash_index(problem.seed, of_labels, row) * problem.vocab) >> 32
    return torch.where(hash_index(problem.seed, of_ignored, row) < round(problem.ignored * 2**32), IGNORED, label)


CLIP = (0.2, 0.2)
"""How far the ratio of the policy loss may fall below 1 and rise above it."""
_POLICY = 120
"""The random streams of a policy's rows, and of their sequences."""


def policy_rows(problem: Any, logprob: Tensor) -> dict[str, Tensor]:
    """Return the tensors of rows of the policy loss, (tokens,) fp32, near the log-probabilities of the labels.

    The ratios' logarithms are -0.5, 0 and 0.5, so that the clip decides some of them, and that no rounding of logits
    moves a ratio over a limit of the clip. The reference is 1 lower or higher. Advantages, positive and negative, are
    between 1 and 2. So the terms of a gradient don't cancel for a kl_weight up to 0.3.
    """
    row, of_sequence = (
        hash_index(problem.seed, stream, torch.arange(count, device=logprob.device))
        for stream, count in ((_POLICY, len(logprob)), (_POLICY + 1, -(-len(logprob) // SEQUENCE)))
    )
    advantages = (1.0 + (of_sequence >> 1) % 5 / 4) * (of_sequence % 2 * 2 - 1)
    advantages = advantages.float().repeat_interleave(SEQUENCE)[: len(logprob)].contiguous()
    rows = {"old_logprobs": (logprob + (row % 3 - 1) * 0.5).float(), "advantages": advantages}
    if problem.kl_weight:
        rows["ref_logprobs"] = (logprob + (row // 3 % 2 * 2 - 1)).float()
    return rows


def kernel_options(problem: Any, shard: Any) -> dict[str, Any]:
    """Return the arguments that this project's kernels of both losses have."""
    options = {
        "loss": problem.loss,
        "group": shard.group,
        "vocab_start": shard.vocab_start,
        "vocab_size": shard.vocab_size,
        "ignore_index": IGNORED,
        "temperature": problem.temperature,
        "exchange": problem.exchange,
        "entropy": problem.entropy,
    }
    if problem.loss == "policy":
        options |= {**shard.rows, "clip": CLIP, "kl_weight": problem.kl_weight}
    return options


_TOP = 124


def teacher_top_k(problem: Any, rows: range, device: torch.device) -> TopK:
    """Return a teacher's random logits in top_k columns of each row, one in each part of the vocabulary."""
    row = hash_index(problem.seed, _TOP, torch.arange(rows.start, rows.stop, dtype=torch.int64, device=device))
    column = hash_index(problem.seed, _TOP + 1, torch.arange(problem.top_k, device=device))
    width = problem.vocab // problem.top_k
    offset = (((row[:, None] ^ column) * width) >> 32) + torch.arange(problem.top_k, device=device) * width
    return TopK(normal(row, column), offset)


def normal_matrix(
    problem: Any, streams: tuple[int, int], rows: range, columns: range, device: torch.device, scale: float = 1.0
) -> Tensor:
    """Return (rows, columns) approximately normal numbers with standard deviation 2.31 * scale, within +-8 * scale.

    streams: those of the row indices, and of the column indices. rows, columns: parts of a larger matrix. scale: a
    power of two, which rounds nothing.
    """
    seed, dtype = problem.seed, getattr(torch, problem.dtype)
    out = torch.empty(len(rows), len(columns), dtype=dtype, device=device)
    row_hash = hash_index(seed, streams[0], torch.arange(rows.start, rows.stop, dtype=torch.int64, device=device))
    column_hash = hash_index(seed, streams[1], torch.arange(columns.start, columns.stop, device=device))
    step = max(1, CHUNK[device.type] // len(columns))
    for top in range(0, len(rows), step):
        chunk = normal(row_hash[top : top + step], column_hash)
        out[top : top + step] = chunk if scale == 1.0 else chunk.mul_(scale)
    return out
