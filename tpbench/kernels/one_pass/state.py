"""Row states: numbers that stand for any set of columns of a row, and that merge.

They are those of `row_terms`, which has a table of them, in other units. Exponents are in units of log 2, so that each
exponential is one multiply-add and one instruction: s is the sum of 2^(x * k - m). Here x and t are raw logits and
target logits, as is x_label, k = logits_scale * log2(e) and k_t = k / temperature.

A number that the loss doesn't need is one of the others, so that it costs nothing. Exponents are relative to m, which
is max(x) * k *rounded*. So they are exact even where the logits have a large common offset.

The kernels are compiled without contraction to multiply-adds, except those written here. So the loss is the same
function of the same words on all ranks, however their shards specialise the kernel.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpbench.kernels.one_pass.layouts import has_labels, state_layout, thread_layout, thread_shape, warp_states_layout
from tpbench.kernels.one_pass.ptx import exp2, max_in_thread, sum_products_in_thread, to_fp32
from tpbench.kernels.row_terms import State, numbers_of, reference, shifted, state_of

INF = gl.constexpr(float("inf"))


class TileState(NamedTuple):
    """A tile in registers: its state by thread, and the numbers from which its gradient is computed."""

    state: State
    """(ROWS, LANES) of each thread's elements."""
    exp_x: Any
    """(ROWS, REPEATS, LANES, VECTOR): 2^(x k - m), relative to the thread's own m."""
    other: Any
    """(ROWS, REPEATS, LANES, VECTOR): 2^(t k_t - m_t); for reverse_kl (x k - m) - (t k_t - m_t)."""


@gluon.constexpr_function
def empty_number(number, spec):
    """The number of a state of no columns: -inf for maxima, else 0."""
    is_maximum = number == 0 or (number == 2 and (spec.TOP_K or spec.LOSS != "cross_entropy"))
    return -float("inf") if is_maximum else 0.0


@gluon.jit
def _plus(a_1, b_1, c_1, a_2, b_2, c_2):
    return a_1 + a_2, b_1 + b_2, c_1 + c_2


@gluon.jit
def maxima(a_1, b_1, a_2, b_2):
    return gl.maximum(a_1, a_2), gl.maximum(b_1, b_2)


@gluon.jit
def _of_labels(m, s, SPEC: gl.constexpr):
    """The state by thread of a loss of labels. Its other numbers are any: they are those of rows."""
    if SPEC.TOP_K:
        return state_of((m, s, m, s, s, s), SPEC)
    else:
        return state_of((m, s, m), SPEC)


@gluon.jit
def no_columns(SPEC: gl.constexpr):
    """The state by thread, (ROWS, LANES), of no columns."""
    zero = gl.zeros(thread_shape(SPEC), gl.float32, thread_layout(SPEC))
    nothing = zero - INF
    if has_labels(SPEC):
        return _of_labels(nothing, zero, SPEC)
    else:
        return state_of((nothing, zero, nothing, zero, zero), SPEC)


@gluon.jit
def tile_state(x, t, scales, SPEC: gl.constexpr):
    """Reduce a tile of raw logits x and target logits t, (ROWS, REPEATS, LANES, VECTOR), within each thread.

    Returns a `TileState`. With labels its x_label is not x[label], and `other` is unused.
    """
    m = max_in_thread(x) * scales.logits
    x = gl.fma(to_fp32(x), scales.logits, 0.0 - reference(m)[:, None, :, None])
    exp_x = exp2(x)
    s = gl.sum(gl.sum(exp_x, axis=3), axis=1)
    if has_labels(SPEC):
        return TileState(_of_labels(m, s, SPEC), exp_x, exp_x)
    else:
        m_t = max_in_thread(t) * scales.target
        t = gl.fma(to_fp32(t), scales.target, 0.0 - reference(m_t)[:, None, :, None])
        exp_t = exp2(t)
        s_t = gl.sum(gl.sum(exp_t, axis=3), axis=1)
        other = exp_t
        if SPEC.LOSS == "soft_cross_entropy":
            a = sum_products_in_thread(exp_t, x)
        elif SPEC.LOSS == "forward_kl":
            a = sum_products_in_thread(exp_t, t - x)
        else:
            other = x - t
            a = sum_products_in_thread(exp_x, other)
        return TileState(state_of((m, s, m_t, s_t, a), SPEC), exp_x, other)


@gluon.jit
def merge_two(one, two, SPEC: gl.constexpr):
    """Merge two states by thread, element by element. With labels their x_label is not x[label]."""
    m = gl.maximum(one.m, two.m)
    r = reference(m)
    w_1 = exp2(one.m - r)
    w_2 = exp2(two.m - r)
    s = one.s * w_1 + two.s * w_2
    if has_labels(SPEC):
        return _of_labels(m, s, SPEC)
    else:
        m_t = gl.maximum(one.m_t, two.m_t)
        r_t = reference(m_t)
        wt_1 = exp2(one.m_t - r_t)
        wt_2 = exp2(two.m_t - r_t)
        a_1 = shifted(one, w_1, wt_1, reference(one.m) - r, reference(one.m_t) - r_t, SPEC)
        a_2 = shifted(two, w_2, wt_2, reference(two.m) - r, reference(two.m_t) - r_t, SPEC)
        return state_of((m, s, m_t, one.s_t * wt_1 + two.s_t * wt_2, a_1 + a_2), SPEC)


