"""Row states of the two-pass kernels: lanes merge into a shard, and shards into the vocabulary.

`row_terms` has a table of their numbers. Exponents are in nats.

A lane is what one thread loads of a row. Lanes merge at the end of the row: a merge in each tile took three barriers.
`tl.exp` took three more instructions than `natural_exp`. On an H200, 4096 rows in bf16, the statistics take 0.251 ms in
place of 0.333 (labels, 131072 columns), 0.263 in place of 0.559 with entropies, and 0.268 in place of 0.470
(reverse_kl, 65536 columns). The gradient has `tl.exp`: the other took 0.602 ms in place of 0.424 for 50257 columns.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tpbench.kernels.cached_launch import INTERPRETED
from tpbench.kernels.kernel_arguments import TopTarget
from tpbench.kernels.row_terms import (
    LEAST_EXPONENT,
    LEAST_REST,
    LOG2_E,
    State,
    Teacher,
    merge_two,
    reference,
    state_of,
    weigh,
)
from tpbench.kernels.two_pass.blocks import capped, label_counts, load_block, scaled

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def natural_exp(x):
    """Return exp(x), and 0 below 2^-126: tl.exp keeps such numbers, for three more instructions."""
    if _INTERPRETED:
        return tl.exp(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * LOG2_E], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def no_columns(zero, SPEC: tl.constexpr):
    """The state of no columns, of the shape of `zero`. A merge with it changes no state."""
    nothing = zero - float("inf")
    x_label_or_maximum = zero
    if SPEC.LOSS != "cross_entropy" or SPEC.TOP_K:
        x_label_or_maximum = nothing
    return state_of((nothing, zero, x_label_or_maximum, zero, zero, zero, zero), SPEC)


@triton.jit
def by_lane(tile, SPEC: tl.constexpr):
    """A tile, (ROWS, BLOCK), as (ROWS, REPEATS, LANES, VECTOR). Each thread already has the elements of its lane."""
    SHAPE: tl.constexpr = (SPEC.ROWS, SPEC.BLOCK // (SPEC.LANES * SPEC.VECTOR), SPEC.LANES, SPEC.VECTOR)
    return tl.reshape(tile, SHAPE)


@triton.jit
def sum_by_lane(tile):
    """(ROWS, REPEATS, LANES, VECTOR) to (ROWS, LANES)."""
    return tl.sum(tl.sum(tile, axis=3), axis=1)


@triton.jit
def tile_state(x, t, columns, SPEC: tl.constexpr):
    """The states of a tile's lanes, (ROWS, BLOCK) to (ROWS, LANES), without x_label. columns: left in the shard."""
    x = by_lane(x, SPEC)
    m = tl.max(tl.max(x, axis=3), axis=1)
    x = x - reference(m)[:, None, :, None]
    exp_x = natural_exp(x)
    s = sum_by_lane(exp_x)
    zero = s * 0.0
    h = zero
    if SPEC.ENTROPY:
        h = sum_by_lane(exp_x * tl.maximum(x, LEAST_EXPONENT))
    if SPEC.TOP_K:
        return state_of((m, s, zero - float("inf"), zero, zero, zero, h), SPEC)
    elif SPEC.LOSS == "cross_entropy":
        s_t = zero
        a = zero
        if SPEC.SMOOTHED:
            # A reshaped mask would move between threads in each tile.
            repeat = tl.arange(0, SPEC.BLOCK // (SPEC.LANES * SPEC.VECTOR))[None, :, None, None]
            lane = repeat * SPEC.LANES + tl.arange(0, SPEC.LANES)[None, None, :, None]
            inside = lane * SPEC.VECTOR + tl.arange(0, SPEC.VECTOR)[None, None, None, :] < columns
            s_t = sum_by_lane(tl.where(inside, 1.0, 0.0)) + zero
            a = sum_by_lane(tl.where(inside, x, 0.0))
        return state_of((m, s, zero, s_t, a, h), SPEC)
    else:
        t = by_lane(t, SPEC)
        m_t = tl.max(tl.max(t, axis=3), axis=1)
        t = t - reference(m_t)[:, None, :, None]
        exp_t = natural_exp(t)
        s_t = sum_by_lane(exp_t)
        if SPEC.LOSS == "soft_cross_entropy":
            terms = weigh(exp_t, x)
        elif SPEC.LOSS == "forward_kl":
            terms = weigh(exp_t, t - x)
        elif SPEC.LOSS == "reverse_kl":
            terms = weigh(exp_x, x - t)
        else:
            terms = exp_t * 0.0
        return state_of((m, s, m_t, s_t, sum_by_lane(terms), h), SPEC)


@triton.jit
def merge_lanes(state, SPEC: tl.constexpr):
    """Merge the states of lanes, (ROWS, LANES) to (ROWS,), without x_label and the numbers of a top k."""
    zero = tl.zeros_like(state.s)
    m = zero + tl.max(state.m, axis=1)[:, None]
    m_t = zero
    if SPEC.LOSS != "cross_entropy":
        m_t += tl.max(state.m_t, axis=1)[:, None]
    # With one reference the sums add up.
    state = merge_two(State(m, zero, zero, m_t, zero, zero, zero, m, zero), state, natural_exp, SPEC)
    m = tl.max(state.m, axis=1)
    m_t = tl.max(state.m_t, axis=1)
    s = tl.sum(state.s, axis=1)
    s_t = tl.sum(state.s_t, axis=1)
    return State(m, s, s * 0.0, m_t, s_t, tl.sum(state.a, axis=1), tl.sum(state.h, axis=1), m, s)


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
def shard_state(logits, target, row, counts, label, strides, shard, scales, SPEC: tl.constexpr):
    """The state of the columns of each row that this rank holds. Rows that do not count are not read."""
    SHAPE: tl.constexpr = (SPEC.ROWS, SPEC.LANES)
    lanes = no_columns(tl.zeros(SHAPE, tl.float32), SPEC)
    for start in range(0, shard.n_valid, SPEC.BLOCK):
        _column, _mask, x, t = load_block(logits, target, row, counts, start, strides, shard, scales, SPEC)
        x = scaled(x, scales.logits, SPEC)
        lanes = merge_two(lanes, tile_state(x, t, shard.n_valid - start, SPEC), natural_exp, SPEC)
    state = merge_lanes(lanes, SPEC)
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
    state = no_columns(row.to(tl.float32) * 0.0, SPEC)
    for rank in range(world_size):
        numbers = ()
        for number in tl.static_range(WIDTH):
            place = gathered + (rank * WIDTH + number) * n_rows + row
            numbers = numbers + (tl.load(place, mask=exists, other=0.0),)
        state = merge_two(state, state_of(numbers, SPEC), natural_exp, SPEC)
    return state
