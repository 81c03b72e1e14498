"""Row states of the two-pass kernels: six numbers that stand for any set of columns of a row, and that merge.

States of disjoint columns merge into one state. So tiles merge into a shard, and shards merge into the vocabulary, by
the same arithmetic. A state has six fp32 numbers per row. The code names them by letters, because the meaning of some
depends on the loss. x and t are the scaled logits and target logits, in nats:

| name | meaning with labels | meaning with target logits | unit |
| --- | --- | --- | --- |
| m | maximum: max x | the same | nats |
| s | sum of exponentials: sum exp(x - m) | the same | none |
| b | logit of the label: x[label] where this rank holds it, else 0 | maximum: m_t = max t | nats |
| c | sum of logits: sum x (label smoothing only) | sum of exponentials: s_t = sum exp(t - m_t) | nats, none |
| d | unused | weighted sum of differences: sum of weight * difference, below | nats |
| e | weighted sum of logits: sum exp(x - m) (x - m) (entropy only) | the same | nats |

A suffix says which of two merged states a number is from: `m_1`, `m_2`. Kernels store the numbers that the loss needs,
in the order of the table.

| loss | weight | difference |
| --- | --- | --- |
| soft_cross_entropy | exp(t - m_t) | x - m |
| forward_kl | exp(t - m_t) | (t - m_t) - (x - m) |
| reverse_kl | exp(x - m) | (x - m) - (t - m_t) |

Everything is relative to the maxima, so that a large common offset of the logits costs no precision. Where all columns
are -inf, the maximum is -inf too. Then the exponents are relative to 0, because -inf - (-inf) would be NaN. A weight of
zero gives zero, even if the difference is infinite (0 log 0 = 0).

Tiles are (ROWS, BLOCK). A program works on one row on a GPU, and on many in Triton's interpreter, whose cost is per
operation and not per element.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton decides the types of a kernel's arguments.

import triton
import triton.language as tl


@triton.jit
def reference_of(maximum):
    """The number that exponents are relative to: 0 instead of the maximum -inf."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


INTERPRETED: bool = not isinstance(reference_of, triton.JITFunction)
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
    """SOFTCAP * tanh(values / SOFTCAP), in fp32. SOFTCAP 0: no cap."""
    if SOFTCAP > 0:
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
def load_scaled(pointer, row_offset, column_offset, mask, scale, SOFTCAP: tl.constexpr):
    """Load a tile, (ROWS, BLOCK), in fp32 below the cap, times `scale`. Elements outside `mask` are -inf."""
    return load_capped(pointer, row_offset, column_offset, mask, SOFTCAP) * scale


@triton.jit
def _tile_state(x, t, mask, LOSS: tl.constexpr, SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr):
    """The state of a tile, (ROWS, BLOCK) to six times (ROWS,). With labels `t` is not used."""
    m = tl.max(x, axis=1)
    x = x - reference_of(m)[:, None]
    exp_x = tl.exp(x)
    s = tl.sum(exp_x, axis=1)
    b = s * 0.0
    c = b
    d = b
    e = b
    if ENTROPY:
        e = tl.sum(weigh(exp_x, x), axis=1)
    if LOSS != "cross_entropy":
        b = tl.max(t, axis=1)
        t = t - reference_of(b)[:, None]
        exp_t = tl.exp(t)
        c = tl.sum(exp_t, axis=1)
        if LOSS == "soft_cross_entropy":
            terms = weigh(exp_t, x)
        elif LOSS == "forward_kl":
            terms = weigh(exp_t, t - x)
        else:
            terms = weigh(exp_x, x - t)
        d = tl.sum(terms, axis=1)
    elif SMOOTHED:
        c = tl.sum(tl.where(mask, x + reference_of(m)[:, None], 0.0), axis=1)
    return m, s, b, c, d, e


@triton.jit
def _merge_exp(m_1, s_1, m_2, s_2):
    """Merge two pairs (max, sum of exp). Also returns the factor of each sum and the shift of each reference."""
    m = tl.maximum(m_1, m_2)
    reference = reference_of(m)
    factor_1 = tl.exp(m_1 - reference)
    factor_2 = tl.exp(m_2 - reference)
    return (
        m,
        s_1 * factor_1 + s_2 * factor_2,
        factor_1,
        factor_2,
        reference_of(m_1) - reference,
        reference_of(m_2) - reference,
    )


@triton.jit
def _merge(
    m_1, s_1, b_1, c_1, d_1, e_1, m_2, s_2, b_2, c_2, d_2, e_2, LOSS: tl.constexpr, ENTROPY: tl.constexpr
):  # fmt: skip
    """Merge the states of two disjoint sets of columns.

    The merge is not associative in the last bit, so the caller must keep one order.
    """
    m, s, factor_1, factor_2, shift_1, shift_2 = _merge_exp(m_1, s_1, m_2, s_2)
    e = e_1
    if ENTROPY:
        e = weigh(factor_1, e_1 + s_1 * shift_1) + weigh(factor_2, e_2 + s_2 * shift_2)
    if LOSS == "cross_entropy":
        b = b_1 + b_2
        c = c_1 + c_2
        d = d_1
    else:
        b, c, factor_t1, factor_t2, shift_t1, shift_t2 = _merge_exp(b_1, c_1, b_2, c_2)
        if LOSS == "soft_cross_entropy":
            d_1 = weigh(factor_t1, d_1 + c_1 * shift_1)
            d_2 = weigh(factor_t2, d_2 + c_2 * shift_2)
        elif LOSS == "forward_kl":
            d_1 = weigh(factor_t1, d_1 + c_1 * (shift_t1 - shift_1))
            d_2 = weigh(factor_t2, d_2 + c_2 * (shift_t2 - shift_2))
        else:
            d_1 = weigh(factor_1, d_1 + s_1 * (shift_1 - shift_t1))
            d_2 = weigh(factor_2, d_2 + s_2 * (shift_2 - shift_t2))
        d = d_1 + d_2
    return m, s, b, c, d, e


