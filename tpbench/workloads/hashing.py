"""Numbers for inputs: integer hashes of (seed, stream, index), exact on every device, hence the same everywhere.

A number depends on its global index alone, so that each rank makes its part without the others.
"""

from __future__ import annotations

import torch
from torch import Tensor


def hash_index(seed: int, stream: int, index: Tensor) -> Tensor:
    """32 bits for each index, as int64 in [0, 2^32). Streams are independent numbers from one seed."""
    key = _mix_int(_mix_int(seed) ^ (stream * 0x9E3779B9))
    bits = _as_int32((index + key) & 0xFFFFFFFF)
    _mix(bits, torch.empty_like(bits))
    return bits.to(torch.int64) & 0xFFFFFFFF


def normal(row_hash: Tensor, column_hash: Tensor) -> Tensor:
    """(rows, columns) fp32 of about normal numbers, standard deviation 2.31, within +-8; from `hash_index` of each."""
    bits = _as_int32(row_hash)[:, None] ^ _as_int32(column_hash)
    other = torch.empty_like(bits)
    _mix(bits, other)
    total = (bits & 0xFFFF).add_(_shifted(bits, 16, other))
    _mix(bits.add_(0x5BD1E995), other)
    total.add_(_shifted(bits, 16, other)).add_(bits.bitwise_and_(0xFFFF))
    # Four uniforms of 16 bits: less than 2^18, so exact in fp32, and the scale is a power of two.
    return total.sub_(2 * 0xFFFF).to(torch.float32).mul_(2.0**-14)


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
