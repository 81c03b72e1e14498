"""The targets of rows in the one-pass kernels: labels, or a teacher's top k.

A row's loss needs its softmax over all columns, and the logit of its label or k logits. The gradient of all columns is
a number of the row times p. Those of the target's columns are stored again. Targets are loaded a step before their use.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpbench.kernels.one_pass import layouts, ptx, states, tiles
from tpbench.kernels.row_terms import LEAST_REST, LN_2, LOG2_E, Teacher, reference, state_of, weigh


class Own(NamedTuple):
    """The target in the columns of this program: labels, (ROWS,), or in `top_layout` a top k, (ROWS, TOP_BLOCK)."""

    local: Any
    """int64: the column in the part of this program."""
    held: Any
    """This program has that column."""
    logit: Any
    """fp32: the raw logit where it is held, else 0 or, of a top k, -inf."""
    log_q: Any
    """The teacher's log-probability, for a top k: in bits, of all columns, normalised by `with_top`."""


@gluon.jit
def labels_at(walk, row, SPEC: gl.constexpr):
    """Load the labels of rows: of a top k the first columns. A row that doesn't exist has the label -1."""
    if SPEC.TOP_K:
        return gl.load(walk.target.pointer.indices + row.to(gl.int64) * SPEC.TOP_K, mask=row < walk.n_rows, other=-1)
    else:
        return gl.load(walk.target.pointer + row, mask=row < walk.n_rows, other=-1)


@gluon.jit
def load_labels(inputs, walk, row, SPEC: gl.constexpr):
    """Load the labels of rows, (ROWS,): -1 of rows past the last and of rows with the weight 0.

    Without labels other rows have any label from 0.
    """
    label = walk.row_in_tile
    if layouts.has_labels(SPEC):
        label = labels_at(walk, row, SPEC)
    if inputs.row_weight is not None:
        label = gl.where(gl.load(inputs.row_weight + row, mask=row < walk.n_rows, other=0.0) == 0.0, -1, label)
    return label


@gluon.jit
def columns_of(label, walk):
    """Labels as columns, int32. -1: the row does not count."""
    counts = (label != walk.ignore_index) & (label >= 0) & (label < walk.vocab_size)
    return gl.where(counts, label.to(gl.int32), -1)


@gluon.jit
def rows_that_count(walk, row, label, SPEC: gl.constexpr):
    """Return which rows have a loss: those that exist, whose labels count and whose weight is not 0."""
    if layouts.has_labels(SPEC):
        return columns_of(label, walk) >= 0
    else:
        return (row < walk.n_rows) & (label >= 0)


@gluon.jit
def _offset(walk, matrix, row, local, SPEC: gl.constexpr):
    """Offsets of columns `local` of the part in rows of a matrix."""
    return row * (matrix.row * SPEC.VECTOR) + (walk.first * SPEC.VECTOR + local) * matrix.column


@gluon.jit
def load_own_label(walk, row, label, SPEC: gl.constexpr):
    """Start to load the logits of labels, (ROWS,). Returns which rows count, and `Own`.

    Without labels the latter holds numbers that nothing reads.
    """
    if layouts.has_labels(SPEC) and not SPEC.TOP_K:
        column = columns_of(label, walk)
        local = (column - walk.start).to(gl.int64)
        counts = column >= 0
        held = counts & (local >= 0) & (local < walk.valid)
        at = _offset(walk, walk.logits, row, local, SPEC)
        logit = gl.load(walk.logits.pointer + at, mask=held, other=0.0).to(gl.float32)
        return counts, Own(local, held, logit, logit)
    else:
        return rows_that_count(walk, row, label, SPEC), Own(row, row, row, row)


@gluon.jit
def _plus(a_1, b_1, c_1, d_1, e_1, a_2, b_2, c_2, d_2, e_2):
    return a_1 + a_2, b_1 + b_2, c_1 + c_2, d_1 + d_2, e_1 + e_2


@gluon.jit
def load_top(walk, row, SPEC: gl.constexpr):
    """Start to load the teacher's columns of rows (ROWS,), and their values in fp32."""
    layout: gl.constexpr = layouts.top_layout(SPEC)
    number = gl.arange(0, SPEC.TOP_BLOCK, gl.SliceLayout(0, layout))[None, :]
    row = gl.convert_layout(row, gl.SliceLayout(1, layout))[:, None]
    exists = (row < walk.n_rows) & (number < SPEC.TOP_K)
    place = row * SPEC.TOP_K + number
    index = gl.load(walk.target.pointer.indices + place, mask=exists, other=-1)
    return index, gl.load(walk.target.pointer.log_q + place, mask=exists, other=-states.INF).to(gl.float32)


