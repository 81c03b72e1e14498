"""Triton kernels of the entropy losses. `entropy_loss` launches them and says what they compute.

A row's *state* is what is left of any set of its columns, five fp32 numbers a row, and two states of disjoint columns
merge into one: so tiles merge into a shard and shards into the vocabulary by the same arithmetic. With x and t the
scaled logits and target logits:

| | labels | two-logit losses |
| --- | --- | --- |
| 0 | m = max x | m = max x |
| 1 | s = sum exp(x - m) | s = sum exp(x - m) |
| 2 | x[label] where it is held, else 0 | m_t = max t |
| 3 | sum x (label smoothing only) | s_t = sum exp(t - m_t) |
| 4 | unused | a = sum of weight * difference, below |

| loss | weight | difference |
| --- | --- | --- |
| soft_cross_entropy | exp(t - m_t) | x - m |
| forward_kl | exp(t - m_t) | (t - m_t) - (x - m) |
| reverse_kl | exp(x - m) | (x - m) - (t - m_t) |

Everything is relative to the maxima, so that a large common offset of the logits costs no precision. Where all columns
are -inf the maximum is too, and 0 stands in for it as the reference of the exponents, whose -inf - (-inf) would be NaN.
A weight of zero gives zero, whatever it weighs (0 log 0 = 0).

Tiles are (ROWS, BLOCK): one row a program on a GPU, many in Triton's interpreter, whose cost is by operation and not by
element.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# A kernel's arguments are what Triton makes of them.

import triton
import triton.language as tl


@triton.jit
def _reference(maximum):
    return tl.where(maximum == float("-inf"), 0.0, maximum)


_INTERPRETED = tl.constexpr(not isinstance(_reference, triton.JITFunction))


@triton.jit
def _rounded(values, dtype: tl.constexpr):
    """fp32 to `dtype`, to the nearest even: the interpreter's own conversion to bf16 drops the low bits."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        values = tl.where(values == values, bits.to(tl.float32, bitcast=True), values)
    return values.to(dtype)


@triton.jit
def _weighted(weight, difference):
    return tl.where(weight == 0.0, 0.0, weight * difference)


@triton.jit
def _load_scaled(pointer, row_offset, column_offset, mask, scale):
    """A (ROWS, BLOCK) tile in fp32, times `scale`, with -inf where `mask` is false."""
    values = tl.load(pointer + row_offset[:, None] + column_offset[None, :], mask=mask, other=float("-inf"))
    return values.to(tl.float32) * scale


@triton.jit
def _tile_state(x, t, mask, LOSS: tl.constexpr, SMOOTHED: tl.constexpr):
    """The state of one tile. `t` is anything for labels."""
    m = tl.max(x, axis=1)
    x = x - _reference(m)[:, None]
    exp_x = tl.exp(x)
    s = tl.sum(exp_x, axis=1)
    b = s * 0.0
    c = b
    d = b
    if LOSS != "cross_entropy":
        b = tl.max(t, axis=1)
        t = t - _reference(b)[:, None]
        exp_t = tl.exp(t)
        c = tl.sum(exp_t, axis=1)
        if LOSS == "soft_cross_entropy":
            terms = _weighted(exp_t, x)
        elif LOSS == "forward_kl":
            terms = _weighted(exp_t, t - x)
        else:
            terms = _weighted(exp_x, x - t)
        d = tl.sum(terms, axis=1)
    elif SMOOTHED:
        c = tl.sum(tl.where(mask, x + _reference(m)[:, None], 0.0), axis=1)
    return m, s, b, c, d


@triton.jit
def _merge_exp(m_1, s_1, m_2, s_2):
    """Merge two (max, sum of exp); also the factor that each sum took and the shift of each reference."""
    m = tl.maximum(m_1, m_2)
    reference = _reference(m)
    factor_1 = tl.exp(m_1 - reference)
    factor_2 = tl.exp(m_2 - reference)
    return (
        m,
        s_1 * factor_1 + s_2 * factor_2,
        factor_1,
        factor_2,
        _reference(m_1) - reference,
        _reference(m_2) - reference,
    )


