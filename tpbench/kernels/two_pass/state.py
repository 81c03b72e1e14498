"""Row states of the two-pass kernels: tiles merge into a shard, and shards into the vocabulary.

`row_terms` has a table of their numbers. Exponents are in nats.

Tiles are (ROWS, BLOCK). A program works on one row on a GPU, and on many in Triton's interpreter, whose cost is per
operation and not per element.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tpbench.kernels.cached_launch import INTERPRETED
from tpbench.kernels.kernel_arguments import LossConstants, Scales, TopTarget
from tpbench.kernels.row_terms import LEAST_REST, Teacher, merge_two, reference, state_of, weigh


@dataclass(frozen=True, kw_only=True)
class TwoPassSpec(LossConstants):
    """The constants that a two-pass kernel is compiled for. Kernels receive it as the constant `SPEC`."""

    ROWS: int
    BLOCK: int = 1
    ACCUMULATE: bool = False
    """The kernel adds to the gradient instead of overwriting it."""
    WIDE: bool = False
    """Columns times their stride exceed 2^31."""
    TEMPERATURES: bool = False
    """Rows have their own temperatures: `Scales` of a program has (ROWS,) factors (see `scales_of_rows`)."""


_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def natural_exp(x):
    """Return tl.exp: kernels can pass this function to others, which Triton 3.6 refuses for its own."""
    return tl.exp(x)


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
def no_columns(row, SPEC: tl.constexpr):
    """The state of no columns. A merge with it changes no state."""
    zero = row.to(tl.float32) * 0.0
    nothing = zero - float("inf")
    x_label_or_maximum = zero
    if SPEC.LOSS != "cross_entropy" or SPEC.TOP_K:
        x_label_or_maximum = nothing
    return state_of((nothing, zero, x_label_or_maximum, zero, zero, zero, zero), SPEC)


@triton.jit
def tile_state(x, t, mask, columns, SPEC: tl.constexpr):
    """The state of a tile, (ROWS, BLOCK) to (ROWS,), without x_label. columns: number of columns in the mask."""
    m = tl.max(x, axis=1)
    x = x - reference(m)[:, None]
    exp_x = tl.exp(x)
    s = tl.sum(exp_x, axis=1)
    zero = s * 0.0
    h = zero
    if SPEC.ENTROPY:
        h = tl.sum(weigh(exp_x, x), axis=1)
    if SPEC.TOP_K:
        return state_of((m, s, zero - float("inf"), zero, zero, zero, h), SPEC)
    elif SPEC.LOSS == "cross_entropy":
        s_t = zero
        a = zero
        if SPEC.SMOOTHED:
            s_t = zero + columns
            a = tl.sum(tl.where(mask, x, 0.0), axis=1)
        return state_of((m, s, zero, s_t, a, h), SPEC)
    else:
        m_t = tl.max(t, axis=1)
        t = t - reference(m_t)[:, None]
        exp_t = tl.exp(t)
        s_t = tl.sum(exp_t, axis=1)
        if SPEC.LOSS == "soft_cross_entropy":
            terms = weigh(exp_t, x)
        elif SPEC.LOSS == "forward_kl":
            terms = weigh(exp_t, t - x)
        elif SPEC.LOSS == "reverse_kl":
            terms = weigh(exp_x, x - t)
        else:
            terms = exp_t * 0.0
        return state_of((m, s, m_t, s_t, tl.sum(terms, axis=1), h), SPEC)


class TopColumns(NamedTuple):
    """The logits in the teacher's columns of rows, (ROWS, TOP_BLOCK)."""

    local: Any
    """int64: the column of this rank."""
    held: Any
    """This rank has the column."""
    value: Any
    """fp32, below the cap, -inf where it isn't held. `x`: scaled."""
    x: Any


