"""Tiles of a part of a row: their elements, copies of them to shared memory, their states and their gradients."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from tpbench.kernels.one_pass import layouts, ptx, states
from tpbench.kernels.row_terms import LEAST_EXPONENT, LN_2, LOG2_E, merge_two, reference


@gluon.jit
def allocate(element: gl.constexpr, PLACES: gl.constexpr, LAST_PLACES: gl.constexpr, SPEC: gl.constexpr):
    """Allocate shared memory for the tiles of a matrix: a tuple of (places, ROWS, REPEATS, LANES, VECTOR).

    Each tile has PLACES places but for the last one, which has LAST_PLACES. The first and the last tile of a whole row
    share theirs. If tiles share one allocation, the compiler assumes that all copies and reads overlap, and puts
    barriers between them. So only those do on which a loop works.
    """
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    WHOLE: gl.constexpr = SPEC.KERNEL == "whole_row"
    HELD: gl.constexpr = SPEC.TILES - 1 - WHOLE
    shape: gl.constexpr = [PLACES, SPEC.ROWS, SPEC.REPEATS, SPEC.LANES, SPEC.VECTOR]
    LAST_REPEATS: gl.constexpr = SPEC.REPEATS if WHOLE else SPEC.LAST_REPEATS
    last_shape: gl.constexpr = [LAST_PLACES, SPEC.ROWS, LAST_REPEATS, SPEC.LANES, SPEC.VECTOR]
    shared = ()
    if layouts.looped(SPEC) > 0:
        held: gl.constexpr = [PLACES * HELD, SPEC.ROWS, SPEC.REPEATS, SPEC.LANES, SPEC.VECTOR]
        shared = (gl.allocate_shared_memory(element, held, flat),)
    else:
        for _ in gl.static_range(HELD):
            shared = shared + (gl.allocate_shared_memory(element, shape, flat),)
    return shared + (gl.allocate_shared_memory(element, last_shape, flat),)


@gluon.jit
def _place(shared, at, tile_of_row, SPEC: gl.constexpr):
    """Return place `at` of a tile in the shared memory of a matrix, (ROWS, REPEATS, LANES, VECTOR)."""
    if layouts.looped(SPEC) == 0:
        place = shared[min(tile_of_row, len(shared) - 1)].index(at)
    elif layouts.is_last(tile_of_row, SPEC):
        place = shared[1].index(at)
    else:
        place = shared[0].index(at * (SPEC.TILES - 1) + tile_of_row)
    return place.slice(0, layouts.repeats(tile_of_row, SPEC), dim=1)


@gluon.jit
def _addresses(walk, matrix, row, tile_of_row, SPEC: gl.constexpr):
    """Addresses of the elements of a tile, (ROWS, REPEATS, LANES, VECTOR)."""
    vector, place = layouts.vectors_and_places(tile_of_row, SPEC)
    first = walk.first + tile_of_row * layouts.units(SPEC)
    if SPEC.VECTOR > 1:  # the compiler sees that the address of each vector is a multiple of its size
        return (
            matrix.pointer
            + (layouts.row_to_tile(row, SPEC) * matrix.row + first) * SPEC.VECTOR
            + (vector * SPEC.VECTOR + place)
        )
    else:
        column = first + (vector * SPEC.VECTOR + place).to(gl.int64)
        return matrix.pointer + layouts.row_to_tile(row, SPEC) * matrix.row + column * matrix.column


@gluon.jit
def _existing(walk, rows, tile_of_row, SPEC: gl.constexpr):
    """Return which elements of a tile exist, (ROWS, REPEATS, LANES, VECTOR): all of `rows` in a whole tile."""
    vector, place = layouts.vectors_and_places(tile_of_row, SPEC)
    rows = layouts.row_to_tile(rows, SPEC)
    if layouts.is_whole(tile_of_row, SPEC):
        return rows & (vector >= 0) & (place >= 0)
    else:
        extent = walk.extent - tile_of_row * layouts.units(SPEC) + ptx.opaque_zero()
        return rows & (vector < extent) & (place >= 0)


@gluon.jit
def _copy_one(walk, shared, matrix, row, inside, tile_of_row, SPEC: gl.constexpr):
    pointer = _addresses(walk, matrix, row, tile_of_row, SPEC)
    if SPEC.VECTOR > 1:
        ptx.copy_to_shared(shared, pointer, mask=inside)
    else:
        shared.store(gl.load(pointer, mask=inside, other=0.0))


@gluon.jit
def copy_tile(walk, at, row, counts, tile_of_row, SPEC: gl.constexpr):
    """Start to copy a tile of the rows (ROWS,) that count to its place `at`, as one group.

    Elements of other rows, and those past the end of the part, become zero.
    """
    inside = _existing(walk, counts, tile_of_row, SPEC)
    place = _place(walk.shared_x, at, tile_of_row, SPEC)
    _copy_one(walk, place, walk.logits, row, inside, tile_of_row, SPEC)
    if not layouts.has_labels(SPEC):
        place = _place(walk.shared_t, at, tile_of_row, SPEC)
        _copy_one(walk, place, walk.target, row, inside, tile_of_row, SPEC)
    async_copy.commit_group()


@gluon.jit
def _load_one(walk, shared, tile_of_row, SPEC: gl.constexpr):
    values = shared.load(layouts.tile_layout(SPEC))
    if not layouts.is_whole(tile_of_row, SPEC):
        vector, _place = layouts.vectors_and_places(tile_of_row, SPEC)
        valid = walk.valid - tile_of_row * layouts.units(SPEC) * SPEC.VECTOR + ptx.opaque_zero()
        if SPEC.PADDED or SPEC.VECTOR == 1:
            inside = layouts.inside_softmax(values, walk.valid, tile_of_row, SPEC)
            values = gl.where(inside, values, gl.full_like(values, -states.INF))
        else:
            inside = gl.where(vector * SPEC.VECTOR < valid, 1, 0) + gl.zeros_like(values).to(gl.int32)
            values = ptx.keep_vectors(values, inside)
    return values


@gluon.jit
def load_tile(walk, at, tile_of_row, SPEC: gl.constexpr):
    """Load the logits and target logits of a tile, (ROWS, REPEATS, LANES, VECTOR) each, from its place `at`.

    They are -inf past the columns of the part and of the softmax.
    """
    x = _load_one(walk, _place(walk.shared_x, at, tile_of_row, SPEC), tile_of_row, SPEC)
    if layouts.has_labels(SPEC):
        return x, x
    else:
        return x, _load_one(walk, _place(walk.shared_t, at, tile_of_row, SPEC), tile_of_row, SPEC)


@gluon.jit
def _reduce_tile(state, walk, at, tile_of_row, LATER: gl.constexpr, SPEC: gl.constexpr):
    ptx.await_copies(LATER)
    x, t = load_tile(walk, at, tile_of_row, SPEC)
    tile = states.tile_state(walk, x, t, tile_of_row, SPEC)
    return merge_two(state, tile.state, ptx.exp2, SPEC)


@gluon.jit
def reduce_tiles(state, walk, at, BEGIN: gl.constexpr, END: gl.constexpr, LATER: gl.constexpr, SPEC: gl.constexpr):
    """Merge tiles BEGIN to END, which stay in shared memory at place `at`, into a state by thread (ROWS, LANES).

    LATER: groups of copies that were started after the last of these tiles.
    """
    LOOPED: gl.constexpr = layouts.looped(SPEC)
    gl.static_assert(LOOPED == 0 or BEGIN == 0)
    if LOOPED > 0:
        for tile_of_row in range(LOOPED):
            state = _reduce_tile(state, walk, at, tile_of_row, END - 1 + LATER, SPEC)
            async_copy.commit_group()  # an empty one: as many groups follow each tile of the loop
    for tile_of_row in gl.static_range(BEGIN + LOOPED, END):
        state = _reduce_tile(state, walk, at, tile_of_row, END - 1 - tile_of_row + LATER + LOOPED, SPEC)
    return state


class OptionFactors(NamedTuple):
    """Factors of the gradient of options, any number without them."""

    column: Any
    """Subtracted from the gradient of every column, for label smoothing."""
    entropy: Any
    """The entropy's factor on exp_x times its exponent. `offset`: its factor on exp_x."""
    offset: Any


