"""Tiles of a part of a row: their elements, copies of them to shared memory, their states and their gradients."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from tpbench.kernels.one_pass.layouts import (
    column_unit,
    has_labels,
    is_tensor,
    row_layout,
    row_to_thread,
    row_to_tile,
    thread_layout,
    thread_shape,
    tile_layout,
)
from tpbench.kernels.one_pass.ptx import await_copies, barrier, copy_to_shared, exp2, multiply_nonzero, to_fp32
from tpbench.kernels.one_pass.state import INF, few_instructions, merge_two, tile_state
from tpbench.kernels.row_terms import LN_2, reference

LOG2_E = gl.constexpr(1.4426950408889634)


class Matrix(NamedTuple):
    """A tensor of (rows, columns) with its strides. The row stride is in vectors if ALIGNED, else in elements."""

    pointer: Any
    row: Any
    column: Any


class Part(NamedTuple):
    """The columns of a row that one program works on. Units are vectors if ALIGNED, else columns."""

    first: Any
    """First unit of the part."""
    tile_units: Any
    """Units of a tile."""
    extent: Any
    """Units of the part that exist."""
    valid: Any
    """Columns of the part that belong to the softmax."""
    vector: Any
    """(1, REPEATS, LANES, 1): the vector that each element of a tile belongs to."""
    place: Any
    """(1, 1, 1, VECTOR): the place of each element in its vector."""


class Shared(NamedTuple):
    """Shared memory: a tuple of descriptors for logits and one for target logits. With labels both are the same.

    Each tile has memory of its own, (places, ROWS, REPEATS, LANES, VECTOR). If the tiles shared one allocation, the
    compiler would assume that all copies and reads overlap, and would put barriers between them.
    """

    x: Any
    t: Any


@gluon.jit
def _tile_indices(SPEC: gl.constexpr):
    """Return for each element of a tile its vector, (1, REPEATS, LANES, 1), and its place in it, (1, 1, 1, VECTOR)."""
    tile: gl.constexpr = tile_layout(SPEC)
    repeat = gl.arange(0, SPEC.REPEATS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, tile))))
    lane = gl.arange(0, SPEC.LANES, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, tile))))
    place = gl.arange(0, SPEC.VECTOR, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, tile))))
    vector = repeat[None, :, None, None] * SPEC.LANES + lane[None, None, :, None]
    return vector, place[None, None, None, :]


@gluon.jit
def part_of_row(number, part_columns, n_columns, n_valid, SPEC: gl.constexpr):
    """Return the `Part` of a number. part_columns: units of a part."""
    UNIT: gl.constexpr = column_unit(SPEC)
    first = number * part_columns
    width = gl.minimum(n_columns - first * UNIT, part_columns * UNIT)
    valid = gl.minimum(n_valid - first * UNIT, width)
    if SPEC.ALIGNED:
        extent = width // SPEC.VECTOR
    else:
        extent = width
    tile_units = part_columns // SPEC.TILES
    vector, place = _tile_indices(SPEC)
    return Part(first, tile_units, extent, valid, vector, place)


@gluon.constexpr_function
def _places_shape(places, spec):
    return [places, spec.ROWS, spec.REPEATS, spec.LANES, spec.VECTOR]


@gluon.jit
def _allocate_tiles(element: gl.constexpr, HELD: gl.constexpr, PLACES: gl.constexpr, SPEC: gl.constexpr):
    """Allocate tiles of one matrix: PLACES places for each of HELD tiles, then one for the others."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    places: gl.constexpr = _places_shape(PLACES, SPEC)
    one_place: gl.constexpr = _places_shape(1, SPEC)
    shared = ()
    for _ in gl.static_range(HELD):
        shared = shared + (gl.allocate_shared_memory(element, places, flat),)
    return shared + (gl.allocate_shared_memory(element, one_place, flat),)


@gluon.jit
def allocate(element: gl.constexpr, HELD: gl.constexpr, PLACES: gl.constexpr, SPEC: gl.constexpr):
    """Allocate the `Shared` memory of a program: PLACES places for each of HELD tiles, and one for the other tiles."""
    x = _allocate_tiles(element, HELD, PLACES, SPEC)
    if has_labels(SPEC):
        return Shared(x, x)
    else:
        return Shared(x, _allocate_tiles(element, HELD, PLACES, SPEC))


@gluon.jit
def addresses(matrix, row, first, part, SPEC: gl.constexpr):
    """Addresses of the elements of a tile, (ROWS, REPEATS, LANES, VECTOR).

    ALIGNED: strides and the first column are in vectors, so that the compiler knows that the address of each vector is
    a multiple of its size.
    """
    if SPEC.ALIGNED:
        return (
            matrix.pointer
            + (row_to_tile(row, SPEC) * matrix.row + first) * SPEC.VECTOR
            + (part.vector * SPEC.VECTOR + part.place)
        )
    else:
        column = first + (part.vector * SPEC.VECTOR + part.place).to(gl.int64)
        return matrix.pointer + row_to_tile(row, SPEC) * matrix.row + column * matrix.column


