"""The walk of a program: the same part of one row after another, the memory of its tiles, and the labels."""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,untyped-decorator"
# Triton decides the types of a kernel's arguments.
# Triton leaves a branch uncompiled only where both branches are written out.

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpbench.kernels.one_pass.layouts import column_unit, row_layout
from tpbench.kernels.one_pass.tiles import Matrix, Part, Shared, allocate, part_of_row


class Sizes(NamedTuple):
    """Integers that a one-pass kernel receives one by one (see `kernel.one_pass_kernel`)."""

    n_rows: Any
    n_columns: Any
    n_parts: Any
    part_columns: Any
    n_valid: Any
    vocab_start: Any
    vocab_size: Any
    ignore_index: Any


class Walk(NamedTuple):
    """The rows and columns of one program, and the tensors that it reads and writes."""

    logits: Matrix
    target: Matrix
    """Target logits, or labels, of which only the pointer is used."""
    grad: Matrix
    shared: Shared
    part: Part
    part_number: Any
    start: Any
    """The global column where the part begins."""
    walker: Any
    """The number of this program among those with the same part."""
    walkers: Any
    steps: Any
    """Tiles of rows that this program works on: every `walkers`-th one."""
    row_in_tile: Any
    """(ROWS,)"""
    n_rows: Any
    vocab_size: Any
    ignore_index: Any


@gluon.jit
def open_walk(
    logits, target, grad, strides, sizes, HELD: gl.constexpr, PLACES: gl.constexpr, SPEC: gl.constexpr
):  # fmt: skip
    """Return the `Walk` of this program. It has PLACES places for each of HELD tiles, and one for the other tiles."""
    part_number = gl.program_id(0) % sizes.n_parts
    walker = gl.program_id(0) // sizes.n_parts
    walkers = gl.num_programs(0) // sizes.n_parts
    steps = gl.cdiv(gl.cdiv(sizes.n_rows, SPEC.ROWS) - walker, walkers)
    part = part_of_row(part_number, sizes.part_columns, sizes.n_columns, sizes.n_valid, SPEC)
    return Walk(
        Matrix(logits, strides.logits_row, strides.logits_column),
        Matrix(target, strides.target_row, strides.target_column),
        Matrix(grad, strides.grad_row, strides.grad_column),
        allocate(logits.dtype.element_ty, HELD, PLACES, SPEC),
        part,
        part_number,
        sizes.vocab_start + part.first * column_unit(SPEC),
        walker,
        walkers,
        steps,
        gl.arange(0, SPEC.ROWS, row_layout(SPEC)),
        sizes.n_rows,
        sizes.vocab_size,
        sizes.ignore_index,
    )


@gluon.jit
def rows_of_step(walk, step, SPEC: gl.constexpr):
    """Return the rows of a step, int64 (ROWS,). Those from n_rows on do not exist."""
    return ((walk.walker + step * walk.walkers) * SPEC.ROWS + walk.row_in_tile).to(gl.int64)


@gluon.jit
def rows_after(walk, row, STEPS: gl.constexpr, SPEC: gl.constexpr):
    """Return the rows that follow `row` after a number of steps, int64 (ROWS,)."""
    return row + STEPS * walk.walkers * SPEC.ROWS