class Factors(NamedTuple):
    """Numbers that turn exponentials into gradients: of rows for the label's element, of threads for tiles.

    With a softcap all are four times as large, because `exponents` has a quarter of its slope.
    """

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
    row_options: OptionFactors
    """(ROWS,). `options`: (ROWS, 1, LANES, 1)."""
    options: OptionFactors


@gluon.jit
def _by_row(values, counts, SPEC: gl.constexpr):
    """Convert to `row_layout`, with 0 for rows that do not count. With a softcap four times as large."""
    values = gl.where(counts, gl.convert_layout(values, layouts.row_layout(SPEC)), 0.0)
    if SPEC.SOFTCAP > 0:
        values *= 4.0
    return values


@gluon.jit
def _by_element(values, SPEC: gl.constexpr):
    """(ROWS,) to (ROWS, 1, LANES, 1)."""
    zero = layouts.zeros_by_thread(SPEC)
    return (zero + layouts.row_to_thread(values, SPEC))[:, None, :, None]


@gluon.jit
def gradient_factors(state, terms, counts, SPEC: gl.constexpr):
    """The `Factors` of rows, first by row, then by thread. The gradient is rounded once.

    state: (ROWS,) of the whole vocabulary. terms: `RowTerms` of the rows. counts: (ROWS,) rows with a gradient.
    """
    if SPEC.LOSS == "reverse_kl" or layouts.compares_softmaxes(SPEC):
        factor = terms.on_p * LN_2 / state.s
    else:
        factor = terms.on_p / state.s
    row_reference = gl.convert_layout(reference(state.m), layouts.row_layout(SPEC))
    row_factor = _by_row(factor, counts, SPEC)
    row_target = terms.on_target
    if row_target.type.is_block():
        row_target = gl.convert_layout(row_target, layouts.row_layout(SPEC))
    if SPEC.SOFTCAP > 0:
        row_target *= 4.0
    zero = layouts.zeros_by_thread(SPEC)
    reference_x = layouts.row_to_thread(row_reference, SPEC)
    factor = zero + layouts.row_to_thread(row_factor, SPEC)
    reference_t = reference_x
    second = factor
    if not layouts.has_labels(SPEC):
        reference_t = layouts.row_to_thread(reference(state.m_t), SPEC)
        if SPEC.LOSS == "reverse_kl" or layouts.compares_softmaxes(SPEC):
            second = zero + layouts.row_to_thread(terms.on_target * LOG2_E, SPEC)
        else:
            on_target = (0.0 - terms.on_target) / state.s_t
            if SPEC.SOFTCAP > 0:
                on_target *= 4.0
            second = zero + layouts.row_to_thread(on_target, SPEC)
    row_options = OptionFactors(row_factor, row_factor, row_factor)
    options = OptionFactors(factor, factor, factor)
    if SPEC.SMOOTHED or SPEC.ENTROPY_GRAD:
        # With logits in bits log p + H is (x - h / s) LN_2.
        on_entropy = terms.on_entropy * LN_2 / state.s
        column = _by_row(terms.on_column + state.s * 0.0, counts, SPEC)
        entropy = _by_row(0.0 - on_entropy, counts, SPEC)
        offset = _by_row(on_entropy * (state.h / state.s), counts, SPEC)
        row_options = OptionFactors(column, entropy, offset)
        options = OptionFactors(_by_element(column, SPEC), _by_element(entropy, SPEC), _by_element(offset, SPEC))
    return Factors(
        row_reference, row_factor, row_target, reference_x, reference_t, factor, second, row_options, options
    )