@gluon.jit
def existing_mask(rows, part, extent, SPEC: gl.constexpr):
    """Return which elements exist, (ROWS, REPEATS, LANES, VECTOR): all of `rows` if FULL, else `extent` units."""
    rows = row_to_tile(rows, SPEC)
    if SPEC.FULL:
        return rows & (part.vector >= 0) & (part.place >= 0)
    else:
        return rows & (part.vector < extent) & (part.place >= 0)


@gluon.jit
def _copy_one(shared, pointer, inside, SPEC: gl.constexpr):
    if SPEC.ALIGNED:
        copy_to_shared(shared, pointer, mask=inside)
    else:
        shared.store(gl.load(pointer, mask=inside, other=0.0))


@gluon.jit
def copy_tile(walk, at, row, counts, tile_of_row, HELD: gl.constexpr, SPEC: gl.constexpr):
    """Start to copy a tile of the rows (ROWS,) that count to place `at` of the shared tile HELD, as one group.

    Elements of other rows, and those past the end of the part, become zero.
    """
    part = walk.part
    shared = walk.shared
    begin = part.first + tile_of_row * part.tile_units
    extent = gl.minimum(part.extent - tile_of_row * part.tile_units, part.tile_units)
    inside = existing_mask(counts, part, extent, SPEC)
    _copy_one(shared.x[HELD].index(at), addresses(walk.logits, row, begin, part, SPEC), inside, SPEC)
    if not has_labels(SPEC):
        _copy_one(shared.t[HELD].index(at), addresses(walk.target, row, begin, part, SPEC), inside, SPEC)
    async_copy.commit_group()


@gluon.jit
def _load_one(shared, part, valid, SPEC: gl.constexpr):
    values = shared.load(tile_layout(SPEC))
    if SPEC.PADDED or not SPEC.FULL:
        values = values.to(gl.float32)
        if SPEC.PADDED or not SPEC.ALIGNED:
            column = (part.vector * SPEC.VECTOR + part.place) + gl.zeros_like(values).to(gl.int32)
            values = gl.where(column < valid, values, -INF)
        else:  # a comparison for each vector
            inside = (part.vector * SPEC.VECTOR < valid) & (part.place >= 0)
            values = gl.where(inside, values, -INF)
    return values


@gluon.jit
def load_tile(walk, at, tile_of_row, HELD: gl.constexpr, SPEC: gl.constexpr):
    """Load the logits and target logits of a tile, (ROWS, REPEATS, LANES, VECTOR) each, from place `at` of tile HELD.

    In fp32, with -inf past the columns of the tile and of the softmax, unless all its columns belong to the softmax.
    Then in their own dtype.
    """
    part = walk.part
    shared = walk.shared
    columns = part.tile_units * column_unit(SPEC)
    valid = gl.minimum(part.valid - tile_of_row * columns, columns)
    x = _load_one(shared.x[HELD].index(at), part, valid, SPEC)
    if has_labels(SPEC):
        return x, x
    else:
        return x, _load_one(shared.t[HELD].index(at), part, valid, SPEC)


@gluon.jit
def reduce_tiles(
    state, walk, at, BEGIN: gl.constexpr, END: gl.constexpr, LATER: gl.constexpr, scales, SPEC: gl.constexpr
):
    """Merge tiles BEGIN to END, which stay in shared memory at place `at`, into a state by thread (ROWS, LANES).

    LATER: groups of copies that were started after the last of these tiles.
    """
    for tile_of_row in gl.static_range(BEGIN, END):
        await_copies(END - 1 - tile_of_row + LATER)
        x, t = load_tile(walk, at, tile_of_row, tile_of_row, SPEC)
        state = merge_two(state, tile_state(x, t, scales, SPEC).state, SPEC)
    return state


class Factors(NamedTuple):
    """Numbers that turn exponentials into gradients: of rows for the label's element, of threads for tiles."""

    row_reference: Any
    """(ROWS,)"""
    row_factor: Any
    """(ROWS,)"""
    row_target: Any
    """(ROWS,), or one number: what the label's element has less."""
    reference: Any
    """(ROWS, 1): the reference of the exponents of logits."""
    reference_t: Any
    """(ROWS, 1): the reference of the exponents of target logits."""
    factor: Any
    """(ROWS, LANES): all scales over the sum of exponentials. 0 for rows that do not count."""
    second: Any
    """(ROWS, LANES): for reverse_kl the mean difference, for the others the factor of the targets' exponentials."""


