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

from tpbench.kernels.one_pass import layouts, ptx
from tpbench.kernels.row_terms import LEAST_EXPONENT, LOG2_E, State, numbers_of, reference, shifted, state_of, weigh

INF = gl.constexpr(float("inf"))
LEAST_COMPARED = gl.constexpr(-100.0)
EXP_OF_LEAST = gl.constexpr(2.0**LEAST_COMPARED.value)
"""The least exponent of a softmax that is compared with another one, and its exponential, which has no effect."""


class TileState(NamedTuple):
    """A tile in registers: its state by thread, and the numbers from which its gradient is computed.

    With `keeps_raw` the latter are the raw logits and target logits.
    """

    state: State
    """(ROWS, LANES) of each thread's elements."""
    exp_x: Any
    """(ROWS, REPEATS, LANES, VECTOR): 2^(x k - m), relative to the thread's own m, times the slope of a cap."""
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
def _state(m, s, x_label, m_t, s_t, a, h):
    """A state without the numbers of a top k."""
    return State(m, s, x_label, m_t, s_t, a, h, m, s)


@gluon.jit
def exponents(values, scale, reference, SOFTCAP: gl.constexpr):
    """Raw logits as exponents relative to a reference, and a quarter of the slope of the cap, any number without one.

    SOFTCAP * tanh(u) is SOFTCAP * (1 - 2 r) with the sigmoid r = 1 / (1 + exp(2 u)), and its slope is 4 (r - r^2).
    """
    if SOFTCAP > 0:
        r = ptx.sigmoids(ptx.to_fp32(values), 2.0 * LOG2_E / SOFTCAP)
        return gl.fma(r, scale * (-2.0 * SOFTCAP), scale * SOFTCAP - reference), gl.fma(0.0 - r, r, r)
    else:
        return gl.fma(ptx.to_fp32(values), scale, 0.0 - reference), reference


@gluon.jit
def compare_softmaxes(x, t, SPEC: gl.constexpr):
    """From exponents with t - x = log2(q / p): x limited to finite numbers, and the numbers of both softmaxes.

    They are 2^x and 2^t, which are in proportion to p and q, and for jsd the logarithms of mixture / p and mixture / q.
    For total variation in place of the logarithms sign(q - p) / 2 and sign(p - q) / 2, times log2(e).
    """
    if SPEC.LOSS == "total_variation":
        x = gl.maximum(x, LEAST_EXPONENT)
        t = gl.maximum(t, LEAST_EXPONENT)
        half = gl.where(t < x, -LOG2_E / 2, gl.where(t > x, LOG2_E / 2, 0.0))
        return x, ptx.exp2(x), ptx.exp2(t), half, half * -1.0
    else:
        # The ratio q / p is finite: t is at most the logarithm of the number of columns.
        x = gl.maximum(x, LEAST_COMPARED)
        difference = gl.maximum(t - x, LEAST_EXPONENT)
        exp_x = ptx.exp2(x)
        ratio = ptx.exp2(difference)
        over_p = ptx.log2(gl.fma(ratio, SPEC.BETA, 1.0 - SPEC.BETA))
        # An -inf has the gradient 0.
        return x, exp_x - EXP_OF_LEAST, exp_x * ratio, over_p, over_p - difference


@gluon.jit
def _largest_exponent(values, scale, SOFTCAP: gl.constexpr):
    """The largest exponent of each thread, (ROWS, LANES), of raw logits (ROWS, REPEATS, LANES, VECTOR)."""
    largest = ptx.max_in_thread(values)
    if SOFTCAP > 0:
        largest, _ = exponents(largest, 1.0, 0.0, SOFTCAP)
    return largest * scale


@gluon.jit
def _sum_in_thread(values):
    """(ROWS, REPEATS, LANES, VECTOR) to (ROWS, LANES)."""
    return gl.sum(gl.sum(values, axis=3), axis=1)


@gluon.jit
def no_columns(SPEC: gl.constexpr):
    """The state by thread, (ROWS, LANES), of no columns."""
    zero = layouts.zeros_by_thread(SPEC)
    nothing = zero - INF
    return _state(nothing, zero, nothing, nothing, zero, zero, zero)