@triton.jit
def _empty_state(row):
    """The state of no columns. A merge with it changes no state."""
    zero = row.to(tl.float32) * 0.0
    return zero - float("inf"), zero, zero, zero, zero, zero


@triton.jit
def rows_of_program(target, n_rows, vocab_size, ignore_index, LOSS: tl.constexpr, ROWS: tl.constexpr):
    """The rows of this program, (ROWS,): indices, which of them exist, which of them count, and their labels.

    Indices are int64, because offsets exceed 2^31.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < n_rows
    counts = exists
    label = row * 0
    if LOSS == "cross_entropy":
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
def shard_state(
    logits, target, row, counts, label, logits_row, logits_column, target_row, target_column, n_valid, vocab_start,
    logits_scale, target_scale, LOSS: tl.constexpr, SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr,
    SOFTCAP: tl.constexpr, TARGET_SOFTCAP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The state of the `n_valid` columns of each row that this rank holds. Rows that do not count are not read."""
    m, s, b, c, d, e = _empty_state(row)
    if LOSS != "cross_entropy":
        b = m  # the maximum of no target logits
    for start in range(0, n_valid, BLOCK):
        column = block_columns(start, WIDE, BLOCK)
        mask = counts[:, None] & (column < n_valid)[None, :]
        x = load_scaled(logits, row * logits_row, column * logits_column, mask, logits_scale, SOFTCAP)
        t = x
        if LOSS != "cross_entropy":
            t = load_scaled(target, row * target_row, column * target_column, mask, target_scale, TARGET_SOFTCAP)
        m_2, s_2, b_2, c_2, d_2, e_2 = _tile_state(x, t, mask, LOSS, SMOOTHED, ENTROPY)
        m, s, b, c, d, e = _merge(m, s, b, c, d, e, m_2, s_2, b_2, c_2, d_2, e_2, LOSS, ENTROPY)
    if LOSS == "cross_entropy":
        local = label - vocab_start
        held = counts & (local >= 0) & (local < n_valid)
        own = tl.load(logits + row * logits_row + local * logits_column, mask=held, other=0.0).to(tl.float32)
        b = capped(own, SOFTCAP) * logits_scale
    return m, s, b, c, d, e


@triton.jit
def gathered_state(
    gathered, row, exists, n_rows, world_size, LOSS: tl.constexpr, ENTROPY: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Merge all ranks' statistics, (world_size, WIDTH, n_rows), in rank order: the same bits on every rank."""
    m, s, b, c, d, e = _empty_state(row)
    if LOSS != "cross_entropy":
        b = m
    for rank in range(world_size):
        theirs = gathered + rank * WIDTH * n_rows + row
        m_2 = tl.load(theirs, mask=exists, other=0.0)
        s_2 = tl.load(theirs + n_rows, mask=exists, other=0.0)
        b_2 = tl.load(theirs + 2 * n_rows, mask=exists, other=0.0)
        c_2 = s_2
        d_2 = s_2
        e_2 = s_2
        if WIDTH - ENTROPY > 3:
            c_2 = tl.load(theirs + 3 * n_rows, mask=exists, other=0.0)
        if WIDTH - ENTROPY > 4:
            d_2 = tl.load(theirs + 4 * n_rows, mask=exists, other=0.0)
        if ENTROPY:
            e_2 = tl.load(theirs + (WIDTH - 1) * n_rows, mask=exists, other=0.0)
        m, s, b, c, d, e = _merge(m, s, b, c, d, e, m_2, s_2, b_2, c_2, d_2, e_2, LOSS, ENTROPY)
    return m, s, b, c, d, e


@triton.jit
def loss_of_rows(
    m, s, b, c, d, vocab_size, label_smoothing, z_loss, LOSS: tl.constexpr, LOGPROB: tl.constexpr,
    SMOOTHED: tl.constexpr,
):  # fmt: skip
    """The loss of each row, (ROWS,), and the log of its sum of exp, from the state of the whole vocabulary.

    With LOGPROB the label's log-probability takes the place of the loss.
    """
    log_s = tl.log(s)
    if LOSS == "cross_entropy":
        loss = log_s + (reference_of(m) - b)
        if SMOOTHED:
            loss = (1.0 - label_smoothing) * loss + label_smoothing * (log_s + (reference_of(m) - c / vocab_size))
    elif LOSS == "soft_cross_entropy":
        loss = log_s - d / c
    elif LOSS == "forward_kl":
        loss = d / c - tl.log(c) + log_s
    else:
        loss = d / s - log_s + tl.log(c)
    log_z = reference_of(m) + log_s
    loss = loss + z_loss * log_z * log_z
    if LOGPROB:
        loss = -loss
    return loss, log_z


@triton.jit
def entropy_of_rows(s, e):
    """The entropy of each row's softmax in nats, (ROWS,), from the state of the whole vocabulary."""
    return tl.log(s) - e / s