@gluon.jit
def gradient_factors(state, terms, counts, SPEC: gl.constexpr):
    """The `Factors` of rows, first by row, then by thread. The gradient is rounded once.

    state: (ROWS,) of the whole vocabulary. terms: `RowTerms` of the rows. counts: (ROWS,) rows with a gradient.
    """
    if SPEC.LOSS == "reverse_kl":
        factor = terms.on_p * LN_2 / state.s
    else:
        factor = terms.on_p / state.s
    row_reference = gl.convert_layout(reference(state.m), row_layout(SPEC))
    row_factor = gl.where(counts, gl.convert_layout(factor, row_layout(SPEC)), 0.0)
    row_target = terms.on_target
    if is_tensor(row_target.type):
        row_target = gl.convert_layout(row_target, row_layout(SPEC))
    zero = gl.zeros(thread_shape(SPEC), gl.float32, thread_layout(SPEC))
    reference_x = row_to_thread(row_reference, SPEC)
    factor = zero + row_to_thread(row_factor, SPEC)
    reference_t = reference_x
    second = factor
    if not has_labels(SPEC):
        reference_t = row_to_thread(reference(state.m_t), SPEC)
        if SPEC.LOSS == "reverse_kl":
            second = zero + row_to_thread(terms.on_target * LOG2_E, SPEC)
        else:
            second = zero + row_to_thread((0.0 - terms.on_target) / state.s_t, SPEC)
    return Factors(row_reference, row_factor, row_target, reference_x, reference_t, factor, second)


@gluon.jit
def _store_gradient(walk, g, row, exists, tile_of_row, SPEC: gl.constexpr):
    """Store the gradient of a tile, (ROWS, REPEATS, LANES, VECTOR) in fp32."""
    part = walk.part
    if SPEC.PADDED:
        column = (part.vector * SPEC.VECTOR + part.place) + gl.zeros_like(g).to(gl.int32)
        inside = column < part.valid - tile_of_row * part.tile_units * column_unit(SPEC)
        g = gl.where(inside, g, 0.0)
    extent = gl.minimum(part.extent - tile_of_row * part.tile_units, part.tile_units)
    inside = existing_mask(exists, part, extent, SPEC)
    begin = part.first + tile_of_row * part.tile_units
    to = addresses(walk.grad, row, begin, part, SPEC)
    gl.store(to, g.to(walk.grad.pointer.dtype.element_ty), mask=inside)


@gluon.jit
def store_from_registers(walk, tile, factors, row, exists, tile_of_row, SPEC: gl.constexpr):
    """Store the gradient of a tile in registers (`TileState`), whose exponentials are relative to each thread's m."""
    g = tile.exp_x * (exp2(tile.state.m - factors.reference) * factors.factor)[:, None, :, None]
    if SPEC.LOSS == "reverse_kl":
        shift_x = reference(tile.state.m) - factors.reference
        shift_t = reference(tile.state.m_t) - factors.reference_t
        g = multiply_nonzero(g, tile.other + (shift_x - shift_t - factors.second)[:, None, :, None])
    elif not has_labels(SPEC):
        factor_t = exp2(tile.state.m_t - factors.reference_t) * factors.second
        g = gl.fma(tile.other, factor_t[:, None, :, None], g)
    _store_gradient(walk, g, row, exists, tile_of_row, SPEC)


@gluon.jit
def store_from_logits(walk, raw, scales, factors, row, exists, tile_of_row, SPEC: gl.constexpr):
    """Store the gradient of a tile of raw logits and target logits, `raw`, (ROWS, REPEATS, LANES, VECTOR) each."""
    FEW: gl.constexpr = few_instructions(SPEC)
    x = gl.fma(to_fp32(raw[0], FEW), scales.logits, 0.0 - factors.reference[:, None, :, None])
    g = exp2(x)
    if has_labels(SPEC):
        g *= factors.factor[:, None, :, None]
    else:
        t = gl.fma(to_fp32(raw[1], FEW), scales.target, 0.0 - factors.reference_t[:, None, :, None])
        if SPEC.LOSS == "reverse_kl":
            # The mean joins as a term: subtracted from a large reference it would lose that reference's last bits.
            offset = 0.0 - factors.factor * factors.second
            g = multiply_nonzero(g, gl.fma(x - t, factors.factor[:, None, :, None], offset[:, None, :, None]))
        else:
            g = gl.fma(exp2(t), factors.second[:, None, :, None], g * factors.factor[:, None, :, None])
    _store_gradient(walk, g, row, exists, tile_of_row, SPEC)


@gluon.jit
def store_at_label(walk, label, factors, row, scales, SPEC: gl.constexpr):
    """Store the gradient of the label's own element again, (ROWS,): cheaper than to compare every column with it."""
    if has_labels(SPEC):
        grad = walk.grad
        exp_x = exp2(gl.fma(label.logit, scales.logits, 0.0 - factors.row_reference))
        at_label = exp_x * factors.row_factor - factors.row_target
        at = row * (grad.row * column_unit(SPEC)) + (walk.part.first * column_unit(SPEC) + label.local) * grad.column
        barrier()
        gl.store(grad.pointer + at, at_label.to(grad.pointer.dtype.element_ty), mask=label.held)
