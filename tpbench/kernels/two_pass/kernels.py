"""The entropy loss by kernels that go over a row twice: once for its statistics, once for its gradient.

One launch can do both: then the second pass may find the row in the cache (`algorithm="two_reads"`). Or two launches do
it with the statistics in memory between them, where ranks exchange theirs (`algorithm="two_kernels"`).

The statistics are the numbers of a row's state that the loss needs. `row_terms` has a table of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpbench.kernels.row_terms import load_inputs, numbers_of, reference, row_terms, softmax_of_rows, store_rows, weigh
from tpbench.kernels.two_pass.blocks import (
    block_columns,
    label_counts,
    load_block,
    round_to,
    rows_of_program,
    scaled,
    scales_of_rows,
)
from tpbench.kernels.two_pass.state import gathered_state, load_teacher, shard_state, top_columns


@triton.jit
def statistics_kernel(
    logits, target, statistics, row_weight, temperature, n_rows, strides, shard, scales, SPEC: tl.constexpr
):
    """Write the numbers of the shard's state that the loss needs to `statistics`, (numbers, n_rows) fp32."""
    row, exists, counts, label = rows_of_program(target, row_weight, n_rows, shard, SPEC)
    scales = scales_of_rows(scales, temperature, row, exists)
    state = shard_state(logits, target, row, counts, label, strides, shard, scales, SPEC)
    numbers = numbers_of(state, SPEC)
    for number in tl.static_range(len(numbers)):
        tl.store(statistics + number * n_rows + row, numbers[number], mask=exists)


@triton.jit
def to_mixture(log_p, log_q, SPEC: tl.constexpr):
    """log of ((1 - BETA) p + BETA q) / p, and of the same over q. An infinite one has the weight p or q of 0.

    For total variation in their place sign(q - p) / 2 and sign(p - q) / 2.
    """
    BETA: tl.constexpr = SPEC.BETA
    difference = log_q - log_p
    if SPEC.LOSS == "total_variation":
        half = tl.where(difference > 0.0, 0.5, tl.where(difference < 0.0, -0.5, 0.0))
        return half, -half
    else:
        u = tl.exp(-tl.abs(difference))
        base = tl.log(tl.where(difference > 0.0, BETA + (1.0 - BETA) * u, (1.0 - BETA) + BETA * u))
        return base + tl.maximum(difference, 0.0), base + tl.maximum(-difference, 0.0)


