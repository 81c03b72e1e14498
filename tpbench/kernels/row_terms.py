"""Row states, and what follows from them: the loss of a row and the factors of its gradient, for all kernels.

A state is numbers that stand for any set of columns of a row. States of disjoint columns merge into one state, up to
that of the whole vocabulary. All kernels use these letters. x and t are the scaled logits and target logits:

| name | meaning | unit | losses |
| --- | --- | --- | --- |
| m | maximum: max x | nats | all |
| s | sum of exponentials: sum exp(x - m) | none | all |
| x_label | logit of the label: x[label] where this rank holds it, else 0 | nats | of labels |
| m_t | maximum of the target logits: max t | nats | against target logits |
| s_t | sum of exponentials: sum exp(t - m_t) | none | against target logits; of labels, with label smoothing |
| a | sum of weighted differences, below | nats | as s_t |
| h | weighted sum of logits: sum exp(x - m) (x - m) | nats | all, if entropies are wanted |
| m_k, s_k | as m and s, over the teacher's columns | | against a teacher's top k |

A number that the loss doesn't need is any number. `numbers_of` says which numbers a kernel stores for other kernels and
ranks, and in which order. A suffix says which of two merged states a number is from: `w_1`, `w_2`.

Label smoothing is a soft cross-entropy against equal target logits: there s_t is the number of columns.

| loss | weight | difference |
| --- | --- | --- |
| label smoothing | 1 | x - m |
| soft_cross_entropy | exp(t - m_t) | x - m |
| forward_kl | exp(t - m_t) | (t - m_t) - (x - m) |
| reverse_kl | exp(x - m) | (x - m) - (t - m_t) |
| jsd, total_variation | none: they need both softmaxes before, so their means are numbers of the row (`RowInputs`) | |

A loss against a teacher's top k is one of k labels with the weights q. Its `s_t` is the sum of the weights of the
columns that a rank holds, and its `a` has the weights q (forward) or exp(x - m_k) (reverse_kl), and the differences
x - m_k or (x - m_k) - log q.

Everything is relative to the maxima, so that a large common offset of the logits costs no precision. Where all columns
are -inf, the maximum is -inf too. Then the exponents are relative to 0, because -inf - (-inf) would be NaN. A weight of
zero gives zero, even if the difference is infinite (0 log 0 = 0).

p = softmax(x), q = softmax(t), H is the entropy of p, and z the log of the sum of exp(x). For every loss the gradient
by x is, in each column, a sum of up to four terms, whose factors are numbers of the row:

| losses | gradient by x |
| --- | --- |
| of labels | on_p * p - on_target * onehot(label) - on_column - on_entropy * p * (log p + H) |
| soft_cross_entropy, forward_kl | on_p * p - on_target * q - on_entropy * p * (log p + H) |
| reverse_kl | on_p * p * (D - on_target) - on_entropy * p * (log p + H), with D = (x - max x) - (t - max t) |
| jsd | the same, with D = log p - log((1 - beta) p + beta q) |
| total_variation | the same, with D = sign(p - q) / 2 |

Against a teacher's top k the gradient is on_p * p, and in the k columns on_top * p - on_target * q or, for reverse_kl
with p_k = softmax(x over the k columns), on_top * p_k * (log p_k - log q - on_target).

A loss of labels is a function of log p[label], z, H and the mean of log p. Its slope by log p[label] contributes
slope * (onehot(label) - p). So a new loss of labels is a new formula in `row_terms`.

The functions are arithmetic on fp32 tensors of one shape. Kernels in Triton and in Gluon call them.
"""

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tpbench.kernels.kernel_arguments import RowInputs

LN_2 = tl.constexpr(math.log(2.0))
LOG2_E = tl.constexpr(math.log2(math.e))
LEAST_EXPONENT = tl.constexpr(-200.0)
"""Least exponent in a product with its exponential: both are 0. With -inf the product would be NaN."""
LEAST_REST = tl.constexpr(2.0**-24)
"""Least probability of the columns outside of a teacher's top k: half of what fp32 can tell from 1."""
_INPUTS = tl.constexpr(len(RowInputs._fields))


class State(NamedTuple):
    """The state of rows, (ROWS,) fp32 each."""

    m: Any
    s: Any
    x_label: Any
    m_t: Any
    s_t: Any
    a: Any
    h: Any
    m_k: Any
    s_k: Any


class Teacher(NamedTuple):
    """A teacher's top k, (ROWS,): q of all other columns, and the sum of q log q, both with a bucket if wanted."""

    rest: Any
    negative_entropy: Any


