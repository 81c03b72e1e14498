"""Layouts: which thread holds which element of a tile, of the states of its rows, and of the exchanged words."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpbench.kernels import COMPARING_LOSSES, row_terms
from tpbench.kernels.one_pass import ptx


@gluon.constexpr_function
def has_labels(spec):
    """The loss has labels, not target logits."""
    return spec.LOSS == "cross_entropy"


@gluon.constexpr_function
def compares_softmaxes(spec):
    """The loss is one of `COMPARING_LOSSES`."""
    return spec.LOSS in COMPARING_LOSSES


numbers_in_state = gluon.constexpr_function(row_terms.numbers_in_state)


@gluon.constexpr_function
def keeps_raw(spec):
    """Tiles in registers are raw logits: from exponentials not every gradient follows, and they take more registers."""
    capped = spec.SOFTCAP > 0 or spec.TARGET_SOFTCAP > 0
    several = capped + spec.SMOOTHED + spec.ENTROPY > 1
    if spec.KERNEL == "whole_row" or spec.LOSS != "cross_entropy":
        return spec.ENTROPY_GRAD or capped or spec.SMOOTHED
    return spec.ENTROPY_GRAD or several


@gluon.constexpr_function
def queues(spec):
    """Queues of words of a row: one for each slot of each rank, with the ranks filled up to a power of two."""
    return (1 << (spec.WORLD - 1).bit_length()) * spec.SLOTS if spec.SLOTS else 1


@gluon.constexpr_function
def tile_layout(spec):
    """(ROWS, REPEATS, LANES, VECTOR): a thread holds whole vectors, a warp holds 32 neighbouring vectors of a row."""
    by_warp = [spec.ROW_WARPS, 1, spec.WARPS // spec.ROW_WARPS, 1]
    return gl.BlockedLayout([1, 1, 1, spec.VECTOR], [1, 1, 32, 1], by_warp, [3, 2, 1, 0])


@gluon.constexpr_function
def thread_layout(spec):
    """(ROWS, LANES): one number for each row that a thread holds elements of."""
    return gl.SliceLayout(1, gl.SliceLayout(3, tile_layout(spec)))


@gluon.constexpr_function
def row_layout(spec):
    """(ROWS,): every thread holds the number of each row that it holds elements of."""
    return gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, tile_layout(spec))))


@gluon.constexpr_function
def flat_layout(spec):
    """(count,): for sums over all rows."""
    return gl.BlockedLayout([4], [32], [spec.WARPS], [0])


@gluon.constexpr_function
def _words(spec, parts, shared=False):
    """(ROWS, parts): each warp holds all parts of its rows or, if `shared`, the warps of a row share them."""
    bases = [[0, 1 << bit] for bit in range(parts.bit_length() - 1)]
    lanes = bases[:5] + [[0, 0]] * max(0, 5 - len(bases))
    of_row = (spec.WARPS // spec.ROW_WARPS).bit_length() - 1
    by_warp = bases[5 : 5 + of_row] if shared else [[0, 0]] * of_row
    registers = bases[5 + of_row if shared else 5 :]
    registers += [[spec.ROW_WARPS << bit, 0] for bit in range((spec.ROWS // spec.ROW_WARPS).bit_length() - 1)]
    by_warp += [[1 << bit, 0] for bit in range(spec.ROW_WARPS.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, by_warp, [], [spec.ROWS, parts])


@gluon.constexpr_function
def words_layout(spec):
    """(ROWS, RANKS * SLOTS): each warp holds the words of the rows that it holds elements of, as `tile_layout` does.

    So states become words, and words become gradients, without a barrier and without numbers from another warp.
    """
    return _words(spec, queues(spec))


@gluon.constexpr_function
def top_layout(spec):
    """(ROWS, TOP_BLOCK): the teacher's columns of the rows that a warp holds elements of.

    A load of scattered columns takes a warp about a cycle for each. So 16 warps share them. Each of 8 warps holds all,
    which saves barriers in the reductions.
    """
    return _words(spec, spec.TOP_BLOCK, shared=spec.WARPS > 8)


@gluon.constexpr_function
def state_layout(spec):
    """(ROWS,): the layout in which states of whole rows are sent, merged and turned into a loss."""
    return gl.SliceLayout(1, words_layout(spec)) if spec.SLOTS else row_layout(spec)


@gluon.constexpr_function
def warp_states_layout(spec, crossed):
    """(ROWS, warps of a row): each warp holds its own state.

    crossed: (ROWS, warps of a row, 2, 2, 2) numbers. Each warp holds the states of all warps of its row, one per lane.
    """
    numbers = 3 if crossed else 0
    row_warps = spec.WARPS // spec.ROW_WARPS
    of_row = row_warps.bit_length() - 1
    nothing = [0] * (2 + numbers)

    def base(axis, value):
        return [*nothing[:axis], value, *nothing[axis + 1 :]]

    columns = [base(1, 1 << bit) for bit in range(of_row)]
    registers = [base(2 + axis, 1) for axis in range(numbers)]
    registers += [base(0, spec.ROW_WARPS << bit) for bit in range((spec.ROWS // spec.ROW_WARPS).bit_length() - 1)]
    lanes = (columns if crossed else [nothing] * of_row) + [nothing] * (5 - of_row)
    by_warp = [nothing] * of_row if crossed else columns
    by_warp += [base(0, 1 << bit) for bit in range(spec.ROW_WARPS.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, by_warp, [], [spec.ROWS, row_warps] + [2] * numbers)


@gluon.jit
def zeros_by_thread(SPEC: gl.constexpr):
    """(ROWS, LANES) zeros in `thread_layout`."""
    shape: gl.constexpr = [SPEC.ROWS, SPEC.LANES]
    return gl.zeros(shape, gl.float32, thread_layout(SPEC))


@gluon.jit
def row_to_tile(values, SPEC: gl.constexpr):
    """(ROWS,) to (ROWS, 1, 1, 1) in the layout of a tile."""
    return gl.convert_layout(values, row_layout(SPEC))[:, None, None, None]


@gluon.jit
def row_to_thread(values, SPEC: gl.constexpr):
    """(ROWS,) to (ROWS, 1) in `thread_layout`."""
    return gl.convert_layout(values, gl.SliceLayout(1, thread_layout(SPEC)))[:, None]


@gluon.constexpr_function
def looped(spec):
    """How many of the first tiles a loop at run time works on. The compiler knows the numbers of the other tiles."""
    many = spec.KERNEL == "shared_rows" and spec.WORLD == 1
    return min(spec.WHOLE_TILES, spec.TILES - 1) if many else 0


@gluon.constexpr_function
def is_last(tile_of_row, spec):
    return isinstance(tile_of_row, int) and tile_of_row == spec.TILES - 1


@gluon.constexpr_function
def repeats(tile_of_row, spec):
    """Vectors of a row of the tile that one thread holds. The last tile may have fewer than the others."""
    return spec.LAST_REPEATS if is_last(tile_of_row, spec) else spec.REPEATS


@gluon.constexpr_function
def is_whole(tile_of_row, spec):
    return not isinstance(tile_of_row, int) or tile_of_row < spec.WHOLE_TILES


@gluon.constexpr_function
def units(spec):
    """Vectors of a tile."""
    return spec.REPEATS * spec.LANES


@gluon.jit
def vectors_and_places(tile_of_row, SPEC: gl.constexpr):
    """Return for each element of a tile its vector, (1, REPEATS, LANES, 1), and its place in it, (1, 1, 1, VECTOR)."""
    tile: gl.constexpr = tile_layout(SPEC)
    REPEATS: gl.constexpr = repeats(tile_of_row, SPEC)
    repeat = gl.arange(0, REPEATS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, tile))))
    lane = gl.arange(0, SPEC.LANES, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, tile))))
    place = gl.arange(0, SPEC.VECTOR, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, tile))))
    vector = repeat[None, :, None, None] * SPEC.LANES + lane[None, None, :, None]
    return vector, place[None, None, None, :]


@gluon.jit
def inside_softmax(like, valid, tile_of_row, SPEC: gl.constexpr):
    """Return which elements of a tile belong to the softmax. like: of its shape. valid: those columns of the part."""
    vector, place = vectors_and_places(tile_of_row, SPEC)
    column = (vector * SPEC.VECTOR + place) + gl.zeros_like(like).to(gl.int32)
    return column < valid - tile_of_row * units(SPEC) * SPEC.VECTOR + ptx.opaque_zero()
