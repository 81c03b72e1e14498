"""Row states: five numbers that stand for any set of columns of a row, and that merge.

States are like those of `two_pass.state`, but their exponents are in units of log 2, so that each exponential is one
multiply-add and one instruction: 2^(x * k - c). With k = logits_scale * log2(e) and, for target logits t,
k_t = k / temperature:

| field | labels | losses with target logits |
| --- | --- | --- |
| c | max(x) * k, rounded | max(x) * k, rounded |
| s | sum of 2^(x k - c) | sum of 2^(x k - c) |
| c_t | x[label] where this rank holds it, else 0 | max(t) * k_t, rounded |
| s_t | unused | sum of 2^(t k_t - c_t) |
| a | unused | sum of weight * difference, in units of log 2 (see `two_pass.state`) |

Exponents are relative to the *rounded* c. So they are exact even where the logits have a large common offset.

The kernels are compiled without contraction to multiply-adds, except those written here. So the loss is the same
function of the same words on all ranks, however their shards specialise the kernel.
"""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,untyped-decorator"
# Triton decides the types of a kernel's arguments.
# ruff: noqa: RET505
# Triton leaves a branch uncompiled only where both branches are written out.

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpbench.kernels.one_pass.layouts import has_labels, state_layout, thread_layout, thread_shape, warp_states_layout
from tpbench.kernels.one_pass.ptx import exp2, max_in_thread, sum_products_in_thread, to_fp32

LN_2 = gl.constexpr(0.6931471805599453)
INF = gl.constexpr(float("inf"))


class State(NamedTuple):
    """Five tensors of one shape: (ROWS, LANES) of threads, (ROWS, n) of n parts of rows, (ROWS,) of rows."""

    c: Any
    s: Any
    c_t: Any
    s_t: Any
    a: Any


class TileState(NamedTuple):
    """A tile in registers: its state by thread, and the numbers from which its gradient is computed."""

    state: State
    """(ROWS, LANES) of each thread's elements."""
    exp_x: Any
    """(ROWS, REPEATS, LANES, VECTOR): 2^(x k - c), relative to the thread's own c."""
    other: Any
    """(ROWS, REPEATS, LANES, VECTOR): 2^(t k_t - c_t); for reverse_kl (x k - c) - (t k_t - c_t)."""


@gluon.constexpr_function
def few_instructions(spec):
    """Instructions limit the speed, not memory. Then save instructions, in an order that the compiler keeps."""
    return spec.WHOLE or spec.LOSS != "cross_entropy"


@gluon.jit
def reference(c):
    """The number that exponents are relative to: 0 instead of the maximum -inf, since -inf - (-inf) is NaN."""
    return gl.where(c == -INF, 0.0, c)


@gluon.jit
def _weighted(weight, difference):
    return gl.where(weight == 0.0, 0.0, weight * difference)


@gluon.jit
def _shifted(state, weight, weight_t, shift, shift_t, SPEC: gl.constexpr):
    """The sum of weighted differences `a` relative to new references (see `two_pass.state`)."""
    if SPEC.LOSS == "soft_cross_entropy":
        return _weighted(weight_t, state.a + state.s_t * shift)
    if SPEC.LOSS == "forward_kl":
        return _weighted(weight_t, state.a + state.s_t * (shift_t - shift))
    return _weighted(weight, state.a + state.s * (shift - shift_t))


@gluon.jit
def _plus(a_1, b_1, c_1, a_2, b_2, c_2):
    return a_1 + a_2, b_1 + b_2, c_1 + c_2


@gluon.jit
def _maxima(a_1, b_1, a_2, b_2):
    return gl.maximum(a_1, a_2), gl.maximum(b_1, b_2)


@gluon.jit
def no_columns(SPEC: gl.constexpr):
    """The state by thread, (ROWS, LANES), of no columns."""
    zero = gl.zeros(thread_shape(SPEC), gl.float32, thread_layout(SPEC))
    return State(zero - INF, zero, zero - INF, zero, zero)


@gluon.jit
def tile_state(x, t, scales, SPEC: gl.constexpr):
    """Reduce a tile of raw logits x and target logits t, (ROWS, REPEATS, LANES, VECTOR), within each thread.

    Returns a `TileState`. With labels its c_t is not x[label], and `other` is unused.
    """
    FEW: gl.constexpr = few_instructions(SPEC)
    c = max_in_thread(x, FEW) * scales.k
    x = gl.fma(to_fp32(x, FEW), scales.k, 0.0 - reference(c)[:, None, :, None])
    exp_x = exp2(x)
    s = gl.sum(gl.sum(exp_x, axis=3), axis=1)
    if has_labels(SPEC):
        return TileState(State(c, s, c, s, s), exp_x, exp_x)
    else:
        c_t = max_in_thread(t, FEW) * scales.k_t
        t = gl.fma(to_fp32(t, FEW), scales.k_t, 0.0 - reference(c_t)[:, None, :, None])
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
        return TileState(State(c, s, c_t, s_t, a), exp_x, other)


