"""The kernels of the entropy loss that go over a row twice. `launch` launches them.

m, s, b, c, d and e are the numbers of a row's state: `state` has a table of them.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton decides the types of a kernel's arguments.

import triton
import triton.language as tl

from tpbench.kernels.two_pass.state import (
    block_columns,
    entropy_of_rows,
    gathered_state,
    load_capped,
    load_scaled,
    loss_of_rows,
    reference_of,
    round_to,
    rows_of_program,
    shard_state,
    weigh,
)


@triton.jit
def statistics_kernel(
    logits, target, statistics, n_rows, logits_row, logits_column, target_row, target_column, n_valid, vocab_start,
    vocab_size, ignore_index, logits_scale, target_scale, LOSS: tl.constexpr, SMOOTHED: tl.constexpr,
    ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, TARGET_SOFTCAP: tl.constexpr, WIDTH: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the WIDTH numbers of the shard's state that the loss needs to `statistics`, (WIDTH, n_rows) fp32."""
    row, exists, counts, label = rows_of_program(target, n_rows, vocab_size, ignore_index, LOSS, ROWS)
    m, s, b, c, d, e = shard_state(
        logits, target, row, counts, label, logits_row, logits_column, target_row, target_column, n_valid, vocab_start,
        logits_scale, target_scale, LOSS, SMOOTHED, ENTROPY, SOFTCAP, TARGET_SOFTCAP, WIDE, BLOCK,
    )  # fmt: skip
    tl.store(statistics + row, m, mask=exists)
    tl.store(statistics + n_rows + row, s, mask=exists)
    tl.store(statistics + 2 * n_rows + row, b, mask=exists)
    if WIDTH - ENTROPY > 3:
        tl.store(statistics + 3 * n_rows + row, c, mask=exists)
    if WIDTH - ENTROPY > 4:
        tl.store(statistics + 4 * n_rows + row, d, mask=exists)
    if ENTROPY:
        tl.store(statistics + (WIDTH - 1) * n_rows + row, e, mask=exists)


