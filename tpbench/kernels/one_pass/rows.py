"""The rows of a program: its walk from row to row, how many rows count, their results, and the sum of their losses."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpbench.kernels.one_pass import layouts, ptx, targets, tiles
from tpbench.kernels.row_terms import LN_2, load_inputs, reference, row_terms, softmax_of_rows, store_rows

BATCH = gl.constexpr(4096)
"""Rows whose labels or losses a program loads before it waits for the first of them."""


class Matrix(NamedTuple):
    """A tensor of (rows, columns) with its strides. The row stride is in vectors."""

    pointer: Any
    row: Any
    column: Any


class Walk(NamedTuple):
    """The rows and columns of one program, the tensors that it reads and writes, and `Scales`.

    Triton 3.6 takes no None in a tuple that a kernel makes. So `RowInputs` and `RowOutputs` are arguments of their own.
    """

    logits: Matrix
    target: Matrix
    """Target logits, or labels, of which only the pointer is used."""
    grad: Matrix
    shared_x: Any
    """The shared memory from `tiles.allocate`. `shared_t`: for target logits. With labels both are the same."""
    shared_t: Any
    first: Any
    """The first vector of the part of a row that this program works on."""
    extent: Any
    """Vectors of the part that exist."""
    valid: Any
    """Columns of the part that belong to the softmax."""
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
    mailbox: Any
    scales: Any


@gluon.jit
def open_walk(
    logits, target, grad, mailbox, n_rows, n_columns, n_parts, part_columns, n_valid, vocab_start, vocab_size,
    ignore_index, strides, scales, PLACES: gl.constexpr, LAST_PLACES: gl.constexpr, SPEC: gl.constexpr,
):  # fmt: skip
    """Return the `Walk` of this program. PLACES, LAST_PLACES: see `tiles.allocate`."""
    part_number = gl.program_id(0) % n_parts
    walker = gl.program_id(0) // n_parts
    walkers = gl.num_programs(0) // n_parts
    steps = gl.cdiv(gl.cdiv(n_rows, SPEC.ROWS) - walker, walkers)
    first = part_number * part_columns
    width = gl.minimum(n_columns - first * SPEC.VECTOR, part_columns * SPEC.VECTOR)
    extent = width // SPEC.VECTOR
    valid = gl.minimum(n_valid - first * SPEC.VECTOR, width)
    x = tiles.allocate(logits.dtype.element_ty, PLACES, LAST_PLACES, SPEC)
    t = x
    if not layouts.has_labels(SPEC):
        t = tiles.allocate(logits.dtype.element_ty, PLACES, LAST_PLACES, SPEC)
    return Walk(
        Matrix(logits, strides.logits_row, strides.logits_column),
        Matrix(target, strides.target_row, strides.target_column),
        Matrix(grad, strides.grad_row, strides.grad_column), x, t, first, extent, valid, part_number,
        vocab_start + first * SPEC.VECTOR, walker, walkers, steps, gl.arange(0, SPEC.ROWS, layouts.row_layout(SPEC)),
        n_rows, vocab_size, ignore_index, mailbox, scales,
    )  # fmt: skip


@gluon.jit
def of_step(walk, step, SPEC: gl.constexpr):
    """Return the rows of a step, int64 (ROWS,). Those from n_rows on do not exist."""
    return ((walk.walker + step * walk.walkers) * SPEC.ROWS + walk.row_in_tile).to(gl.int64)


@gluon.jit
def after(walk, row, STEPS: gl.constexpr, SPEC: gl.constexpr):
    """Return the rows that follow `row` after a number of steps, int64 (ROWS,)."""
    return row + STEPS * walk.walkers * SPEC.ROWS


@gluon.jit
def copy_tiles(walk, at, row, label, COUNT: gl.constexpr, SPEC: gl.constexpr):
    """Start to copy COUNT tiles of rows to their places `at`. Returns which rows count."""
    counts = targets.rows_that_count(walk, row, label, SPEC)
    for tile_of_row in gl.static_range(COUNT):
        tiles.copy_tile(walk, at, row, counts, tile_of_row, SPEC)
    return counts


@gluon.jit
def inverse_count(walk, inputs, loss, SPEC: gl.constexpr):
    """Return the factor 1 / the sum of the weights of rows whose labels count (0 if it is 0), or 1 without COUNT.

    Also returns the factor on gradients, which contains it. Each weight is 1 unless `inputs` have weights. Without
    REDUCE the caller summed over the rows of a larger problem: then `loss` holds the factor.
    """
    inverse = 1.0
    if SPEC.COUNT and not SPEC.REDUCE:
        inverse = gl.load(loss)
    elif SPEC.COUNT:
        total = gl.zeros([BATCH], gl.float32, layouts.flat_layout(SPEC))
        for begin in range(0, walk.n_rows, BATCH):
            row = begin + gl.arange(0, BATCH, layouts.flat_layout(SPEC))
            label = targets.columns_of(targets.labels_at(walk, row, SPEC), walk)
            weight = 1.0
            if inputs.row_weight is not None:
                weight = gl.load(inputs.row_weight + row, mask=row < walk.n_rows, other=0.0)
            total += gl.where((label >= 0) & (row < walk.n_rows), weight, 0.0)
        total = gl.sum(total, axis=0)
        inverse = gl.where(total == 0.0, 0.0, 1.0 / total)
    return inverse, walk.scales.grad * inverse


@gluon.jit
def load_values(inputs, walk, row, SPEC: gl.constexpr):
    """Start to load the `RowInputs` of rows, (ROWS,) each in `state_layout`."""
    row = gl.convert_layout(row, layouts.state_layout(SPEC))
    return load_inputs(inputs, row, row < walk.n_rows)


@gluon.jit
def complete_rows(walk, step, row, counts, exists, state, teacher, inputs, values, outputs, scale, SPEC: gl.constexpr):
    """Return the `RowTerms` of the rows of a step, (ROWS,) in `state_layout`, and their `Factors` if GRAD.

    The first part's programs store results. state: of the whole vocabulary. After its last rows a program arrives:
    others need not wait for its last gradient.
    """
    x_label = gl.fma(state.x_label, walk.scales.logits, 0.0 - reference(state.m))
    softmax = softmax_of_rows(state, x_label, LN_2, SPEC)
    terms = row_terms(softmax, teacher, inputs, values, scale, walk.scales, SPEC)
    if walk.part_number == 0:
        layout: gl.constexpr = layouts.state_layout(SPEC)
        at = gl.convert_layout(row, layout)
        is_correct = state.x_label * walk.scales.logits >= state.m
        written = at < walk.n_rows
        if SPEC.YIELDS:
            written = gl.convert_layout(exists, layout)
        store_rows(outputs, at, softmax, terms, is_correct, written, gl.convert_layout(counts, layout))
    if SPEC.REDUCE or SPEC.SLOTS > 0:
        if step == walk.steps - 1:
            ptx.barrier()
            ptx.arrive(walk.mailbox.control + 1)
    if SPEC.GRAD:
        return terms, tiles.gradient_factors(state, terms, counts, SPEC)
    else:
        return terms, state


@gluon.jit
def finish(walk, row_losses, loss, epoch, inverse, SPEC: gl.constexpr):
    """End a program. The last one, which has the fewest rows, sums the row losses in one order and advances the epoch.

    It waits for programs that do not wait for it. Copies of rows past the last one are under way: they must end before
    the compiler reuses the shared memory.
    """
    ptx.await_copies(0)
    if SPEC.REDUCE or SPEC.SLOTS > 0:
        if gl.program_id(0) == gl.num_programs(0) - 1:
            ptx.await_arrivals(walk.mailbox.control + 1, gl.num_programs(0))
            ptx.barrier()
            if SPEC.REDUCE:
                total = gl.zeros([BATCH], gl.float32, layouts.flat_layout(SPEC))
                for begin in range(0, walk.n_rows, BATCH):
                    row = begin + gl.arange(0, BATCH, layouts.flat_layout(SPEC))
                    total += gl.load(row_losses + row, mask=row < walk.n_rows, other=0.0, volatile=True)
                gl.store(loss, gl.sum(total, axis=0) * (walk.scales.total * inverse))
            gl.store(walk.mailbox.control + 1, 0)
            if SPEC.SLOTS > 0:
                gl.store(walk.mailbox.control, epoch)