@triton.jit
def load_teacher(target, row, counts, shard, scales, SPEC: tl.constexpr):
    """The teacher's columns of rows and log q, (ROWS, TOP_BLOCK), -1 and -inf where there is none, and a `Teacher`."""
    number = tl.arange(0, SPEC.TOP_BLOCK)
    place = row[:, None] * SPEC.TOP_K + number[None, :]
    exists = counts[:, None] & (number < SPEC.TOP_K)[None, :]
    index = tl.load(target.indices + place, mask=exists, other=-1).to(tl.int64)
    exists = exists & label_counts(index, shard.vocab_size, shard.ignore_index)
    log_q = tl.load(target.log_q + place, mask=exists, other=float("-inf")).to(tl.float32)
    if not SPEC.BUCKET:
        log_q = log_q * scales.target
        log_q = log_q - reference(tl.max(log_q, axis=1))[:, None]
        log_q = log_q - tl.log(tl.sum(tl.exp(log_q), axis=1))[:, None]
    q = tl.exp(log_q)
    rest = tl.maximum(1.0 - tl.sum(q, axis=1), LEAST_REST)
    negative_entropy = tl.sum(weigh(q, log_q), axis=1)
    if SPEC.BUCKET:
        negative_entropy += rest * tl.log(rest)
    return TopTarget(tl.where(exists, index, -1), log_q), Teacher(rest, negative_entropy)


@triton.jit
def top_columns(logits, teacher, row, strides, shard, scales, SPEC: tl.constexpr):
    """Load the logits in the teacher's columns."""
    local = teacher.indices - shard.vocab_start
    held = (teacher.indices >= 0) & (local >= 0) & (local < shard.n_valid)
    place = row[:, None] * strides.logits_row + local * strides.logits_column
    value = tl.load(logits + place, mask=held, other=float("-inf"))
    value = tl.where(held, capped(value.to(tl.float32), SPEC.SOFTCAP), float("-inf"))
    return TopColumns(local, held, value, value * scales.logits)


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


@triton.jit
def shard_state(logits, target, row, counts, label, strides, shard, scales, SPEC: tl.constexpr):
    """The state of the columns of each row that this rank holds. Rows that do not count are not read."""
    state = no_columns(row, SPEC)
    for start in range(0, shard.n_valid, SPEC.BLOCK):
        _column, mask, x, t = load_block(logits, target, row, counts, start, strides, shard, scales, SPEC)
        x = scaled(x, scales.logits, SPEC)
        columns = tl.minimum(shard.n_valid - start, SPEC.BLOCK)
        state = merge_two(state, tile_state(x, t, mask, columns, SPEC), natural_exp, SPEC)
    if SPEC.TOP_K:
        teacher, _ = load_teacher(target, row, counts, shard, scales, SPEC)
        top = top_columns(logits, teacher, row, strides, shard, scales, SPEC)
        m_k = tl.max(top.x, axis=1)
        x = top.x - reference(m_k)[:, None]
        exp_x = tl.exp(x)
        q = tl.where(top.held, tl.exp(teacher.log_q), 0.0)
        terms = weigh(q, x)
        if SPEC.TOP_LOSS == "reverse_kl":
            terms = weigh(exp_x, x - teacher.log_q)
        numbers = (state.m, state.s, m_k, tl.sum(exp_x, axis=1), tl.sum(q, axis=1), tl.sum(terms, axis=1), state.h)
        return state_of(numbers, SPEC)
    elif SPEC.LOSS == "cross_entropy":
        local = label - shard.vocab_start
        held = counts & (local >= 0) & (local < shard.n_valid)
        x_label = tl.load(
            logits + row * strides.logits_row + local * strides.logits_column, mask=held, other=0.0
        )  # fmt: skip
        x_label = capped(x_label.to(tl.float32), SPEC.SOFTCAP) * scales.logits
        return state_of((state.m, state.s, x_label, state.s_t, state.a, state.h), SPEC)
    else:
        return state


@triton.jit
def gathered_state(gathered, row, exists, n_rows, world_size, WIDTH: tl.constexpr, SPEC: tl.constexpr):
    """Merge all ranks' statistics, (world_size, WIDTH, n_rows), in rank order: the same bits on every rank."""
    state = no_columns(row, SPEC)
    for rank in range(world_size):
        numbers = ()
        for number in tl.static_range(WIDTH):
            place = gathered + (rank * WIDTH + number) * n_rows + row
            numbers = numbers + (tl.load(place, mask=exists, other=0.0),)
        state = merge_two(state, state_of(numbers, SPEC), natural_exp, SPEC)
    return state