@triton.jit
def _merge(m_1, s_1, b_1, c_1, d_1, m_2, s_2, b_2, c_2, d_2, LOSS: tl.constexpr):
    """Merge the states of two disjoint sets of columns. Not associative in the last bit: the order is the caller's."""
    m, s, factor_1, factor_2, shift_1, shift_2 = _merge_exp(m_1, s_1, m_2, s_2)
    if LOSS == "cross_entropy":
        b = b_1 + b_2
        c = c_1 + c_2
        d = d_1
    else:
        b, c, factor_t1, factor_t2, shift_t1, shift_t2 = _merge_exp(b_1, c_1, b_2, c_2)
        if LOSS == "soft_cross_entropy":
            d_1 = _weighted(factor_t1, d_1 + c_1 * shift_1)
            d_2 = _weighted(factor_t2, d_2 + c_2 * shift_2)
        elif LOSS == "forward_kl":
            d_1 = _weighted(factor_t1, d_1 + c_1 * (shift_t1 - shift_1))
            d_2 = _weighted(factor_t2, d_2 + c_2 * (shift_t2 - shift_2))
        else:
            d_1 = _weighted(factor_1, d_1 + s_1 * (shift_1 - shift_t1))
            d_2 = _weighted(factor_2, d_2 + s_2 * (shift_2 - shift_t2))
        d = d_1 + d_2
    return m, s, b, c, d


@triton.jit
def _empty_state(row):
    """The state of no columns: what every other state merges with unchanged."""
    zero = row.to(tl.float32) * 0.0
    return zero - float("inf"), zero, zero, zero, zero


@triton.jit
def _rows_of_program(target, n_rows, vocab_size, ignore_index, LOSS: tl.constexpr, ROWS: tl.constexpr):
    """This program's rows (int64: offsets pass 2^31), which of them exist, which count, and their labels."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < n_rows
    counts = exists
    label = row * 0
    if LOSS == "cross_entropy":
        label = tl.load(target + row, mask=exists, other=-1).to(tl.int64)
        counts = exists & (label != ignore_index) & (label >= 0) & (label < vocab_size)
    return row, exists, counts, label


@triton.jit
def _columns(start, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """A block's columns. WIDE: times the column stride they pass 2^31."""
    column = start + tl.arange(0, BLOCK)
    if WIDE:
        column = column.to(tl.int64)
    return column


