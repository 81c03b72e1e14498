"""The rows and blocks of the two-pass kernels: which of them exist and count, their logits in fp32, and their scales.

Tiles are (ROWS, BLOCK). A program works on one row on a GPU, and on many in Triton's interpreter, whose cost is per
operation and not per element.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from tpbench.kernels.cached_launch import INTERPRETED
from tpbench.kernels.kernel_arguments import LossConstants, Scales


@dataclass(frozen=True, kw_only=True)
class TwoPassSpec(LossConstants):
    """The constants that a two-pass kernel is compiled for. Kernels receive it as the constant `SPEC`."""

    ROWS: int
    BLOCK: int = 1
    LANES: int = 1
    """Threads that share a tile. Each loads VECTOR columns at a time."""
    VECTOR: int = 1
    ACCUMULATE: bool = False
    """The kernel adds to the gradient instead of overwriting it."""
    WIDE: bool = False
    """Columns times their stride exceed 2^31."""
    TEMPERATURES: bool = False
    """Rows have their own temperatures: `Scales` of a program has (ROWS,) factors (see `scales_of_rows`)."""


_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def round_to(values, dtype: tl.constexpr):
    """Round fp32 to `dtype`, to the nearest even. The interpreter's own conversion to bf16 drops the low bits."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        values = tl.where(values == values, bits.to(tl.float32, bitcast=True), values)
    return values.to(dtype)


@triton.jit
def capped(values, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(values / SOFTCAP), in fp32. SOFTCAP 0: no cap.

    A difference from 1 has a rounding error as large as that of the cap. For small caps this is little, and another
    form would take twice the instructions. Below half of a larger cap a polynomial in u^2 stands for tanh(u) / u, with
    a relative error of 6e-8.
    """
    if SOFTCAP > 64:
        u = values * (1.0 / SOFTCAP)
        u_2 = u * u
        of_cap = SOFTCAP * (2.0 * tl.sigmoid(2.0 * u) - 1.0)
        ratio = -0.33333312 + u_2 * (0.13330514 + u_2 * (-0.05339105 + u_2 * 0.01799922))
        values = tl.where(u_2 < 0.25, values + values * u_2 * ratio, of_cap)
    elif SOFTCAP > 0:
        values = SOFTCAP * (2.0 * tl.sigmoid(2.0 / SOFTCAP * values) - 1.0)
    return values


@triton.jit
def load_capped(pointer, row_offset, column_offset, mask, SOFTCAP: tl.constexpr):
    """Load a tile, (ROWS, BLOCK), in fp32 below the cap. Elements outside `mask` are -inf."""
    values = tl.load(pointer + row_offset[:, None] + column_offset[None, :], mask=mask, other=float("-inf"))
    values = capped(values.to(tl.float32), SOFTCAP)
    if SOFTCAP > 0:
        values = tl.where(mask, values, float("-inf"))
    return values


@triton.jit
def label_counts(label, vocab_size, ignore_index):
    """Return which labels are columns of the vocabulary and not to be ignored."""
    return (label != ignore_index) & (label >= 0) & (label < vocab_size)


@triton.jit
def rows_of_program(target, row_weight, n_rows, shard, SPEC: tl.constexpr):
    """The rows of this program, (ROWS,): int64 indices, which of them exist, which of them count, and their labels."""
    row = tl.program_id(0).to(tl.int64) * SPEC.ROWS + tl.arange(0, SPEC.ROWS)
    exists = row < n_rows
    counts = exists
    label = row * 0
    if SPEC.LOSS == "cross_entropy":
        if SPEC.TOP_K:
            label = tl.load(target.indices + row * SPEC.TOP_K, mask=exists, other=-1).to(tl.int64)
        else:
            label = tl.load(target + row, mask=exists, other=-1).to(tl.int64)
        counts = exists & label_counts(label, shard.vocab_size, shard.ignore_index)
    if row_weight is not None:
        counts = counts & (tl.load(row_weight + row, mask=exists, other=0.0) != 0.0)
    return row, exists, counts, label


@triton.jit
def block_columns(start, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The columns of a block, (BLOCK,). WIDE: times the column stride they exceed 2^31."""
    column = start + tl.arange(0, BLOCK)
    if WIDE:
        column = column.to(tl.int64)
    return column


@triton.jit
def load_block(logits, target, row, counts, start, strides, shard, scales, SPEC: tl.constexpr):
    """The columns of a block, which elements count, the logits below their cap, and the scaled target logits if any."""
    column = block_columns(start, SPEC.WIDE, SPEC.BLOCK)
    mask = counts[:, None] & (column < shard.n_valid)[None, :]
    x = load_capped(logits, row * strides.logits_row, column * strides.logits_column, mask, SPEC.SOFTCAP)
    t = x
    if SPEC.LOSS != "cross_entropy":
        t = load_capped(target, row * strides.target_row, column * strides.target_column, mask, SPEC.TARGET_SOFTCAP)
        t = t * scales.target
    return column, mask, x, t


@triton.jit
def scales_of_rows(scales, temperature, row, exists):
    """The `Scales` of rows, with those temperatures of the logits unless there are none."""
    if temperature is None:
        return scales
    else:
        factor = 1.0 / tl.load(temperature + row, mask=exists, other=1.0)
        return Scales(
            scales.logits * factor, scales.target, scales.grad * factor, scales.entropy * factor, scales.total,
            scales.label, scales.smoothing, scales.column, scales.z_loss, scales.clip_low, scales.clip_high, scales.kl,
            scales.entropy_term,
        )  # fmt: skip


@triton.jit
def scaled(tile, scale, SPEC: tl.constexpr):
    """A tile, (ROWS, BLOCK), times a factor of all rows or of each."""
    if SPEC.TEMPERATURES:
        return tile * scale[:, None]
    else:
        return tile * scale
