"""Row states: numbers that stand for any set of columns of a row, and that merge.

States of disjoint columns merge into one state. So tiles merge into a shard, and shards merge into the vocabulary, by
the same arithmetic. All kernels use these letters. x and t are the scaled logits and target logits, in nats:

| name | meaning | unit | losses |
| --- | --- | --- | --- |
| m | maximum: max x | nats | all |
| s | sum of exponentials: sum exp(x - m) | none | all |
| x_label | logit of the label: x[label] where this rank holds it, else 0 | nats | of labels |
| m_t | maximum of the target logits: max t | nats | against target logits |
| s_t | sum of exponentials: sum exp(t - m_t) | none | against target logits; of labels, with label smoothing |
| a | sum of weighted differences, below | nats | as s_t |
| h | weighted sum of logits: sum exp(x - m) (x - m) | nats | all, if entropies are wanted |

A number that the loss doesn't need is 0 here. `numbers_of` says which numbers a kernel stores for other kernels and
ranks, and in which order. A suffix says which of two merged states a number is from: `w_1`, `w_2`.

Label smoothing is a soft cross-entropy against equal target logits: there s_t is the number of columns.

| loss | weight | difference |
| --- | --- | --- |
| label smoothing | 1 | x - m |
| soft_cross_entropy | exp(t - m_t) | x - m |
| forward_kl | exp(t - m_t) | (t - m_t) - (x - m) |
| reverse_kl | exp(x - m) | (x - m) - (t - m_t) |

Everything is relative to the maxima, so that a large common offset of the logits costs no precision. Where all columns
are -inf, the maximum is -inf too. Then the exponents are relative to 0, because -inf - (-inf) would be NaN. A weight of
zero gives zero, even if the difference is infinite (0 log 0 = 0).

Tiles are (ROWS, BLOCK). A program works on one row on a GPU, and on many in Triton's interpreter, whose cost is per
operation and not per element.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class State(NamedTuple):
    """The state of rows, (ROWS,) fp32 each."""

    m: Any
    s: Any
    x_label: Any
    m_t: Any
    s_t: Any
    a: Any
    h: Any


class TwoPassSpec(NamedTuple):
    """The constants that a two-pass kernel is compiled for. Kernels receive it as the constant `SPEC`."""

    LOSS: str
    SMOOTHED: bool
    """Labels are smoothed."""
    ENTROPY: bool
    """The entropy of each row is wanted."""
    ROWS: int
    BLOCK: int = 1
    LOGPROB: bool = False
    """The kernel stores log-probabilities of labels: the negative cross-entropies."""
    SOFTCAP: float = 0.0
    """0: no cap."""
    TARGET_SOFTCAP: float = 0.0
    ACCUMULATE: bool = False
    """The kernel adds to the gradient instead of overwriting it."""
    WIDE: bool = False
    """Columns times their stride exceed 2^31."""


@triton.jit
def reference(maximum):
    """The number that exponents are relative to: 0 instead of the maximum -inf."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


INTERPRETED: bool = not isinstance(reference, triton.JITFunction)
"""True if the kernels run in Triton's interpreter: TRITON_INTERPRET was 1 when triton was imported."""
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
def weigh(weight, difference):
    """weight * difference, or 0 where the weight is 0, even if the difference is infinite."""
    return tl.where(weight == 0.0, 0.0, weight * difference)


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
def rows_of_program(target, n_rows, vocab_size, ignore_index, SPEC: tl.constexpr):
    """The rows of this program, (ROWS,): indices, which of them exist, which of them count, and their labels.

    Indices are int64, because offsets exceed 2^31.
    """
    row = tl.program_id(0).to(tl.int64) * SPEC.ROWS + tl.arange(0, SPEC.ROWS)
    exists = row < n_rows
    counts = exists
    label = row * 0
    if SPEC.LOSS == "cross_entropy":
        label = tl.load(target + row, mask=exists, other=-1).to(tl.int64)
        counts = exists & (label != ignore_index) & (label >= 0) & (label < vocab_size)
    return row, exists, counts, label