class RowSoftmax(NamedTuple):
    """Numbers of the softmax of rows, (ROWS,) fp32 in nats. A number that the loss doesn't need is any number."""

    log_s: Any
    """Log of the sum of exponentials relative to the maximum. `log_s_t`: of the target logits."""
    log_z: Any
    log_p: Any
    """Log-probability of the label."""
    log_s_t: Any
    mean: Any
    """The weighted mean of the differences of the table above. Of a top k: sum of q log p or, for reverse_kl, the
    divergence KL(p_k || q) of the student's distribution over the k columns."""
    entropy: Any
    log_mass: Any
    """Log of the sum of p over the teacher's columns."""


class RowTerms(NamedTuple):
    """The results of rows and the factors of their gradients. A factor is a tensor (ROWS,) or one number for all."""

    loss: Any
    on_p: Any
    on_target: Any
    on_column: Any
    on_entropy: Any
    clipped: Any
    """True where the clip decides the policy loss."""
    on_top: Any


@triton.jit
def reference(maximum):
    """The number that exponents are relative to: 0 instead of the maximum -inf, since -inf - (-inf) is NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def weigh(weight, difference):
    """weight * difference, or 0 where the weight is 0, even if the difference is infinite."""
    return tl.where(weight == 0.0, 0.0, weight * difference)


@triton.jit
def shifted(state, weight, weight_t, shift, shift_t, SPEC: tl.constexpr):
    """The sum of weighted differences `a` of a state relative to new references, which are lower by the shifts."""
    if SPEC.TOP_K and SPEC.TOP_LOSS == "reverse_kl":
        return weigh(weight, state.a + state.s_k * shift)
    elif SPEC.TOP_K:
        return state.a + state.s_t * shift
    elif SPEC.LOSS == "soft_cross_entropy":
        return weigh(weight_t, state.a + state.s_t * shift)
    elif SPEC.LOSS == "forward_kl":
        return weigh(weight_t, state.a + state.s_t * (shift_t - shift))
    else:
        return weigh(weight, state.a + state.s * (shift - shift_t))


def numbers_in_state(spec: Any) -> int:
    """Return the length of `numbers_of`. spec: the constants of a kernel."""
    target_numbers = 5 if spec.SMOOTHED or spec.LOSS != "cross_entropy" else 3
    return int((6 if spec.TOP_K else target_numbers) + spec.ENTROPY)


@triton.jit
def numbers_of(state, SPEC: tl.constexpr):
    """The numbers of a state that the loss needs, in the order in which kernels store them."""
    if SPEC.LOSS != "cross_entropy":
        numbers = (state.m, state.s, state.m_t, state.s_t, state.a)
    elif SPEC.TOP_K:
        numbers = (state.m, state.s, state.m_k, state.s_k, state.s_t, state.a)
    elif SPEC.SMOOTHED:
        numbers = (state.m, state.s, state.x_label, state.s_t, state.a)
    else:
        numbers = (state.m, state.s, state.x_label)
    if SPEC.ENTROPY:
        numbers = numbers + (state.h,)
    return numbers


@triton.jit
def state_of(numbers, SPEC: tl.constexpr):
    """The state with these numbers, in the order of `numbers_of`. Those that the loss does not need are any."""
    m = numbers[0]
    s = numbers[1]
    h = numbers[len(numbers) - 1]
    if SPEC.LOSS != "cross_entropy":
        return State(m, s, s, numbers[2], numbers[3], numbers[4], h, m, s)
    elif SPEC.TOP_K:
        return State(m, s, s, s, numbers[4], numbers[5], h, numbers[2], numbers[3])
    elif SPEC.SMOOTHED:
        return State(m, s, numbers[2], s, numbers[3], numbers[4], h, m, s)
    else:
        return State(m, s, numbers[2], s, s, s, h, m, s)


@triton.jit
def merge_two(one, two, EXP: tl.constexpr, SPEC: tl.constexpr):
    """Merge the states of two disjoint sets of columns.

    The merge is not associative in the last bit, so the caller must keep one order. EXP: the exponential function in
    the unit of the states. States of threads have any x_label and any numbers of a top k.
    """
    m = tl.maximum(one.m, two.m)
    r = reference(m)
    w_1 = EXP(one.m - r)
    w_2 = EXP(two.m - r)
    s = one.s * w_1 + two.s * w_2
    h = one.h
    if SPEC.ENTROPY:
        h = weigh(w_1, one.h + one.s * (reference(one.m) - r)) + weigh(w_2, two.h + two.s * (reference(two.m) - r))
    if SPEC.TOP_K:
        m_k = tl.maximum(one.m_k, two.m_k)
        r_k = reference(m_k)
        wk_1 = EXP(one.m_k - r_k)
        wk_2 = EXP(two.m_k - r_k)
        a_1 = shifted(one, wk_1, wk_1, reference(one.m_k) - r_k, 0.0, SPEC)
        a_2 = shifted(two, wk_2, wk_2, reference(two.m_k) - r_k, 0.0, SPEC)
        return state_of((m, s, m_k, one.s_k * wk_1 + two.s_k * wk_2, one.s_t + two.s_t, a_1 + a_2, h), SPEC)
    elif SPEC.LOSS == "cross_entropy":
        s_t = one.s_t
        a = one.a
        if SPEC.SMOOTHED:
            s_t = one.s_t + two.s_t
            a = (one.a + one.s_t * (reference(one.m) - r)) + (two.a + two.s_t * (reference(two.m) - r))
        return state_of((m, s, one.x_label + two.x_label, s_t, a, h), SPEC)
    else:
        m_t = tl.maximum(one.m_t, two.m_t)
        r_t = reference(m_t)
        wt_1 = EXP(one.m_t - r_t)
        wt_2 = EXP(two.m_t - r_t)
        a_1 = shifted(one, w_1, wt_1, reference(one.m) - r, reference(one.m_t) - r_t, SPEC)
        a_2 = shifted(two, w_2, wt_2, reference(two.m) - r, reference(two.m_t) - r_t, SPEC)
        return state_of((m, s, m_t, one.s_t * wt_1 + two.s_t * wt_2, a_1 + a_2, h), SPEC)


@triton.jit
def softmax_of_rows(state, x_label, NATS: tl.constexpr, SPEC: tl.constexpr):
    """The `RowSoftmax` of rows from the state of the whole vocabulary. NATS: in a unit of the state's exponents.

    x_label: the exponent of the label's logit, relative to the reference. Without labels it is any number.
    """
    log_s = tl.log2(state.s) * LN_2
    log_s_t = log_s
    if SPEC.LOSS != "cross_entropy":
        log_s_t = tl.log2(state.s_t) * LN_2
    weights = state.s_t
    if SPEC.LOSS == "reverse_kl":
        weights = state.s
    mean = state.a / weights * NATS
    log_mass = log_s
    if SPEC.TOP_K:
        log_s_k = tl.log2(state.s_k) * LN_2
        shift = (reference(state.m_k) - reference(state.m)) * NATS - log_s
        log_mass = log_s_k + shift
        if SPEC.TOP_LOSS == "reverse_kl":
            mean = state.a / state.s_k * NATS - log_s_k
        else:
            mean = state.a * NATS + state.s_t * shift
    entropy = log_s - state.h / state.s * NATS
    log_z = reference(state.m) * NATS + log_s
    return RowSoftmax(log_s, log_z, x_label * NATS - log_s, log_s_t, mean, entropy, log_mass)


@triton.jit
def top_terms(softmax, teacher, on_z, SPEC: tl.constexpr):
    """The loss of rows against a teacher's top k, on_p, on_target and on_top. on_z: of the z-loss, a factor on p."""
    mass = tl.exp(softmax.log_mass)
    rest = tl.maximum(1.0 - mass, LEAST_REST)
    if SPEC.TOP_LOSS == "reverse_kl":
        loss = softmax.mean
        if SPEC.BUCKET:
            gap = tl.log(rest) - tl.log(teacher.rest)
            loss = weigh(mass, softmax.mean + softmax.log_mass) + rest * gap
            return loss, gap - loss + on_z, loss - softmax.log_mass - on_z, mass
        else:
            return loss, on_z + mass * 0.0, loss - on_z * mass, mass * 0.0 + 1.0
    else:
        loss = -softmax.mean
        on_p = 1.0 + on_z + mass * 0.0
        on_top = on_p
        if SPEC.BUCKET:
            loss -= teacher.rest * tl.log(rest)
            on_p -= teacher.rest / rest
        if SPEC.TOP_LOSS == "forward_kl":
            loss += teacher.negative_entropy
        return loss, on_p, mass * 0.0 + 1.0, on_top