@gluon.jit
def tile_state(walk, x, t, tile_of_row, SPEC: gl.constexpr):
    """Reduce a tile of raw logits x and target logits t, (ROWS, REPEATS, LANES, VECTOR), within each thread.

    A cap makes numbers of the -inf in columns that do not belong to the softmax. Returns a `TileState`. With labels its
    x_label is not x[label], and `other` is unused.
    """
    WHOLE: gl.constexpr = layouts.is_whole(tile_of_row, SPEC)
    scales = walk.scales
    raw_x = x
    raw_t = t
    m = _largest_exponent(x, scales.logits, SPEC.SOFTCAP)
    x, slope = exponents(x, scales.logits, reference(m)[:, None, :, None], SPEC.SOFTCAP)
    s_t = m
    a = m
    if SPEC.SMOOTHED:
        s_t = gl.full_like(m, layouts.repeats(tile_of_row, SPEC) * SPEC.VECTOR)
        a = x
        if not WHOLE:
            inside = layouts.inside_softmax(x, walk.valid, tile_of_row, SPEC)
            s_t = _sum_in_thread(gl.where(inside, 1.0, 0.0))
            a = gl.where(inside, x, 0.0)
        a = _sum_in_thread(a)
    exp_x = ptx.exp2(x)
    if SPEC.SOFTCAP > 0 and not WHOLE:
        exp_x = gl.where(layouts.inside_softmax(x, walk.valid, tile_of_row, SPEC), exp_x, 0.0)
    s = _sum_in_thread(exp_x)
    h = s
    if SPEC.ENTROPY:
        h = ptx.sum_products_in_thread(exp_x, gl.maximum(x, LEAST_EXPONENT), FINITE=True)
    if layouts.has_labels(SPEC):
        if SPEC.SOFTCAP > 0:
            exp_x *= slope
        state = _state(m, s, m, m, s_t, a, h)
        return TileState(state, raw_x if layouts.keeps_raw(SPEC) else exp_x, exp_x)
    else:
        m_t = _largest_exponent(t, scales.target, SPEC.TARGET_SOFTCAP)
        t, _ = exponents(t, scales.target, reference(m_t)[:, None, :, None], SPEC.TARGET_SOFTCAP)
        exp_t = ptx.exp2(t)
        if SPEC.TARGET_SOFTCAP > 0 and not WHOLE:
            exp_t = gl.where(layouts.inside_softmax(t, walk.valid, tile_of_row, SPEC), exp_t, 0.0)
        s_t = _sum_in_thread(exp_t)
        other = exp_t
        if SPEC.LOSS == "soft_cross_entropy":
            a = ptx.sum_products_in_thread(exp_t, x)
        elif SPEC.LOSS == "forward_kl":
            a = ptx.sum_products_in_thread(exp_t, t - x)
        elif SPEC.LOSS == "reverse_kl":
            other = x - t
            a = ptx.sum_products_in_thread(exp_x, other)
        else:
            a = s
        state = _state(m, s, s, m_t, s_t, a, h)
        if layouts.keeps_raw(SPEC):
            return TileState(state, raw_x, raw_t)
        else:
            return TileState(state, exp_x, other)


