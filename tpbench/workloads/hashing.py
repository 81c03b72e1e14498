"""Pseudo-random inputs by hashes of (seed, stream, global index), with the same bits on every rank and device."""

import torch
from torch import Tensor

NORMAL_DEVIATION = 4 / 3**0.5
"""Standard deviation of `normal`, a sum of four uniform numbers of width 4: 2.31."""

CHUNK = {"cpu": 2**18, "cuda": 2**23}
"""Elements of a matrix that are computed or compared at once, by type of device: about 160 MiB of temporaries on a GPU,
and what fits into the cache of a CPU."""


def hash_index(seed: int, stream: int, index: Tensor) -> Tensor:
    """Return 32 random bits for each index, as int64 in [0, 2^32). Streams of one seed are independent."""
    key = _mix_int(_mix_int(seed) ^ (stream * 0x9E3779B9))
    bits = _as_int32((index + key) & 0xFFFFFFFF)
    _mix(bits, torch.empty_like(bits))
    return bits.to(torch.int64) & 0xFFFFFFFF


def normal(row_hash: Tensor, column_hash: Tensor) -> Tensor:
    """Return (rows, columns) fp32 by `hash_index` of both, about normal: standard deviation 2.31, within +-8."""
    bits = _as_int32(row_hash)[:, None] ^ _as_int32(column_hash)
    scratch = torch.empty_like(bits)
    _mix(bits, scratch)
    total = (bits & 0xFFFF).add_(_shifted(bits, 16, scratch))
    _mix(bits.add_(0x5BD1E995), scratch)
    total.add_(_shifted(bits, 16, scratch)).add_(bits.bitwise_and_(0xFFFF))
    # Four uniform numbers of 16 bits: their sum is below 2^18, so exact in fp32, and the scale is a power of two.
    return total.sub_(2 * 0xFFFF).to(torch.float32).mul_(2.0**-14)


def fill_normal(
    part: Tensor,
    seed: int,
    stream: int,
    scale: float,
    first: tuple[int, int] = (0, 0),
    column_stream: int | None = None,
) -> None:
    """Fill a part of a matrix, from element `first` on, with `normal` numbers times `scale`.

    Rows are hashed by `stream`, and columns by the next stream, unless another one is given.
    """
    of_columns = stream + 1 if column_stream is None else column_stream
    rows, columns = part.shape
    column_hash = hash_index(seed, of_columns, torch.arange(first[1], first[1] + columns, device=part.device))
    row_hash = hash_index(seed, stream, torch.arange(first[0], first[0] + rows, device=part.device))
    step = max(1, CHUNK[part.device.type] // max(1, columns))
    for start in range(0, rows, step):
        part[start : start + step] = normal(row_hash[start : start + step], column_hash).mul_(scale)


def _mix(bits: Tensor, scratch: Tensor) -> None:
    """Scramble int32 in place by lowbias32 (Chris Wellons), a bijection. int32 products wrap on every device."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        bits.bitwise_xor_(_shifted(bits, shift, scratch)).mul_(factor)
    bits.bitwise_xor_(_shifted(bits, 16, scratch))


def _shifted(bits: Tensor, shift: int, out: Tensor) -> Tensor:
    """Write bits >> shift to `out`, without the sign bits that torch shifts in."""
    torch.bitwise_right_shift(bits, shift, out=out)
    return out.bitwise_and_(2 ** (32 - shift) - 1)


def _mix_int(bits: int) -> int:
    """Scramble one Python int as `_mix` does."""
    bits &= 0xFFFFFFFF
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    bits = (bits ^ (bits >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return bits ^ (bits >> 16)


def _as_int32(bits: Tensor) -> Tensor:
    """Return int32 with the same low 32 bits, by arithmetic: an overflowing cast is not defined."""
    low = bits & 0xFFFFFFFF
    return (low - ((low >> 31) << 32)).to(torch.int32)
