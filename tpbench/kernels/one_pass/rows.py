"""Rows and their labels: which rows count, how many, and the sum of their losses."""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,untyped-decorator"
# Triton decides the types of a kernel's arguments.
# ruff: noqa: RET505
# Triton leaves a branch uncompiled only where both branches are written out.

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpbench.kernels.one_pass.layouts import column_unit, flat_layout, has_labels
from tpbench.kernels.one_pass.walk import rows_after

BATCH = gl.constexpr(4096)
"""Rows whose labels or losses a program loads before it waits for the first of them."""


class OwnLabel(NamedTuple):
    """The label's element of each row, (ROWS,)."""

    local: Any
    """int64: its column in the part of this program."""
    held: Any
    """This program has that column."""
    logit: Any
    """fp32: its raw logit where it is held, else 0."""


@gluon.jit
def load_labels(walk, row, STEPS: gl.constexpr, SPEC: gl.constexpr):
    """Load the labels, (ROWS,), of the rows that follow `row` after STEPS steps. Rows past the last have the label -1.

    Without labels return numbers that nothing reads.
    """
    if has_labels(SPEC):
        later = rows_after(walk, row, STEPS, SPEC)
        return gl.load(walk.target.pointer + later, mask=later < walk.n_rows, other=-1)
    else:
        return walk.row_in_tile


@gluon.jit
def _columns_of(label, walk):
    """Labels as columns, int32. -1: the row does not count."""
    counts = (label != walk.ignore_index) & (label >= 0) & (label < walk.vocab_size)
    return gl.where(counts, label.to(gl.int32), -1)


@gluon.jit
def rows_that_count(walk, row, label, SPEC: gl.constexpr):
    """Return which rows have a loss: those that exist and whose labels count."""
    if has_labels(SPEC):
        return _columns_of(label, walk) >= 0
    else:
        return row < walk.n_rows


@gluon.jit
def load_own_label(walk, row, label, SPEC: gl.constexpr):
    """Start to load the logits of labels, (ROWS,). Returns which rows count, and an `OwnLabel`."""
    logits = walk.logits
    part = walk.part
    column = _columns_of(label, walk)
    local = (column - walk.start).to(gl.int64)
    counts = column >= 0
    held = counts & (local >= 0) & (local < part.valid)
    at = row * (logits.row * column_unit(SPEC)) + (part.first * column_unit(SPEC) + local) * logits.column
    logit = gl.load(logits.pointer + at, mask=held, other=0.0).to(gl.float32)
    return counts, OwnLabel(local, held, logit)


@gluon.jit
def inverse_count(walk, SPEC: gl.constexpr):
    """Return 1 / the number of rows whose labels count, at least 1."""
    total = gl.zeros([BATCH], gl.int32, flat_layout(SPEC))
    for begin in range(0, walk.n_rows, BATCH):
        row = begin + gl.arange(0, BATCH, flat_layout(SPEC))
        label = _columns_of(gl.load(walk.target.pointer + row, mask=row < walk.n_rows, other=-1), walk)
        total += gl.where((label >= 0) & (row < walk.n_rows), 1, 0)
    return 1.0 / gl.maximum(gl.sum(total, axis=0), 1).to(gl.float32)


@gluon.jit
def sum_of_losses(row_loss, n_rows, SPEC: gl.constexpr):
    """Sum the row losses that all programs have stored, in one order."""
    total = gl.zeros([BATCH], gl.float32, flat_layout(SPEC))
    for begin in range(0, n_rows, BATCH):
        row = begin + gl.arange(0, BATCH, flat_layout(SPEC))
        total += gl.load(row_loss + row, mask=row < n_rows, other=0.0, volatile=True)
    return gl.sum(total, axis=0)
