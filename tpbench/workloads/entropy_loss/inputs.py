"""The problem's inputs, the same numbers at any world size and on any device.

Each number is an integer hash of (seed, stream, global row, global column), made with integer operations that are
exact everywhere, then an exact conversion, then one rounding to the dtype. So a rank makes its shard alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tpbench.context import Context
    from tpbench.workloads.entropy_loss import EntropyLoss

IGNORED = -100
"""The label of rows that do not count."""

_LOGITS, _TARGET_LOGITS, _LABELS, _IGNORED = range(1, 5)
"""Streams: independent numbers from one seed."""

_GPU_CHUNK, _CPU_CHUNK = 2**23, 2**18
"""Elements made at once. About five temporaries of 4 bytes an element: a GPU wants few launches (160 MiB), a CPU's
cache is small."""


@dataclass(frozen=True)
class Shard:
    """One rank's part of the problem."""

    logits: Tensor
    """(tokens, local vocab) in the problem's dtype."""
    target: Tensor
    """Labels, (tokens,) int64 of the whole vocabulary, or target logits like the logits."""
    vocab_start: int
    """The first column held here."""
    vocab_size: int
    """Columns over all ranks."""
    group: ProcessGroup | None
    """The ranks that hold the vocabulary; None if this one does alone."""
    tp_rank: int
    tp_size: int

    @property
    def tokens(self) -> int:
        return self.logits.shape[0]

    @property
    def vocab_stop(self) -> int:
        return self.vocab_start + self.logits.shape[1]

    @property
    def device(self) -> torch.device:
        return self.logits.device


def make_shard(problem: EntropyLoss, context: Context) -> Shard:
    """This rank's inputs. Data-parallel replicas take consecutive rows of one larger problem."""
    start, stop = shard_bounds(problem.vocab, context.tp_size, context.tp_rank)
    first = context.dp_rank * problem.tokens
    group = context.tp_group if context.tp_size > 1 else None
    shard: dict[str, Any] = {"vocab_start": start, "vocab_size": problem.vocab, "group": group}
    shard |= {"tp_rank": context.tp_rank, "tp_size": context.tp_size}
    if problem.from_labels:
        target = labels(problem, first, context.device)
    else:
        target = _normal(problem, _TARGET_LOGITS, first, start, stop, context.device)
    return Shard(_normal(problem, _LOGITS, first, start, stop, context.device), target, **shard)


def shard_bounds(vocab: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """The columns [start, stop) of a rank: contiguous, and the first vocab % tp_size ranks hold one more."""
    share, more = divmod(vocab, tp_size)
    start = tp_rank * share + min(tp_rank, more)
    return start, start + share + (tp_rank < more)


def labels(problem: EntropyLoss, first_row: int, device: torch.device) -> Tensor:
    """(tokens,) int64: uniform over the vocabulary, and IGNORED for a share of `problem.ignored`, drawn by row."""
    row = torch.arange(first_row, first_row + problem.tokens, dtype=torch.int64, device=device)
    label = (_hash_rows(problem.seed, _LABELS, row) * problem.vocab) >> 32
    threshold = round(problem.ignored * 2**32)
    return torch.where(_hash_rows(problem.seed, _IGNORED, row) < threshold, IGNORED, label)


def _normal(problem: EntropyLoss, stream: int, first_row: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Rows of about normal numbers, standard deviation 2.31, within +-8."""
    columns = stop - start
    out = torch.empty(problem.tokens, columns, dtype=getattr(torch, problem.dtype), device=device)
    row = torch.arange(first_row, first_row + problem.tokens, dtype=torch.int64, device=device)
    row_key = _as_int32(_hash_rows(problem.seed, stream, row))
    column_key = _as_int32(_hash_rows(problem.seed, stream + 16, torch.arange(start, stop, device=device)))
    chunk = max(1, (_CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK) // columns)
    for top in range(0, problem.tokens, chunk):
        bits = row_key[top : top + chunk, None] ^ column_key
        other = torch.empty_like(bits)
        _mix(bits, other)
        total = (bits & 0xFFFF).add_(_shifted(bits, 16, other))
        _mix(bits.add_(0x5BD1E995), other)
        total.add_(_shifted(bits, 16, other)).add_(bits.bitwise_and_(0xFFFF))
        # Four uniforms of 16 bits: less than 2^18, so exact in fp32, and the scale is a power of two.
        out[top : top + chunk] = total.sub_(2 * 0xFFFF).to(torch.float32).mul_(2.0**-14)
    return out


def _mix(bits: Tensor, scratch: Tensor) -> None:
    """Scramble int32 in place: Chris Wellons' lowbias32, a bijection whose every output bit depends on every input bit.

    int32 products wrap on every device.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        bits.bitwise_xor_(_shifted(bits, shift, scratch)).mul_(factor)
    bits.bitwise_xor_(_shifted(bits, 16, scratch))


def _shifted(bits: Tensor, shift: int, out: Tensor) -> Tensor:
    """bits >> shift as unsigned: torch shifts the sign in, the mask takes it out."""
    torch.bitwise_right_shift(bits, shift, out=out)
    return out.bitwise_and_(2 ** (32 - shift) - 1)


def _hash_rows(seed: int, stream: int, index: Tensor) -> Tensor:
    """32 bits for each index, as int64 in [0, 2^32)."""
    key = _mix_int(_mix_int(seed) ^ (stream * 0x9E3779B9))
    bits = _as_int32((index + key) & 0xFFFFFFFF)
    _mix(bits, torch.empty_like(bits))
    return bits.to(torch.int64) & 0xFFFFFFFF


def _mix_int(bits: int) -> int:
    """`_mix` of one Python int."""
    bits &= 0xFFFFFFFF
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    bits = (bits ^ (bits >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return bits ^ (bits >> 16)


def _as_int32(bits: Tensor) -> Tensor:
    """The int32 of the same low 32 bits, by arithmetic: what an overflowing cast does is nobody's promise."""
    low = bits & 0xFFFFFFFF
    return (low - ((low >> 31) << 32)).to(torch.int32)