@triton.jit
def row_loss_kernel(
    target, gathered, row_loss, row_entropy, n_rows, world_size, vocab_size, ignore_index, label_smoothing, z_loss,
    LOSS: tl.constexpr, LOGPROB: tl.constexpr, SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the loss of each row, and with ENTROPY its entropy, from all ranks' statistics.

    This is a separate kernel, and none of its arguments differs between ranks. If it were compiled for each shard, the
    compiler could contract the arithmetic to other multiply-adds, and the ranks' losses would differ in the last bit.
    """
    row, exists, counts, _label = rows_of_program(target, n_rows, vocab_size, ignore_index, LOSS, ROWS)
    m, s, b, c, d, e = gathered_state(gathered, row, exists, n_rows, world_size, LOSS, ENTROPY, WIDTH)
    loss, _log_z = loss_of_rows(m, s, b, c, d, vocab_size, label_smoothing, z_loss, LOSS, LOGPROB, SMOOTHED)
    tl.store(row_loss + row, tl.where(counts, loss, 0.0), mask=exists)
    if ENTROPY:
        tl.store(row_entropy + row, tl.where(counts, entropy_of_rows(s, e), 0.0), mask=exists)


@triton.jit
def loss_and_gradient_kernel(
    logits, target, gathered, inverse_count, row_loss, grad, row_entropy, row_grad, entropy_grad, n_rows, n_columns,
    world_size, logits_row, logits_column, target_row, target_column, grad_row, grad_column, n_valid, vocab_start,
    vocab_size, ignore_index, logits_scale, target_scale, label_smoothing, z_loss, grad_scale, entropy_scale,
    LOSS: tl.constexpr, LOGPROB: tl.constexpr, SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr,
    TARGET_SOFTCAP: tl.constexpr, ACCUMULATE: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the columns that this rank holds. Without `gathered`, also compute each row's loss.

    gathered: all ranks' statistics. None: this rank holds the whole vocabulary. Then a first pass over the row computes
    the state, and the pass for the gradient finds the row in the cache. inverse_count: a factor on the gradient in
    memory, or None. grad: None for the loss alone. It may be the logits: each element is read before it is written.
    row_grad, entropy_grad: None, or (n_rows,) fp32: upstream gradients of the rows' losses and entropies.
    """
    row, exists, counts, label = rows_of_program(target, n_rows, vocab_size, ignore_index, LOSS, ROWS)
    if gathered is None:
        m, s, b, c, d, e = shard_state(
            logits, target, row, counts, label, logits_row, logits_column, target_row, target_column, n_valid,
            vocab_start, logits_scale, target_scale, LOSS, SMOOTHED, ENTROPY, SOFTCAP, TARGET_SOFTCAP, WIDE, BLOCK,
        )  # fmt: skip
    else:
        m, s, b, c, d, e = gathered_state(gathered, row, exists, n_rows, world_size, LOSS, ENTROPY, WIDTH)
    loss, log_z = loss_of_rows(m, s, b, c, d, vocab_size, label_smoothing, z_loss, LOSS, LOGPROB, SMOOTHED)
    if gathered is None:
        tl.store(row_loss + row, tl.where(counts, loss, 0.0), mask=exists)
        if ENTROPY:
            tl.store(row_entropy + row, tl.where(counts, entropy_of_rows(s, e), 0.0), mask=exists)
    if grad is not None:
        # All scales join in fp32, once per row. The gradient is rounded once.
        scale = grad_scale * logits_scale
        if inverse_count is not None:
            scale = scale * tl.load(inverse_count)
        scale = tl.zeros([ROWS], tl.float32) + scale
        if row_grad is not None:
            scale = scale * tl.load(row_grad + row, mask=exists, other=0.0)
        reference = reference_of(m)[:, None]
        factor = scale / s
        if LOSS != "reverse_kl":
            factor = factor * (1.0 + 2.0 * z_loss * log_z)
        factor = factor[:, None]
        scale = scale[:, None]
        if entropy_grad is not None:
            of_entropy = tl.load(entropy_grad + row, mask=exists, other=0.0) * (entropy_scale * logits_scale)
            of_entropy = (of_entropy / s)[:, None]
        local = (label - vocab_start)[:, None]
        for start in range(0, n_columns, BLOCK):
            column = block_columns(start, WIDE, BLOCK)
            mask = counts[:, None] & (column < n_valid)[None, :]
            value = load_capped(logits, row * logits_row, column * logits_column, mask, SOFTCAP)
            x = value * logits_scale - reference
            exp_x = tl.exp(x)
            g = exp_x * factor
            if LOSS == "cross_entropy":
                g = tl.where(column[None, :] == local, g - (1.0 - label_smoothing) * scale, g)
                if SMOOTHED:
                    g = g - label_smoothing / vocab_size * scale
            else:
                t = load_scaled(target, row * target_row, column * target_column, mask, target_scale, TARGET_SOFTCAP)
                t = t - reference_of(b)[:, None]
                if LOSS == "reverse_kl":
                    g = weigh(g, (x - t) - (d / s - 2.0 * z_loss * log_z)[:, None])
                else:
                    g = g - tl.exp(t) * (scale / c[:, None])
            if entropy_grad is not None:
                g = g - weigh(exp_x, x - (e / s)[:, None]) * of_entropy
            if SOFTCAP > 0:
                slope = value / SOFTCAP
                g = g * (1.0 - slope * slope)
            # Rows that do not count and padding get zero, even if their -inf became NaN above.
            g = tl.where(mask, g, 0.0)
            place = grad + (row * grad_row)[:, None] + (column * grad_column)[None, :]
            inside = exists[:, None] & (column < n_columns)[None, :]
            if ACCUMULATE:
                g = g + tl.load(place, mask=inside, other=0.0).to(tl.float32)
            tl.store(place, round_to(g, grad.dtype.element_ty), mask=inside)


@triton.jit
def inverse_count_kernel(labels, inverse_count, n_rows, vocab_size, ignore_index, BLOCK: tl.constexpr):
    """Store 1 / the number of rows that count, at least 1. One program sums, so that the result is reproducible."""
    count = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, n_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        label = tl.load(labels + row, mask=row < n_rows, other=-1).to(tl.int64)
        count += ((label != ignore_index) & (label >= 0) & (label < vocab_size)).to(tl.int32)
    tl.store(inverse_count, 1.0 / tl.maximum(tl.sum(count, axis=0), 1).to(tl.float32))


@triton.jit
def reduce_kernel(row_loss, inverse_count, loss, n_rows, factor, BLOCK: tl.constexpr):
    """Store factor * sum(row_loss), times inverse_count unless it is None. One program sums in a fixed order."""
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
    """Multiply values by factor in fp32, rounded once. Rows with the factor 1, which is common, are not written."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    by = tl.load(factor + row * PER_ROW, mask=row < n_rows, other=1.0).to(tl.float32)
    changed = (by != 1.0) & (row < n_rows)
    if tl.max(changed.to(tl.int32), axis=0) > 0:
        for start in range(0, n_columns, BLOCK):
            column = block_columns(start, WIDE, BLOCK)
            mask = changed[:, None] & (column < n_columns)[None, :]
            place = values + (row * values_row)[:, None] + (column * values_column)[None, :]
            scaled = tl.load(place, mask=mask, other=0.0).to(tl.float32) * by[:, None]
            tl.store(place, round_to(scaled, values.dtype.element_ty), mask=mask)