@triton.jit
def _shard_state(
    logits, target, row, counts, label, logits_row, logits_column, target_row, target_column, n_valid, vocab_start,
    logits_scale, target_scale, LOSS: tl.constexpr, SMOOTHED: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The state of a row's `n_valid` columns held here. Rows that do not count are not read."""
    m, s, b, c, d = _empty_state(row)
    if LOSS != "cross_entropy":
        b = m  # the maximum of no target logits
    for start in range(0, n_valid, BLOCK):
        column = _columns(start, WIDE, BLOCK)
        mask = counts[:, None] & (column < n_valid)[None, :]
        x = _load_scaled(logits, row * logits_row, column * logits_column, mask, logits_scale)
        t = x
        if LOSS != "cross_entropy":
            t = _load_scaled(target, row * target_row, column * target_column, mask, target_scale)
        m_2, s_2, b_2, c_2, d_2 = _tile_state(x, t, mask, LOSS, SMOOTHED)
        m, s, b, c, d = _merge(m, s, b, c, d, m_2, s_2, b_2, c_2, d_2, LOSS)
    if LOSS == "cross_entropy":
        local = label - vocab_start
        held = counts & (local >= 0) & (local < n_valid)
        b = (
            tl.load(logits + row * logits_row + local * logits_column, mask=held, other=0.0).to(tl.float32)
            * logits_scale
        )
    return m, s, b, c, d


@triton.jit
def statistics_kernel(
    logits, target, statistics, n_rows, logits_row, logits_column, target_row, target_column, n_valid, vocab_start,
    vocab_size, ignore_index, logits_scale, target_scale, LOSS: tl.constexpr, SMOOTHED: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the shard's state to `statistics` (WIDTH, n_rows) fp32: the part of it that the loss needs."""
    row, exists, counts, label = _rows_of_program(target, n_rows, vocab_size, ignore_index, LOSS, ROWS)
    m, s, b, c, d = _shard_state(
        logits, target, row, counts, label, logits_row, logits_column, target_row, target_column, n_valid, vocab_start,
        logits_scale, target_scale, LOSS, SMOOTHED, WIDE, BLOCK,
    )  # fmt: skip
    tl.store(statistics + row, m, mask=exists)
    tl.store(statistics + n_rows + row, s, mask=exists)
    tl.store(statistics + 2 * n_rows + row, b, mask=exists)
    if WIDTH > 3:
        tl.store(statistics + 3 * n_rows + row, c, mask=exists)
    if WIDTH > 4:
        tl.store(statistics + 4 * n_rows + row, d, mask=exists)


@triton.jit
def _gathered_state(gathered, row, exists, n_rows, world_size, LOSS: tl.constexpr, WIDTH: tl.constexpr):
    """Merge all ranks' statistics (world_size, WIDTH, n_rows) in rank order: the same bits on every rank."""
    m, s, b, c, d = _empty_state(row)
    if LOSS != "cross_entropy":
        b = m
    for rank in range(world_size):
        theirs = gathered + rank * WIDTH * n_rows + row
        m_2 = tl.load(theirs, mask=exists, other=0.0)
        s_2 = tl.load(theirs + n_rows, mask=exists, other=0.0)
        b_2 = tl.load(theirs + 2 * n_rows, mask=exists, other=0.0)
        c_2 = s_2
        d_2 = s_2
        if WIDTH > 3:
            c_2 = tl.load(theirs + 3 * n_rows, mask=exists, other=0.0)
        if WIDTH > 4:
            d_2 = tl.load(theirs + 4 * n_rows, mask=exists, other=0.0)
        m, s, b, c, d = _merge(m, s, b, c, d, m_2, s_2, b_2, c_2, d_2, LOSS)
    return m, s, b, c, d


@triton.jit
def _row_loss(m, s, b, c, d, vocab_size, label_smoothing, z_loss, LOSS: tl.constexpr, SMOOTHED: tl.constexpr):
    """The loss from the state of the whole vocabulary."""
    log_s = tl.log(s)
    if LOSS == "cross_entropy":
        loss = log_s + (_reference(m) - b)
        if SMOOTHED:
            loss = (1.0 - label_smoothing) * loss + label_smoothing * (log_s + (_reference(m) - c / vocab_size))
    elif LOSS == "soft_cross_entropy":
        loss = log_s - d / c
    elif LOSS == "forward_kl":
        loss = d / c - tl.log(c) + log_s
    else:
        loss = d / s - log_s + tl.log(c)
    log_z = _reference(m) + log_s
    return loss + z_loss * log_z * log_z, log_z


@triton.jit
def row_loss_kernel(
    target, gathered, row_loss, n_rows, world_size, vocab_size, ignore_index, label_smoothing, z_loss,
    LOSS: tl.constexpr, SMOOTHED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each row's loss from all ranks' statistics.

    A kernel of its own, with no argument that differs between ranks: compiled for another shard, the same arithmetic
    may be contracted to other multiply-adds, and the ranks' losses differ in the last bit.
    """
    row, exists, counts, _label = _rows_of_program(target, n_rows, vocab_size, ignore_index, LOSS, ROWS)
    m, s, b, c, d = _gathered_state(gathered, row, exists, n_rows, world_size, LOSS, WIDTH)
    loss, _log_z = _row_loss(m, s, b, c, d, vocab_size, label_smoothing, z_loss, LOSS, SMOOTHED)
    tl.store(row_loss + row, tl.where(counts, loss, 0.0), mask=exists)


@triton.jit
def loss_and_gradient_kernel(
    logits, target, gathered, inverse_count, row_loss, grad, n_rows, n_columns, world_size, logits_row, logits_column,
    target_row, target_column, grad_row, grad_column, n_valid, vocab_start, vocab_size, ignore_index, logits_scale,
    target_scale, label_smoothing, z_loss, grad_scale, LOSS: tl.constexpr, SMOOTHED: tl.constexpr,
    ACCUMULATE: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient over the columns held here and, with a vocabulary that is all here, each row's loss.

    gathered: all ranks' statistics; None for a vocabulary that is all here, whose state is then made by a first pass
    over the row, and the gradient's pass finds the row in the cache. inverse_count: a factor on the gradient in memory,
    or None. grad: None for the loss alone; may be the logits themselves, as each element is read before it is written.
    """
    row, exists, counts, label = _rows_of_program(target, n_rows, vocab_size, ignore_index, LOSS, ROWS)
    if gathered is None:
        m, s, b, c, d = _shard_state(
            logits, target, row, counts, label, logits_row, logits_column, target_row, target_column, n_valid,
            vocab_start, logits_scale, target_scale, LOSS, SMOOTHED, WIDE, BLOCK,
        )  # fmt: skip
    else:
        m, s, b, c, d = _gathered_state(gathered, row, exists, n_rows, world_size, LOSS, WIDTH)
    loss, log_z = _row_loss(m, s, b, c, d, vocab_size, label_smoothing, z_loss, LOSS, SMOOTHED)
    if gathered is None:
        tl.store(row_loss + row, tl.where(counts, loss, 0.0), mask=exists)
    if grad is not None:
        # All scales join in fp32 a row at a time, and what reaches memory is rounded once.
        scale = grad_scale * logits_scale
        if inverse_count is not None:
            scale = scale * tl.load(inverse_count)
        reference = _reference(m)[:, None]
        factor = scale / s
        if LOSS != "reverse_kl":
            factor = factor * (1.0 + 2.0 * z_loss * log_z)
        factor = factor[:, None]
        local = (label - vocab_start)[:, None]
        for start in range(0, n_columns, BLOCK):
            column = _columns(start, WIDE, BLOCK)
            mask = counts[:, None] & (column < n_valid)[None, :]
            x = _load_scaled(logits, row * logits_row, column * logits_column, mask, logits_scale) - reference
            g = tl.exp(x) * factor
            if LOSS == "cross_entropy":
                g = tl.where(column[None, :] == local, g - (1.0 - label_smoothing) * scale, g)
                if SMOOTHED:
                    g = g - label_smoothing / vocab_size * scale
            else:
                t = _load_scaled(target, row * target_row, column * target_column, mask, target_scale)
                t = t - _reference(b)[:, None]
                if LOSS == "reverse_kl":
                    g = _weighted(g, (x - t) - (d / s - 2.0 * z_loss * log_z)[:, None])
                else:
                    g = g - tl.exp(t) * (scale / c)[:, None]
            # Rows that do not count and padding get zero whatever the arithmetic above made of their -inf.
            g = tl.where(mask, g, 0.0)
            place = grad + (row * grad_row)[:, None] + (column * grad_column)[None, :]
            inside = exists[:, None] & (column < n_columns)[None, :]
            if ACCUMULATE:
                g = g + tl.load(place, mask=inside, other=0.0).to(tl.float32)
            tl.store(place, _rounded(g, grad.dtype.element_ty), mask=inside)


@triton.jit
def inverse_count_kernel(labels, inverse_count, n_rows, vocab_size, ignore_index, BLOCK: tl.constexpr):
    """1 / the number of rows that count, at least 1. One program: the order of sums, so the result, is fixed."""
    count = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, n_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        label = tl.load(labels + row, mask=row < n_rows, other=-1).to(tl.int64)
        count += ((label != ignore_index) & (label >= 0) & (label < vocab_size)).to(tl.int32)
    tl.store(inverse_count, 1.0 / tl.maximum(tl.sum(count, axis=0), 1).to(tl.float32))


@triton.jit
def reduce_kernel(row_loss, inverse_count, loss, n_rows, factor, BLOCK: tl.constexpr):
    """factor * sum(row_loss), times inverse_count where there is one. One program, for a fixed order."""
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        total += tl.load(row_loss + row, mask=row < n_rows, other=0.0)
    result = tl.sum(total, axis=0) * factor
    if inverse_count is not None:
        result = result * tl.load(inverse_count)
    tl.store(loss, result)


@triton.jit
def scale_kernel(
    values, factor, n_rows, n_columns, values_row, values_column, PER_ROW: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """values *= factor, in fp32 and rounded once. Rows of factor 1, the common upstream gradient, are not touched."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    by = tl.load(factor + row * PER_ROW, mask=row < n_rows, other=1.0).to(tl.float32)
    changed = (by != 1.0) & (row < n_rows)
    if tl.max(changed.to(tl.int32), axis=0) > 0:
        for start in range(0, n_columns, BLOCK):
            column = _columns(start, WIDE, BLOCK)
            mask = changed[:, None] & (column < n_columns)[None, :]
            place = values + (row * values_row)[:, None] + (column * values_column)[None, :]
            scaled = tl.load(place, mask=mask, other=0.0).to(tl.float32) * by[:, None]
            tl.store(place, _rounded(scaled, values.dtype.element_ty), mask=mask)