@gluon.jit
def merge_along(state, AXIS: gl.constexpr, SPEC: gl.constexpr):
    """Merge states along an axis, in one order: the result has the same bits on all ranks."""
    if SPEC.TOP_K:
        m, m_k = gl.reduce((state.m, state.m_k), AXIS, maxima)
        weight = exp2(state.m - gl.expand_dims(reference(m), AXIS))
        r_k = gl.expand_dims(reference(m_k), AXIS)
        weight_k = exp2(state.m_k - r_k)
        a = shifted(state, weight_k, weight_k, reference(state.m_k) - r_k, 0.0, SPEC)
        s, s_k, a = gl.reduce((state.s * weight, state.s_k * weight_k, a), AXIS, _plus)
        return state_of((m, s, m_k, s_k, gl.sum(state.s_t, axis=AXIS), a), SPEC)
    elif has_labels(SPEC):
        m = gl.max(state.m, axis=AXIS)
        s = gl.sum(state.s * exp2(state.m - gl.expand_dims(reference(m), AXIS)), axis=AXIS)
        return state_of((m, s, gl.sum(state.x_label, axis=AXIS)), SPEC)
    else:
        m, m_t = gl.reduce((state.m, state.m_t), AXIS, maxima)
        r = gl.expand_dims(reference(m), AXIS)
        r_t = gl.expand_dims(reference(m_t), AXIS)
        weight = exp2(state.m - r)
        weight_t = exp2(state.m_t - r_t)
        a = shifted(state, weight, weight_t, reference(state.m) - r, reference(state.m_t) - r_t, SPEC)
        s, s_t, a = gl.reduce((state.s * weight, state.s_t * weight_t, a), AXIS, _plus)
        return state_of((m, s, m_t, s_t, a), SPEC)


@gluon.jit
def convert_state(state, layout: gl.constexpr, SPEC: gl.constexpr, TRIVIAL: gl.constexpr = False):
    """Convert each number of a state to a layout. TRIVIAL: no data moves."""
    numbers = numbers_of(state, SPEC)
    converted = ()
    for number in gl.static_range(len(numbers)):
        converted = converted + (gl.convert_layout(numbers[number], layout, assert_trivial=TRIVIAL),)
    return state_of(converted, SPEC)


@gluon.jit
def _merge_warps(state, SPEC: gl.constexpr):
    """Merge the states of the threads of a row, (ROWS, LANES) to (ROWS,): within each warp, then between warps.

    All five numbers cross between warps at once, so that warps wait for each other once. Separate maxima and sums would
    make them wait four times.
    """
    WARPS: gl.constexpr = SPEC.LANES // 32
    ROWS: gl.constexpr = SPEC.ROWS
    by_warp: gl.constexpr = [ROWS, WARPS, 32]
    numbers = numbers_of(state, SPEC)
    parts = ()
    for number in gl.static_range(len(numbers)):
        parts = parts + (numbers[number].reshape(by_warp),)
    state = state_of(parts, SPEC)
    state = merge_along(state, 2, SPEC)
    if WARPS > 1:
        state = convert_state(state, warp_states_layout(SPEC, False), SPEC, TRIVIAL=True)
        maxima_and_sums = gl.join(gl.join(state.m, state.m_t), gl.join(state.s, state.s_t))
        numbers = gl.join(maxima_and_sums, gl.join(gl.join(state.a, state.a), gl.join(state.a, state.a)))
        numbers = gl.convert_layout(numbers, warp_states_layout(SPEC, True))
        maxima_and_sums, differences = gl.split(numbers)
        maxima, sums = gl.split(maxima_and_sums)
        m, m_t = gl.split(maxima)
        s, s_t = gl.split(sums)
        a, _ = gl.split(gl.split(differences)[0])
        state = state_of((m, s, m_t, s_t, a), SPEC)
    return merge_along(state, 1, SPEC)


@gluon.jit
def state_of_rows(state, x_label, SPEC: gl.constexpr):
    """Merge the states of the threads of a row, (ROWS, LANES) to (ROWS,) in `state_layout`.

    x_label: (ROWS,) x[label] where this program holds it, else 0. It is not used without labels. Against a top k the
    state lacks its numbers (`tops.with_top`).
    """
    layout: gl.constexpr = state_layout(SPEC)
    if SPEC.TOP_K:
        m = gl.max(state.m, axis=1)
        s = gl.sum(state.s * exp2(state.m - gl.expand_dims(reference(m), 1)), axis=1)
        return _of_labels(gl.convert_layout(m, layout), gl.convert_layout(s, layout), SPEC)
    elif has_labels(SPEC):
        state = convert_state(merge_along(state, 1, SPEC), layout, SPEC)
        return state_of((state.m, state.s, gl.convert_layout(x_label, layout)), SPEC)
    else:
        return convert_state(_merge_warps(state, SPEC), layout, SPEC)