@gluon.jit
def merge_along(state, AXIS: gl.constexpr, SPEC: gl.constexpr):
    """Merge states along an axis, in one order: the result has the same bits on all ranks."""
    if SPEC.TOP_K:
        m, m_k = gl.reduce((state.m, state.m_k), AXIS, maxima)
        weight = ptx.exp2(state.m - gl.expand_dims(reference(m), AXIS))
        r_k = gl.expand_dims(reference(m_k), AXIS)
        weight_k = ptx.exp2(state.m_k - r_k)
        a = shifted(state, weight_k, weight_k, reference(state.m_k) - r_k, 0.0, SPEC)
        s, s_k, a = gl.reduce((state.s * weight, state.s_k * weight_k, a), AXIS, _plus)
        return state_of((m, s, m_k, s_k, gl.sum(state.s_t, axis=AXIS), a), SPEC)
    elif layouts.has_labels(SPEC):
        m = gl.max(state.m, axis=AXIS)
        r = gl.expand_dims(reference(m), AXIS)
        weight = ptx.exp2(state.m - r)
        if SPEC.SMOOTHED or SPEC.ENTROPY:
            x_label = gl.sum(state.x_label, axis=AXIS)
            shift = reference(state.m) - r
            a = state.a + state.s_t * shift
            h = weigh(weight, state.h + state.s * shift)
            s, a, h = gl.reduce((state.s * weight, a, h), AXIS, _plus)
            return _state(m, s, x_label, m, gl.sum(state.s_t, axis=AXIS), a, h)
        else:
            s = gl.sum(state.s * weight, axis=AXIS)
            return _state(m, s, gl.sum(state.x_label, axis=AXIS), m, s, s, s)
    else:
        m, m_t = gl.reduce((state.m, state.m_t), AXIS, maxima)
        r = gl.expand_dims(reference(m), AXIS)
        r_t = gl.expand_dims(reference(m_t), AXIS)
        weight = ptx.exp2(state.m - r)
        weight_t = ptx.exp2(state.m_t - r_t)
        a = shifted(state, weight, weight_t, reference(state.m) - r, reference(state.m_t) - r_t, SPEC)
        s, s_t, a = gl.reduce((state.s * weight, state.s_t * weight_t, a), AXIS, _plus)
        h = s
        if SPEC.ENTROPY:
            h = gl.sum(weigh(weight, state.h + state.s * (reference(state.m) - r)), axis=AXIS)
        return _state(m, s, s, m_t, s_t, a, h)


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
    """Merge the states of the threads of a row, (ROWS, LANES) to (ROWS,): within each warp, then between warps."""
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
        state = convert_state(state, layouts.warp_states_layout(SPEC, False), SPEC, TRIVIAL=True)
        # All numbers cross between warps at once. Separate maxima and sums would make warps wait four times.
        maxima_and_sums = gl.join(gl.join(state.m, state.m_t), gl.join(state.s, state.s_t))
        numbers = gl.join(maxima_and_sums, gl.join(gl.join(state.a, state.h), gl.join(state.a, state.a)))
        numbers = gl.convert_layout(numbers, layouts.warp_states_layout(SPEC, True))
        maxima_and_sums, differences = gl.split(numbers)
        maxima, sums = gl.split(maxima_and_sums)
        m, m_t = gl.split(maxima)
        s, s_t = gl.split(sums)
        a, h = gl.split(gl.split(differences)[0])
        state = _state(m, s, s, m_t, s_t, a, h)
    return merge_along(state, 1, SPEC)


@gluon.jit
def state_of_rows(walk, state, x_label, SPEC: gl.constexpr):
    """Merge the states of the threads of a row, (ROWS, LANES) to (ROWS,) in `state_layout`.

    x_label: (ROWS,) raw x[label] where this program holds it, else 0. It is not used without labels.
    Against a top k the state lacks its numbers (`targets.with_top`).
    """
    layout: gl.constexpr = layouts.state_layout(SPEC)
    if SPEC.TOP_K:
        m = gl.max(state.m, axis=1)
        s = gl.sum(state.s * ptx.exp2(state.m - gl.expand_dims(reference(m), 1)), axis=1)
        m = gl.convert_layout(m, layout)
        s = gl.convert_layout(s, layout)
        return _state(m, s, m, m, s, s, s)
    elif layouts.has_labels(SPEC):
        state = convert_state(merge_along(state, 1, SPEC), layout, SPEC)
        x_label = gl.convert_layout(x_label, layout)
        if SPEC.SOFTCAP > 0:
            x_label, _ = exponents(x_label, 1.0, 0.0, SPEC.SOFTCAP)
        s_t = gl.zeros_like(state.m) + gl.maximum(walk.valid, 0)
        return _state(state.m, state.s, x_label, state.m, s_t, state.a, state.h)
    else:
        return convert_state(_merge_warps(state, SPEC), layout, SPEC)
