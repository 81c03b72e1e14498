"""Rows and their labels: which rows count, how many, and the sum of their losses."""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,untyped-decorator"
# Triton decides the types of a kernel's arguments.
# ruff: noqa: RET505
# Triton leaves a branch uncompiled only where both branches are written out.

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpbench.kernels.one_pass.layouts import column_unit, flat_layout, has_labels

BATCH = gl.constexpr(4096)
"""Rows whose labels or losses a program loads before it waits for the first of them."""


class Vocabulary(NamedTuple):
    """Decides which labels count."""

    size: Any
    ignore_index: Any


class OwnLabel(NamedTuple):
    """The label's element of each row, (ROWS,)."""

    local: Any
    """int64: its column in the part of this program."""
    held: Any
    """This program has that column."""
    logit: Any
    """fp32: its raw logit where it is held, else 0."""


@gluon.jit
def load_labels(target, row, n_rows):
    """Labels of rows. Rows past the last one have the label -1."""
    return gl.load(target + row, mask=row < n_rows, other=-1)


@gluon.jit
def _columns_of(label, vocabulary):
    """Labels as columns, int32. -1: the row does not count."""
    counts = (label != vocabulary.ignore_index) & (label >= 0) & (label < vocabulary.size)
    return gl.where(counts, label.to(gl.int32), -1)


@gluon.jit
def rows_that_count(row, label, n_rows, vocabulary, SPEC: gl.constexpr):
    """Which rows have a loss: those that exist and whose labels count."""
    if has_labels(SPEC):
        return _columns_of(label, vocabulary) >= 0
    else:
        return row < n_rows


@gluon.jit
def load_own_label(logits, row, label, vocabulary, start, part, SPEC: gl.constexpr):
    """Start to load the logits of labels, (ROWS,). Returns which rows count, and an `OwnLabel`.

    start: the global column where this program's part begins.
    """
    column = _columns_of(label, vocabulary)
    local = (column - start).to(gl.int64)
    counts = column >= 0
    held = counts & (local >= 0) & (local < part.valid)
    at = row * (logits.row * column_unit(SPEC)) + (part.first * column_unit(SPEC) + local) * logits.column
    logit = gl.load(logits.pointer + at, mask=held, other=0.0).to(gl.float32)
    return counts, OwnLabel(local, held, logit)


@gluon.jit
def inverse_count(target, n_rows, vocabulary, SPEC: gl.constexpr):
    """1 / the number of rows whose labels count, at least 1."""
    total = gl.zeros([BATCH], gl.int32, flat_layout(SPEC))
    for begin in range(0, n_rows, BATCH):
        row = begin + gl.arange(0, BATCH, flat_layout(SPEC))
        label = _columns_of(load_labels(target, row, n_rows), vocabulary)
        total += gl.where((label >= 0) & (row < n_rows), 1, 0)
    return 1.0 / gl.maximum(gl.sum(total, axis=0), 1).to(gl.float32)


@gluon.jit
def sum_of_losses(row_loss, n_rows, SPEC: gl.constexpr):
    """Sum the row losses that all programs have stored, in one order."""
    total = gl.zeros([BATCH], gl.float32, flat_layout(SPEC))
    for begin in range(0, n_rows, BATCH):
        row = begin + gl.arange(0, BATCH, flat_layout(SPEC))
        total += gl.load(row_loss + row, mask=row < n_rows, other=0.0, volatile=True)
    return gl.sum(total, axis=0)
