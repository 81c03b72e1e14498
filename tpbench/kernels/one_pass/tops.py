"""A teacher's top k in the one-pass kernels: log q, the logits in its columns, their state, and their gradient.

A row's loss needs its softmax over all columns and k logits. The gradient of all columns is a number of the row times
p, as for labels. Those of the k columns are stored again. Indices and values are loaded a step before their use.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpbench.kernels.one_pass.layouts import column_unit, state_layout, top_layout
from tpbench.kernels.one_pass.ptx import barrier, exp2
from tpbench.kernels.one_pass.state import INF, LOG2_E, maxima
from tpbench.kernels.row_terms import LEAST_REST, LN_2, Teacher, reference, state_of, weigh


class OwnTop(NamedTuple):
    """The teacher's columns of rows, (ROWS, TOP_BLOCK) in `top_layout`."""

    local: Any
    """int64: the column in the part of this program."""
    held: Any
    """This program has that column."""
    logit: Any
    """fp32: its raw logit, -inf where it isn't held."""
    log_q: Any
    """In bits, of all columns, normalised by `with_top`."""


@gluon.jit
def _plus(a_1, b_1, c_1, d_1, e_1, a_2, b_2, c_2, d_2, e_2):
    return a_1 + a_2, b_1 + b_2, c_1 + c_2, d_1 + d_2, e_1 + e_2


@gluon.jit
def load_top(walk, row, SPEC: gl.constexpr):
    """Start to load the teacher's columns of rows (ROWS,), and their values in fp32."""
    layout: gl.constexpr = top_layout(SPEC)
    number = gl.arange(0, SPEC.TOP_BLOCK, gl.SliceLayout(0, layout))[None, :]
    row = gl.convert_layout(row, gl.SliceLayout(1, layout))[:, None]
    exists = (row < walk.n_rows) & (number < SPEC.TOP_K)
    place = row * SPEC.TOP_K + number
    index = gl.load(walk.target.pointer.indices + place, mask=exists, other=-1)
    return index, gl.load(walk.target.pointer.log_q + place, mask=exists, other=-INF).to(gl.float32)


@gluon.jit
def load_own_top(walk, row, counts, top, SPEC: gl.constexpr):
    """Start to load the logits in the teacher's columns `top` of the rows that count. Log q is not normalised."""
    layout: gl.constexpr = top_layout(SPEC)
    index, log_q = top
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    exists = gl.convert_layout(counts, by_row)[:, None]
    exists = exists & (index != walk.ignore_index) & (index >= 0) & (index < walk.vocab_size)
    logits, part = walk.logits, walk.part
    local = index.to(gl.int64) - walk.start
    held = exists & (local >= 0) & (local < part.valid)
    at = gl.convert_layout(row, by_row)[:, None] * (logits.row * column_unit(SPEC))
    at += (part.first * column_unit(SPEC) + local) * logits.column
    logit = gl.load(logits.pointer + at, mask=held, other=-INF).to(gl.float32)
    scale = LOG2_E if SPEC.BUCKET else walk.scales.target
    return OwnTop(local, held, logit, gl.where(exists, log_q * scale, -INF))


@gluon.jit
def with_top(walk, state, own, SPEC: gl.constexpr):
    """The state of rows with the numbers of the teacher's columns, `own` with a normalised log q, and a `Teacher`.

    The columns of a row lie in several threads. Two reductions make all numbers: one of maxima, and one of sums.
    """
    m_q, m_k = gl.reduce((own.log_q, own.logit), 1, maxima)
    m_k = m_k * walk.scales.logits
    x = gl.fma(own.logit, walk.scales.logits, 0.0 - reference(m_k)[:, None])
    log_q = own.log_q
    if not SPEC.BUCKET:
        log_q = log_q - reference(m_q)[:, None]
    q = exp2(log_q)
    exp_x = exp2(x)
    held_q = gl.where(own.held, q, 0.0)
    if SPEC.TOP_LOSS == "reverse_kl":
        terms = weigh(exp_x, x - log_q)
    else:
        terms = weigh(held_q, x)
    total, negative_entropy, s_k, s_t, a = gl.reduce((q, weigh(q, log_q), exp_x, held_q, terms), 1, _plus)
    rest = gl.maximum(1.0 - total, LEAST_REST)
    if SPEC.BUCKET:
        negative_entropy += rest * gl.log2(rest)
    else:
        log_total = gl.log2(total)
        log_q = log_q - log_total[:, None]
        negative_entropy = negative_entropy / total - log_total
        s_t = s_t / total
        if SPEC.TOP_LOSS == "reverse_kl":
            a += s_k * log_total
        else:
            a = a / total
    numbers = (m_k, s_k, s_t, a, rest, negative_entropy * LN_2)
    of_rows = ()
    for number in gl.static_range(len(numbers)):
        of_rows = of_rows + (gl.convert_layout(numbers[number], state_layout(SPEC)),)
    state = state_of((state.m, state.s, of_rows[0], of_rows[1], of_rows[2], of_rows[3]), SPEC)  # type: ignore[misc]
    own = OwnTop(own.local, own.held, own.logit, log_q)
    return state, own, Teacher(of_rows[4], of_rows[5])  # type: ignore[misc]


@gluon.jit
def _to_top(values, SPEC: gl.constexpr):
    """(ROWS,) to (ROWS, 1) in `top_layout`."""
    return gl.convert_layout(values, gl.SliceLayout(1, top_layout(SPEC)))[:, None]


@gluon.jit
def store_at_top(walk, own, state, terms, row, exists, SPEC: gl.constexpr):
    """Store the gradient in the teacher's columns again. state: of the whole vocabulary. terms: `RowTerms`."""
    on_top = _to_top(terms.on_top, SPEC)
    on_target = _to_top(terms.on_target + state.s * 0.0, SPEC)
    if SPEC.TOP_LOSS == "reverse_kl":
        log_p = gl.fma(own.logit, walk.scales.logits, _to_top(0.0 - reference(state.m_k), SPEC))
        log_p -= _to_top(gl.log2(state.s_k), SPEC)
        p = gl.where(own.logit == -INF, 0.0, exp2(log_p))
        g = weigh(p * on_top, (log_p - own.log_q) * LN_2 - on_target)
    else:
        x = gl.fma(own.logit, walk.scales.logits, _to_top(0.0 - reference(state.m), SPEC))
        p = exp2(x) / _to_top(state.s, SPEC)
        g = p * on_top - exp2(own.log_q) * on_target
    grad = walk.grad
    at = gl.convert_layout(row, gl.SliceLayout(1, top_layout(SPEC)))[:, None] * (grad.row * column_unit(SPEC))
    at += (walk.part.first * column_unit(SPEC) + own.local) * grad.column
    held = own.held
    if SPEC.YIELDS:
        held = held & _to_top(exists, SPEC)
    barrier()
    gl.store(grad.pointer + at, g.to(grad.pointer.dtype.element_ty), mask=held)