@gluon.jit
def merge_two(one, two, SPEC: gl.constexpr):
    """Merge two states, element by element."""
    c = gl.maximum(one.c, two.c)
    r = reference(c)
    w_1 = exp2(one.c - r)
    w_2 = exp2(two.c - r)
    s = one.s * w_1 + two.s * w_2
    if has_labels(SPEC):
        return State(c, s, c, s, s)
    else:
        c_t = gl.maximum(one.c_t, two.c_t)
        r_t = reference(c_t)
        wt_1 = exp2(one.c_t - r_t)
        wt_2 = exp2(two.c_t - r_t)
        a_1 = _shifted(one, w_1, wt_1, reference(one.c) - r, reference(one.c_t) - r_t, SPEC)
        a_2 = _shifted(two, w_2, wt_2, reference(two.c) - r, reference(two.c_t) - r_t, SPEC)
        return State(c, s, c_t, one.s_t * wt_1 + two.s_t * wt_2, a_1 + a_2)


@gluon.jit
def merge_along(state, AXIS: gl.constexpr, SPEC: gl.constexpr):
    """Merge states along an axis, in one order: the result has the same bits on all ranks."""
    if has_labels(SPEC):
        c = gl.max(state.c, axis=AXIS)
        s = gl.sum(state.s * exp2(state.c - gl.expand_dims(reference(c), AXIS)), axis=AXIS)
        return State(c, s, gl.sum(state.c_t, axis=AXIS), s, s)
    else:
        c, c_t = gl.reduce((state.c, state.c_t), AXIS, _maxima)
        r = gl.expand_dims(reference(c), AXIS)
        r_t = gl.expand_dims(reference(c_t), AXIS)
        weight = exp2(state.c - r)
        weight_t = exp2(state.c_t - r_t)
        a = _shifted(state, weight, weight_t, reference(state.c) - r, reference(state.c_t) - r_t, SPEC)
        s, s_t, a = gl.reduce((state.s * weight, state.s_t * weight_t, a), AXIS, _plus)
        return State(c, s, c_t, s_t, a)


@gluon.jit
def convert_state(state, layout: gl.constexpr, TRIVIAL: gl.constexpr = False):
    """Convert each number of a state to a layout. TRIVIAL: no data moves."""
    return State(
        gl.convert_layout(state.c, layout, assert_trivial=TRIVIAL),
        gl.convert_layout(state.s, layout, assert_trivial=TRIVIAL),
        gl.convert_layout(state.c_t, layout, assert_trivial=TRIVIAL),
        gl.convert_layout(state.s_t, layout, assert_trivial=TRIVIAL),
        gl.convert_layout(state.a, layout, assert_trivial=TRIVIAL),
    )


@gluon.jit
def _merge_warps(state, SPEC: gl.constexpr):
    """Merge the states of the threads of a row, (ROWS, LANES) to (ROWS,): within each warp, then between warps.

    All five numbers cross between warps at once, so that warps wait for each other once. Separate maxima and sums would
    make them wait four times.
    """
    WARPS: gl.constexpr = SPEC.LANES // 32
    ROWS: gl.constexpr = SPEC.ROWS
    by_warp: gl.constexpr = [ROWS, WARPS, 32]
    state = State(state.c.reshape(by_warp), state.s.reshape(by_warp), state.c_t.reshape(by_warp),
                  state.s_t.reshape(by_warp), state.a.reshape(by_warp))  # fmt: skip
    state = merge_along(state, 2, SPEC)
    if WARPS > 1:
        state = convert_state(state, warp_states_layout(SPEC, False), TRIVIAL=True)
        maxima_and_sums = gl.join(gl.join(state.c, state.c_t), gl.join(state.s, state.s_t))
        numbers = gl.join(maxima_and_sums, gl.join(gl.join(state.a, state.a), gl.join(state.a, state.a)))
        numbers = gl.convert_layout(numbers, warp_states_layout(SPEC, True))
        maxima_and_sums, differences = gl.split(numbers)
        maxima, sums = gl.split(maxima_and_sums)
        c, c_t = gl.split(maxima)
        s, s_t = gl.split(sums)
        a, _ = gl.split(gl.split(differences)[0])
        state = State(c, s, c_t, s_t, a)
    return merge_along(state, 1, SPEC)


@gluon.jit
def state_of_rows(state, label_logit, SPEC: gl.constexpr):
    """Merge the states of the threads of a row, (ROWS, LANES) to (ROWS,) in `state_layout`.

    label_logit: (ROWS,) x[label] where this program holds it, else 0. It is not used without labels.
    """
    layout: gl.constexpr = state_layout(SPEC)
    if has_labels(SPEC):
        state = convert_state(merge_along(state, 1, SPEC), layout)
        return State(state.c, state.s, gl.convert_layout(label_logit, layout), state.s_t, state.a)
    else:
        return convert_state(_merge_warps(state, SPEC), layout)


@gluon.jit
def row_loss(state, scales, SPEC: gl.constexpr):
    """The loss of each row, (ROWS,), and log2 of its sum of exp, from the state of the whole vocabulary.

    With LOGPROB the label's log-probability takes the place of the loss.
    """
    log_s = gl.log2(state.s)
    r = reference(state.c)
    log_z = r + log_s
    if has_labels(SPEC):
        loss = log_s - gl.fma(state.c_t, scales.k, 0.0 - r)
    elif SPEC.LOSS == "soft_cross_entropy":
        loss = log_s - state.a / state.s_t
    elif SPEC.LOSS == "forward_kl":
        loss = state.a / state.s_t - gl.log2(state.s_t) + log_s
    else:
        loss = state.a / state.s - log_s + gl.log2(state.s_t)
    if SPEC.LOGPROB:
        loss *= -LN_2
    else:
        loss *= LN_2
    if SPEC.Z_LOSS:
        loss += scales.z_loss * (log_z * LN_2) * (log_z * LN_2)
    return loss, log_z