@gluon.jit
def store_gradient(walk, g, row, exists, tile_of_row, SPEC: gl.constexpr):
    """Store the gradient of a tile, (ROWS, REPEATS, LANES, VECTOR) in fp32."""
    if SPEC.PADDED and not layouts.is_whole(tile_of_row, SPEC):
        vector, place = layouts.vectors_and_places(tile_of_row, SPEC)
        column = (vector * SPEC.VECTOR + place) + gl.zeros_like(g).to(gl.int32)
        g = gl.where(column < walk.valid - tile_of_row * layouts.units(SPEC) * SPEC.VECTOR, g, 0.0)
    inside = _existing(walk, exists, tile_of_row, SPEC)
    to = _addresses(walk, walk.grad, row, tile_of_row, SPEC)
    gl.store(to, g.to(walk.grad.pointer.dtype.element_ty), mask=inside)


@gluon.jit
def times_factor(exp_x, x, factor, options, SPEC: gl.constexpr):
    """Exponentials times their factor. x: the exponents. options: `OptionFactors`."""
    if SPEC.ENTROPY_GRAD:
        factor = gl.fma(gl.maximum(x, LEAST_EXPONENT), options.entropy, factor + options.offset)
    if SPEC.SMOOTHED:
        return gl.fma(exp_x, factor, 0.0 - options.column)
    else:
        return exp_x * factor