@gluon.jit
def load_own_top(walk, row, counts, top, SPEC: gl.constexpr):
    """Start to load the logits in the teacher's columns `top` of the rows that count. Log q is not normalised."""
    layout: gl.constexpr = layouts.top_layout(SPEC)
    index, log_q = top
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    exists = gl.convert_layout(counts, by_row)[:, None]
    exists = exists & (index != walk.ignore_index) & (index >= 0) & (index < walk.vocab_size)
    local = index.to(gl.int64) - walk.start
    held = exists & (local >= 0) & (local < walk.valid)
    at = _offset(walk, walk.logits, gl.convert_layout(row, by_row)[:, None], local, SPEC)
    logit = gl.load(walk.logits.pointer + at, mask=held, other=-states.INF).to(gl.float32)
    scale = LOG2_E if SPEC.BUCKET else walk.scales.target
    return Own(local, held, logit, gl.where(exists, log_q * scale, -states.INF))


@gluon.jit
def with_top(walk, state, own, SPEC: gl.constexpr):
    """The state of rows with the numbers of the teacher's columns, `own` with a normalised log q, and a `Teacher`.

    The columns of a row lie in several threads. Two reductions make all numbers: one of maxima, and one of sums.
    Without a top k nothing changes, and nothing reads the teacher.
    """
    if SPEC.TOP_K == 0:
        return state, own, own
    else:
        m_q, m_k = gl.reduce((own.log_q, own.logit), 1, states.maxima)
        m_k = m_k * walk.scales.logits
        x = gl.fma(own.logit, walk.scales.logits, 0.0 - reference(m_k)[:, None])
        log_q = own.log_q
        if not SPEC.BUCKET:
            log_q = log_q - reference(m_q)[:, None]
        q = ptx.exp2(log_q)
        exp_x = ptx.exp2(x)
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
            of_rows = of_rows + (gl.convert_layout(numbers[number], layouts.state_layout(SPEC)),)
        state = state_of((state.m, state.s, of_rows[0], of_rows[1], of_rows[2], of_rows[3]), SPEC)  # type: ignore[misc]
        own = Own(own.local, own.held, own.logit, log_q)
        return state, own, Teacher(of_rows[4], of_rows[5])  # type: ignore[misc]


@gluon.jit
def _to_top(values, SPEC: gl.constexpr):
    """(ROWS,) to (ROWS, 1) in `top_layout`."""
    return gl.convert_layout(values, gl.SliceLayout(1, layouts.top_layout(SPEC)))[:, None]


@gluon.jit
def _gradient_at_top(walk, own, state, terms, SPEC: gl.constexpr):
    on_top = _to_top(terms.on_top, SPEC)
    on_target = _to_top(terms.on_target + state.s * 0.0, SPEC)
    if SPEC.TOP_LOSS == "reverse_kl":
        log_p = gl.fma(own.logit, walk.scales.logits, _to_top(0.0 - reference(state.m_k), SPEC))
        log_p -= _to_top(gl.log2(state.s_k), SPEC)
        p = gl.where(own.logit == -states.INF, 0.0, ptx.exp2(log_p))
        return weigh(p * on_top, (log_p - own.log_q) * LN_2 - on_target)
    else:
        x = gl.fma(own.logit, walk.scales.logits, _to_top(0.0 - reference(state.m), SPEC))
        p = ptx.exp2(x) / _to_top(state.s, SPEC)
        return p * on_top - ptx.exp2(own.log_q) * on_target


@gluon.jit
def _gradient_at_label(walk, own, factors, SPEC: gl.constexpr):
    x, slope = states.exponents(own.logit, walk.scales.logits, factors.row_reference, SPEC.SOFTCAP)
    at_label = tiles.times_factor(ptx.exp2(x), x, factors.row_factor, factors.row_options, SPEC) - factors.row_target
    if SPEC.SOFTCAP > 0:
        at_label *= slope
    return at_label


@gluon.jit
def store_at_target(walk, own, state, terms, factors, row, exists, SPEC: gl.constexpr):
    """Store the gradient in the columns of labels or of a top k again: cheaper than to compare every column with them.

    state: of the whole vocabulary. terms, factors: what `rows.complete_rows` returned.
    """
    if SPEC.GRAD and layouts.has_labels(SPEC):
        if SPEC.TOP_K:
            g = _gradient_at_top(walk, own, state, terms, SPEC)
            row = _to_top(row, SPEC)
            exists = _to_top(exists, SPEC)
        else:
            g = _gradient_at_label(walk, own, factors, SPEC)
        at = _offset(walk, walk.grad, row, own.local, SPEC)
        held = own.held
        if SPEC.YIELDS:
            held = held & exists
        ptx.barrier()
        gl.store(walk.grad.pointer + at, g.to(walk.grad.pointer.dtype.element_ty), mask=held)