@triton.jit
def load_inputs(inputs, row, exists):
    """Load the numbers of rows, in the order of the fields of `RowInputs`. A missing one is any number."""
    values = ()
    for number in tl.static_range(_INPUTS):
        if inputs[number] is None:
            values = values + (0.0,)
        else:
            values = values + (tl.load(inputs[number] + row, mask=exists, other=0.0),)
    return values


@triton.jit
def policy_terms(log_ratio, advantages, scales):
    """The loss -min(ratio * A, clip(ratio) * A), its slope by the log of the ratio, and whether the clip decides."""
    ratio = tl.exp(log_ratio)
    gain = weigh(advantages, ratio)
    bound = advantages * tl.minimum(tl.maximum(ratio, scales.clip_low), scales.clip_high)
    clipped = bound < gain
    loss = tl.where(ratio == ratio, -tl.minimum(gain, bound), ratio)  # the minimum drops a NaN
    return loss, tl.where(clipped, 0.0, -gain), clipped


@triton.jit
def row_terms(softmax, teacher, inputs, values, scale, scales, SPEC: tl.constexpr):
    """The `RowTerms` of rows. All factors on the gradient join here, in fp32.

    softmax: their `RowSoftmax`. teacher: their `Teacher`, if they have one. values: what `load_inputs` returned. scale:
    factor on the gradient. scales: `Scales`.
    """
    row_grad, entropy_grad, row_weight, old_logprobs, advantages, ref_logprobs, divergence_p, divergence_q, _ = values
    on_z = 0.0
    if SPEC.Z_LOSS:
        on_z = 2.0 * scales.z_loss * softmax.log_z
    row_scale = scale
    if inputs.row_grad is not None:
        row_scale = row_scale * row_grad
    if inputs.row_weight is not None:
        row_scale = row_scale * row_weight
    on_column = scales.column * row_scale
    on_entropy = 0.0
    clipped = False
    on_top = 0.0
    if SPEC.TOP_K:
        loss, on_p, on_target, on_top = top_terms(softmax, teacher, on_z, SPEC)
        on_top = on_top * row_scale
        if SPEC.TOP_LOSS != "reverse_kl":
            on_target = on_target * row_scale
    elif SPEC.LOSS == "cross_entropy":
        loss = weigh(scales.label, softmax.log_p)
        slope = scales.label  # the derivative of the loss by log p[label]
        if inputs.advantages is not None:
            policy, of_ratio, clipped = policy_terms(softmax.log_p - old_logprobs, advantages, scales)
            loss += policy
            slope = slope + of_ratio
            if inputs.ref_logprobs is not None:
                difference = ref_logprobs - softmax.log_p
                ratio = tl.exp(difference)
                loss += weigh(scales.kl, ratio - difference - 1.0)
                slope = slope - weigh(scales.kl, ratio - 1.0)
        on_p = on_z - slope
        on_target = -slope * row_scale
        if SPEC.SMOOTHED:
            loss += scales.smoothing * (softmax.log_s - softmax.mean)
            on_p += scales.smoothing
    elif SPEC.LOSS == "reverse_kl":
        loss = softmax.mean - softmax.log_s + softmax.log_s_t
        on_p = 1.0
        on_target = softmax.mean - on_z
    elif SPEC.LOSS == "jsd":
        loss = SPEC.BETA * divergence_q + (1.0 - SPEC.BETA) * divergence_p
        on_p = 1.0 - SPEC.BETA
        on_target = divergence_p - on_z / on_p
    elif SPEC.LOSS == "total_variation":
        loss = divergence_p + divergence_q
        on_p = 1.0
        on_target = divergence_p - on_z
    else:
        loss = softmax.log_s - softmax.mean
        if SPEC.LOSS == "forward_kl":
            loss = softmax.mean - softmax.log_s_t + softmax.log_s
        on_p = 1.0 + on_z
        on_target = row_scale
    if SPEC.Z_LOSS:
        loss += scales.z_loss * softmax.log_z * softmax.log_z
    on_p = on_p * row_scale
    if SPEC.ENTROPY and inputs.advantages is not None:
        loss -= scales.entropy_term * softmax.entropy
        on_entropy = -scales.entropy_term * row_scale
    if inputs.entropy_grad is not None:
        on_entropy += entropy_grad * scales.entropy
    if inputs.row_weight is not None:
        loss = loss * row_weight
    return RowTerms(loss, on_p, on_target, on_column, on_entropy, clipped, on_top)


@triton.jit
def store_rows(outputs, row, softmax, terms, is_correct, exists, counts):
    """Store the results of rows, 0 for those that do not count. outputs: `RowOutputs`."""
    tl.store(outputs.loss + row, tl.where(counts, terms.loss, 0.0), mask=exists)
    if outputs.entropy is not None:
        tl.store(outputs.entropy + row, tl.where(counts, softmax.entropy, 0.0), mask=exists)
    if outputs.logprobs is not None:
        tl.store(outputs.logprobs + row, tl.where(counts, softmax.log_p, 0.0), mask=exists)
    if outputs.clipped is not None:
        tl.store(outputs.clipped + row, counts & terms.clipped, mask=exists)
    if outputs.correct is not None:
        tl.store(outputs.correct + row, counts & is_correct, mask=exists)