@gluon.jit
def store_from_registers(walk, tile, factors, row, exists, tile_of_row, SPEC: gl.constexpr):
    """Store the gradient of a tile in registers (`TileState`), whose exponentials are relative to each thread's m."""
    if layouts.keeps_raw(SPEC):
        store_from_logits(walk, (tile.exp_x, tile.other), factors, row, exists, tile_of_row, SPEC)
    else:
        factor = ptx.exp2(tile.state.m - factors.reference) * factors.factor
        g = times_factor(tile.exp_x, tile.exp_x, factor[:, None, :, None], factors.options, SPEC)
        if SPEC.LOSS == "reverse_kl":
            shift_x = reference(tile.state.m) - factors.reference
            shift_t = reference(tile.state.m_t) - factors.reference_t
            g = ptx.multiply_nonzero(g, tile.other + (shift_x - shift_t - factors.second)[:, None, :, None])
        elif not layouts.has_labels(SPEC):
            factor_t = ptx.exp2(tile.state.m_t - factors.reference_t) * factors.second
            g = gl.fma(tile.other, factor_t[:, None, :, None], g)
        store_gradient(walk, g, row, exists, tile_of_row, SPEC)


@gluon.jit
def times_difference(exp_x, difference, x, factors, SPEC: gl.constexpr):
    """Exponentials times what the gradient of reverse_kl or of a comparison of softmaxes has in a column."""
    # The mean joins as a term: subtracted from a large reference it would lose that reference's last bits.
    offset = 0.0 - factors.factor * factors.second
    of_row = gl.fma(difference, factors.factor[:, None, :, None], offset[:, None, :, None])
    if SPEC.ENTROPY_GRAD:
        of_row += gl.fma(x, factors.options.entropy, factors.options.offset)
    return exp_x * of_row if layouts.compares_softmaxes(SPEC) else ptx.multiply_nonzero(exp_x, of_row)


@gluon.jit
def store_from_logits(walk, raw, factors, row, exists, tile_of_row, SPEC: gl.constexpr):
    """Store the gradient of a tile of raw logits and target logits, `raw`, (ROWS, REPEATS, LANES, VECTOR) each."""
    x, slope = states.exponents(raw[0], walk.scales.logits, factors.reference[:, None, :, None], SPEC.SOFTCAP)
    g = ptx.exp2(x)
    factor = factors.factor[:, None, :, None]
    options = factors.options
    if layouts.has_labels(SPEC):
        g = times_factor(g, x, factor, options, SPEC)
    else:
        t, _ = states.exponents(raw[1], walk.scales.target, factors.reference_t[:, None, :, None], SPEC.TARGET_SOFTCAP)
        if SPEC.LOSS == "reverse_kl":
            g = times_difference(g, x - t, x, factors, SPEC)
        else:
            g = gl.fma(ptx.exp2(t), factors.second[:, None, :, None], times_factor(g, x, factor, options, SPEC))
    if SPEC.SOFTCAP > 0:
        g *= slope
    store_gradient(walk, g, row, exists, tile_of_row, SPEC)


@gluon.jit
def store_and_copy(walk, at, factors, row, exists, copied_row, copied, tile_of_row, SPEC: gl.constexpr):
    """Store the gradient of a tile of rows at place `at`, and start to copy that of other rows to its place."""
    if SPEC.GRAD:
        raw = load_tile(walk, at, tile_of_row, SPEC)
    copy_tile(walk, at, copied_row, copied, tile_of_row, SPEC)
    if SPEC.GRAD:
        store_from_logits(walk, raw, factors, row, exists, tile_of_row, SPEC)