@triton.jit
def mixture_kernel(
    logits, target, gathered, row_weight, divergences, n_rows, world_size, strides, shard, scales, WIDTH: tl.constexpr,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Store the shard's part of KL(p || mixture) and KL(q || mixture) of each row to `divergences`, (2, n_rows).

    For total variation they are the sums that `RowInputs` describes.
    """
    row, exists, counts, _label = rows_of_program(target, row_weight, n_rows, shard, SPEC)
    state = gathered_state(gathered, row, exists, n_rows, world_size, WIDTH, SPEC)
    softmax = softmax_of_rows(state, state.m, 1.0, SPEC)
    of_p = state.s * 0.0
    of_q = state.s * 0.0
    for start in range(0, shard.n_valid, SPEC.BLOCK):
        _column, _mask, x, t = load_block(logits, target, row, counts, start, strides, shard, scales, SPEC)
        log_p = x * scales.logits - reference(state.m)[:, None] - softmax.log_s[:, None]
        log_q = t - reference(state.m_t)[:, None] - softmax.log_s_t[:, None]
        over_p, over_q = to_mixture(log_p, log_q, SPEC)
        of_p -= tl.sum(weigh(tl.exp(log_p), over_p), axis=1)
        of_q -= tl.sum(weigh(tl.exp(log_q), over_q), axis=1)
    tl.store(divergences + row, of_p, mask=exists)
    tl.store(divergences + n_rows + row, of_q, mask=exists)


@triton.jit
def row_loss_kernel(
    target, gathered, inputs, outputs, n_rows, world_size, shard, scales, WIDTH: tl.constexpr, SPEC: tl.constexpr
):
    """Compute the results of each row from all ranks' statistics.

    This is a separate kernel, and none of its arguments differs between ranks. If it were compiled for each shard, the
    compiler could contract the arithmetic to other multiply-adds, and the ranks' losses would differ in the last bit.
    """
    row, exists, counts, _label = rows_of_program(target, inputs.row_weight, n_rows, shard, SPEC)
    state = gathered_state(gathered, row, exists, n_rows, world_size, WIDTH, SPEC)
    softmax = softmax_of_rows(state, state.x_label - reference(state.m), 1.0, SPEC)
    teacher = None
    if SPEC.TOP_K:
        _columns, teacher = load_teacher(target, row, counts, shard, scales, SPEC)
    terms = row_terms(softmax, teacher, inputs, load_inputs(inputs, row, exists), 1.0, scales, SPEC)
    store_rows(outputs, row, softmax, terms, state.x_label >= state.m, exists, counts)


@triton.jit
def loss_and_gradient_kernel(
    logits, target, gathered, inverse_count, inputs, outputs, grad, n_rows, n_columns, world_size, strides, shard,
    scales, WIDTH: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the columns that this rank holds. Without `gathered`, also compute each row's loss.

    gathered: all ranks' statistics. None: this rank holds the whole vocabulary. Then a first pass over the row computes
    the state, and the pass for the gradient finds the row in the cache. inverse_count: a factor on the gradient in
    memory, or None. grad: None for the loss alone. It may be the logits: each element is read before it is written.
    """
    row, exists, counts, label = rows_of_program(target, inputs.row_weight, n_rows, shard, SPEC)
    scales = scales_of_rows(scales, inputs.row_temperature, row, exists)
    if gathered is None:
        state = shard_state(logits, target, row, counts, label, strides, shard, scales, SPEC)
    else:
        state = gathered_state(gathered, row, exists, n_rows, world_size, WIDTH, SPEC)
    scale = scales.grad
    if inverse_count is not None:
        scale = scale * tl.load(inverse_count)
    softmax = softmax_of_rows(state, state.x_label - reference(state.m), 1.0, SPEC)
    teacher = None
    if SPEC.TOP_K:
        columns, teacher = load_teacher(target, row, counts, shard, scales, SPEC)
    terms = row_terms(softmax, teacher, inputs, load_inputs(inputs, row, exists), scale, scales, SPEC)
    if gathered is None:
        store_rows(outputs, row, softmax, terms, state.x_label >= state.m, exists, counts)
    if grad is not None:
        # Exponentials are relative to the maximum: their factors are divided by the sum. The gradient is rounded once.
        reference_x = reference(state.m)[:, None]
        zero = state.s * 0.0
        on_exp = (terms.on_p / state.s)[:, None]
        on_target = zero + terms.on_target
        if SPEC.LOSS == "soft_cross_entropy" or SPEC.LOSS == "forward_kl":
            on_target = on_target / state.s_t
        on_target = on_target[:, None]
        if SPEC.SMOOTHED:
            on_column = (zero + terms.on_column)[:, None]
        ENTROPY_GRAD: tl.constexpr = inputs.entropy_grad is not None or (SPEC.ENTROPY and inputs.advantages is not None)
        if ENTROPY_GRAD:
            on_entropy = (terms.on_entropy / state.s)[:, None]
            mean_x = (state.h / state.s)[:, None]  # log p + H is x - mean_x
        local = (label - shard.vocab_start)[:, None]
        if SPEC.TOP_K:
            # The gradient may overwrite these logits, and the values to which it is added.
            top = top_columns(logits, columns, row, strides, shard, scales, SPEC)
            g_top = top_gradient(state, columns, top, terms, SPEC)
            if ENTROPY_GRAD:
                x_top = top.x - reference_x
                g_top = g_top - weigh(tl.exp(x_top), x_top - mean_x) * on_entropy
            if SPEC.SOFTCAP > 0:
                slope_top = top.value / SPEC.SOFTCAP
                g_top = g_top * (1.0 - slope_top * slope_top)
            top_place = grad + (row * strides.grad_row)[:, None] + top.local * strides.grad_column
            if SPEC.ACCUMULATE:
                g_top = g_top + tl.load(top_place, mask=top.held, other=0.0).to(tl.float32)
        for start in range(0, n_columns, SPEC.BLOCK):
            column, mask, value, t = load_block(logits, target, row, counts, start, strides, shard, scales, SPEC)
            x = scaled(value, scales.logits, SPEC) - reference_x
            exp_x = tl.exp(x)
            g = exp_x * on_exp
            if SPEC.LOSS == "cross_entropy":
                if not SPEC.TOP_K:
                    g = tl.where(column[None, :] == local, g - on_target, g)
                if SPEC.SMOOTHED:
                    g = g - on_column
            else:
                t = t - reference(state.m_t)[:, None]
                if SPEC.LOSS == "reverse_kl":
                    g = weigh(g, (x - t) - on_target)
                elif SPEC.LOSS == "soft_cross_entropy" or SPEC.LOSS == "forward_kl":
                    g = g - tl.exp(t) * on_target
                else:
                    over_p, _ = to_mixture(x - softmax.log_s[:, None], t - softmax.log_s_t[:, None], SPEC)
                    g = weigh(g, -over_p - on_target)
            if ENTROPY_GRAD:
                g = g - weigh(exp_x, x - mean_x) * on_entropy
            if SPEC.SOFTCAP > 0:
                slope = value / SPEC.SOFTCAP
                g = g * (1.0 - slope * slope)
            # Rows that do not count and padding get zero, even if their -inf became NaN above.
            g = tl.where(mask, g, 0.0)
            place = grad + (row * strides.grad_row)[:, None] + (column * strides.grad_column)[None, :]
            inside = exists[:, None] & (column < n_columns)[None, :]
            if SPEC.ACCUMULATE:
                g = g + tl.load(place, mask=inside, other=0.0).to(tl.float32)
            tl.store(place, round_to(g, grad.dtype.element_ty), mask=inside)
        if SPEC.TOP_K:
            tl.debug_barrier()  # other threads have stored the same elements
            tl.store(top_place, round_to(g_top, grad.dtype.element_ty), mask=top.held)


@triton.jit
def top_gradient(state, columns, top, terms, SPEC: tl.constexpr):
    """The gradient in the teacher's columns, (ROWS, TOP_BLOCK)."""
    on_target = (terms.on_target + state.s * 0.0)[:, None]
    if SPEC.TOP_LOSS == "reverse_kl":
        log_p = (top.x - reference(state.m_k)[:, None]) - tl.log(state.s_k)[:, None]
        p = tl.where(top.x == float("-inf"), 0.0, tl.exp(log_p))
        return weigh(p * terms.on_top[:, None], log_p - columns.log_q - on_target)
    else:
        p = tl.exp(top.x - reference(state.m)[:, None]) / state.s[:, None]
        return p * terms.on_top[:, None] - tl.exp(columns.log_q) * on_target


@triton.jit
def inverse_count_kernel(labels, row_weight, inverse_count, n_rows, vocab_size, ignore_index, BLOCK: tl.constexpr):
    """Store 1 / the number of rows that count or the sum of their weights, or 0, from one program: reproducible."""
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        label = tl.load(labels + row, mask=row < n_rows, other=-1).to(tl.int64)
        weight = 1.0
        if row_weight is not None:
            weight = tl.load(row_weight + row, mask=row < n_rows, other=0.0)
        total += tl.where(label_counts(label, vocab_size, ignore_index), weight, 0.0)
    total = tl.sum(total, axis=0)
    tl.store(inverse_count, tl.where(total == 0.0, 0.0, 1.0 / total))


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
    for tile in range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        by = tl.load(factor + row * PER_ROW, mask=row < n_rows, other=1.0).to(tl.float32)
        changed = (by != 1.0) & (row < n_rows)
        if tl.max(changed.to(tl.int32), axis=0) > 0:
            for start in range(0, n_columns, BLOCK):
                column = block_columns(start, WIDE, BLOCK)
                mask = changed[:, None] & (column < n_columns)[None, :]
                place = values + (row * values_row)[:, None] + (column * values_column)[None, :]
                scaled = tl.load(place, mask=mask, other=0.0).to(tl.float32) * by[:, None]
                tl.store(place, round_to(scaled, values.dtype.element_ty), mask=mask)