@triton.jit
def block_columns(start, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The columns of a block, (BLOCK,). WIDE: times the column stride they exceed 2^31."""
    column = start + tl.arange(0, BLOCK)
    if WIDE:
        column = column.to(tl.int64)
    return column


@triton.jit
def no_columns(row, SPEC: tl.constexpr):
    """The state of no columns. A merge with it changes no state."""
    zero = row.to(tl.float32) * 0.0
    nothing = zero - float("inf")
    if SPEC.LOSS == "cross_entropy":
        return State(nothing, zero, zero, zero, zero, zero, zero)
    else:
        return State(nothing, zero, zero, nothing, zero, zero, zero)


@triton.jit
def tile_state(x, t, mask, columns, SPEC: tl.constexpr):
    """The state of a tile, (ROWS, BLOCK) to (ROWS,), without x_label. With labels `t` is not used.

    columns: number of columns in the mask.
    """
    m = tl.max(x, axis=1)
    x = x - reference(m)[:, None]
    exp_x = tl.exp(x)
    s = tl.sum(exp_x, axis=1)
    zero = s * 0.0
    h = zero
    if SPEC.ENTROPY:
        h = tl.sum(weigh(exp_x, x), axis=1)
    if SPEC.LOSS == "cross_entropy":
        s_t = zero
        a = zero
        if SPEC.SMOOTHED:
            s_t = zero + columns
            a = tl.sum(tl.where(mask, x, 0.0), axis=1)
        return State(m, s, zero, zero, s_t, a, h)
    else:
        m_t = tl.max(t, axis=1)
        t = t - reference(m_t)[:, None]
        exp_t = tl.exp(t)
        s_t = tl.sum(exp_t, axis=1)
        if SPEC.LOSS == "soft_cross_entropy":
            terms = weigh(exp_t, x)
        elif SPEC.LOSS == "forward_kl":
            terms = weigh(exp_t, t - x)
        else:
            terms = weigh(exp_x, x - t)
        return State(m, s, zero, m_t, s_t, tl.sum(terms, axis=1), h)


@triton.jit
def _shifted(state, weight, weight_t, shift, shift_t, SPEC: tl.constexpr):
    """The sum of weighted differences `a` relative to new references, which are lower by the shifts."""
    if SPEC.LOSS == "soft_cross_entropy":
        return weigh(weight_t, state.a + state.s_t * shift)
    elif SPEC.LOSS == "forward_kl":
        return weigh(weight_t, state.a + state.s_t * (shift_t - shift))
    else:
        return weigh(weight, state.a + state.s * (shift - shift_t))


@triton.jit
def merge_two(one, two, SPEC: tl.constexpr):
    """Merge the states of two disjoint sets of columns.

    The merge is not associative in the last bit, so the caller must keep one order.
    """
    m = tl.maximum(one.m, two.m)
    r = reference(m)
    w_1 = tl.exp(one.m - r)
    w_2 = tl.exp(two.m - r)
    s = one.s * w_1 + two.s * w_2
    shift_1 = reference(one.m) - r
    shift_2 = reference(two.m) - r
    h = one.h
    if SPEC.ENTROPY:
        h = weigh(w_1, one.h + one.s * shift_1) + weigh(w_2, two.h + two.s * shift_2)
    if SPEC.LOSS == "cross_entropy":
        s_t = one.s_t
        a = one.a
        if SPEC.SMOOTHED:
            s_t = one.s_t + two.s_t
            a = (one.a + one.s_t * shift_1) + (two.a + two.s_t * shift_2)
        return State(m, s, one.x_label + two.x_label, one.m_t, s_t, a, h)
    else:
        m_t = tl.maximum(one.m_t, two.m_t)
        r_t = reference(m_t)
        wt_1 = tl.exp(one.m_t - r_t)
        wt_2 = tl.exp(two.m_t - r_t)
        s_t = one.s_t * wt_1 + two.s_t * wt_2
        a_1 = _shifted(one, w_1, wt_1, shift_1, reference(one.m_t) - r_t, SPEC)
        a_2 = _shifted(two, w_2, wt_2, shift_2, reference(two.m_t) - r_t, SPEC)
        return State(m, s, one.x_label, m_t, s_t, a_1 + a_2, h)


@triton.jit
def shard_state(logits, target, row, counts, label, strides, shard, scales, SPEC: tl.constexpr):
    """The state of the columns of each row that this rank holds. Rows that do not count are not read.

    The types of strides, shard and scales are in `kernels`.
    """
    state = no_columns(row, SPEC)
    for start in range(0, shard.n_valid, SPEC.BLOCK):
        column = block_columns(start, SPEC.WIDE, SPEC.BLOCK)
        mask = counts[:, None] & (column < shard.n_valid)[None, :]
        x = load_capped(logits, row * strides.logits_row, column * strides.logits_column, mask, SPEC.SOFTCAP)
        x = x * scales.logits
        t = x
        if SPEC.LOSS != "cross_entropy":
            t = load_capped(target, row * strides.target_row, column * strides.target_column, mask, SPEC.TARGET_SOFTCAP)
            t = t * scales.target
        columns = tl.minimum(shard.n_valid - start, SPEC.BLOCK)
        state = merge_two(state, tile_state(x, t, mask, columns, SPEC), SPEC)
    if SPEC.LOSS == "cross_entropy":
        local = label - shard.vocab_start
        held = counts & (local >= 0) & (local < shard.n_valid)
        x_label = tl.load(
            logits + row * strides.logits_row + local * strides.logits_column, mask=held, other=0.0
        )  # fmt: skip
        x_label = capped(x_label.to(tl.float32), SPEC.SOFTCAP) * scales.logits
        return State(state.m, state.s, x_label, state.m_t, state.s_t, state.a, state.h)
    else:
        return state


@triton.jit
def numbers_of(state, SPEC: tl.constexpr):
    """The numbers of a state that the loss needs, in the order in which kernels store them."""
    if SPEC.LOSS != "cross_entropy":
        numbers = (state.m, state.s, state.m_t, state.s_t, state.a)
    elif SPEC.SMOOTHED:
        numbers = (state.m, state.s, state.x_label, state.s_t, state.a)
    else:
        numbers = (state.m, state.s, state.x_label)
    if SPEC.ENTROPY:
        numbers = numbers + (state.h,)
    return numbers


@triton.jit
def _load_state(place, n_rows, exists, SPEC: tl.constexpr):
    """Load a state that was stored as `numbers_of`, n_rows apart. Numbers that the loss does not need are any."""
    m = tl.load(place, mask=exists, other=0.0)
    s = tl.load(place + n_rows, mask=exists, other=0.0)
    third = tl.load(place + 2 * n_rows, mask=exists, other=0.0)
    fourth = s
    a = s
    h = s
    if SPEC.LOSS != "cross_entropy" or SPEC.SMOOTHED:
        fourth = tl.load(place + 3 * n_rows, mask=exists, other=0.0)
        a = tl.load(place + 4 * n_rows, mask=exists, other=0.0)
    if SPEC.ENTROPY:
        NUMBERS: tl.constexpr = 3 if SPEC.LOSS == "cross_entropy" and not SPEC.SMOOTHED else 5
        h = tl.load(place + NUMBERS * n_rows, mask=exists, other=0.0)
    if SPEC.LOSS == "cross_entropy":
        return State(m, s, third, s, fourth, a, h)
    else:
        return State(m, s, s, third, fourth, a, h)


@triton.jit
def gathered_state(gathered, row, exists, n_rows, world_size, WIDTH: tl.constexpr, SPEC: tl.constexpr):
    """Merge all ranks' statistics, (world_size, WIDTH, n_rows), in rank order: the same bits on every rank."""
    state = no_columns(row, SPEC)
    for rank in range(world_size):
        shard = _load_state(gathered + rank * WIDTH * n_rows + row, n_rows, exists, SPEC)
        state = merge_two(state, shard, SPEC)
    return state


@triton.jit
def losses_of_rows(state, label_smoothing, z_loss, SPEC: tl.constexpr):
    """The loss of each row, (ROWS,), and the log of its sum of exp, from the state of the whole vocabulary.

    With LOGPROB the label's log-probability takes the place of the loss.
    """
    log_s = tl.log(state.s)
    log_z = reference(state.m) + log_s
    if SPEC.LOSS == "cross_entropy":
        loss = log_s + (reference(state.m) - state.x_label)
        if SPEC.SMOOTHED:
            of_all = log_s - state.a / state.s_t
            loss = (1.0 - label_smoothing) * loss + label_smoothing * of_all
    elif SPEC.LOSS == "soft_cross_entropy":
        loss = log_s - state.a / state.s_t
    elif SPEC.LOSS == "forward_kl":
        loss = state.a / state.s_t - tl.log(state.s_t) + log_s
    else:
        loss = state.a / state.s - log_s + tl.log(state.s_t)
    loss = loss + z_loss * log_z * log_z
    if SPEC.LOGPROB:
        loss = -loss
    return loss, log_z


@triton.jit
def entropies_of_rows(state):
    """The entropy of each row's softmax in nats, (ROWS,), from the state of the whole vocabulary."""
    return tl.log(state.s) - state.h / state.s
