"""The one-pass kernel for rows that fill the shared memory of a multiprocessor.

It computes the same as `kernel.one_pass_kernel`, and each program works on whole rows. Two programs that shared such a
row would wait for each other. The first and the last tile share one place in shared memory and move from there to
registers. Each other tile has a place of its own and stays there. The next row's tiles come into each place as soon as
this row's tile has left it. The state of a tile is computed LAG tiles after its copy started.
"""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,untyped-decorator"
# Triton decides the types of a kernel's arguments.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpbench.kernels.one_pass.finish import finish
from tpbench.kernels.one_pass.gradient import (
    gradient_factors,
    store_at_label,
    store_from_logits,
    store_from_registers,
)
from tpbench.kernels.one_pass.layouts import has_labels, row_layout
from tpbench.kernels.one_pass.ptx import arrive, await_copies, barrier, opaque_true
from tpbench.kernels.one_pass.rows import (
    inverse_count,
    load_labels,
    load_own_label,
    rows_that_count,
)
from tpbench.kernels.one_pass.state import (
    State,
    convert_state,
    merge_threads,
    merge_two,
    no_columns,
    row_loss,
    tile_state,
)
from tpbench.kernels.one_pass.tiles import copy_tile, load_tile, reduce_tiles
from tpbench.kernels.one_pass.walk import Sizes, open_walk, rows_after, rows_of_step

LAG = gl.constexpr(2)
"""Tiles between the start of a tile's copy and its reduction."""
READ = gl.constexpr(2)
"""Tiles that are loaded together for their gradients. Their places become free at once, after one barrier."""


@gluon.jit(
    do_not_specialize=["n_rows", "n_columns", "part_columns", "n_valid", "vocab_start", "vocab_size", "ignore_index"]
)
def whole_row_kernel(
    logits, target, grad, row_losses, loss, mailbox, n_rows, n_columns, n_parts, part_columns, n_valid, vocab_start,
    vocab_size, ignore_index, strides, scales, rank, capacity, half, limit_ns, SPEC: gl.constexpr,
):  # fmt: skip
    """Compute the loss and the gradient of rows. The arguments are those of `kernel.one_pass_kernel`."""
    gl.static_assert(SPEC.WHOLE and SPEC.SLOTS == 0)
    LABELS: gl.constexpr = has_labels(SPEC)
    TILES: gl.constexpr = SPEC.TILES
    HELD: gl.constexpr = TILES - 2  # tiles that stay in shared memory; two pass on to registers:
    FIRST: gl.constexpr = TILES - 2
    LAST: gl.constexpr = TILES - 1
    sizes = Sizes(n_rows, n_columns, n_parts, part_columns, n_valid, vocab_start, vocab_size, ignore_index)
    walk = open_walk(logits, target, grad, strides, sizes, HELD, 1, SPEC)

    # Copies of the first tiles start before anything else.
    row = rows_of_step(walk, 0, SPEC)  # (ROWS,)
    first_label = load_labels(walk, row, 0, SPEC)
    next_label = load_labels(walk, row, 1, SPEC)
    counts = rows_that_count(walk, row, first_label, SPEC)
    copy_tile(walk, 0, row, counts, FIRST, HELD, SPEC)
    for tile_of_row in gl.static_range(HELD):
        if tile_of_row == HELD - LAG:
            await_copies(HELD - LAG)
            x, t = load_tile(walk, 0, FIRST, HELD, SPEC)  # (ROWS, REPEATS, LANES, VECTOR) each
            copy_tile(walk, 0, row, counts, LAST, HELD, SPEC)
            first_tile = tile_state(x, t, scales, SPEC)
        copy_tile(walk, 0, row, counts, tile_of_row, tile_of_row, SPEC)
    next_row = rows_after(walk, row, 1, SPEC)

    inverse = 1.0
    if SPEC.COUNT and SPEC.REDUCE:
        inverse = inverse_count(walk, SPEC)
    if SPEC.COUNT and not SPEC.REDUCE:
        inverse = gl.load(loss)
    scale = scales.grad_scale * inverse

    # Labels of this row and of the next two rows. Each label is loaded a step before its first use.
    this_label = first_label
    later_label = load_labels(walk, next_row, 1, SPEC)

    # The state of the row's tiles that have arrived.
    held = first_tile.state
    for tile_of_row in gl.static_range(HELD - LAG):
        if opaque_true():
            held = reduce_tiles(held, walk, 0, tile_of_row, tile_of_row + 1, HELD - tile_of_row, scales, SPEC)

    for step in range(walk.steps):
        row = rows_of_step(walk, step, SPEC)  # (ROWS,)
        exists = row < n_rows
        counts = exists
        if LABELS:
            # The label's logit is loaded before the wait for copies, to arrive meanwhile.
            counts, own_label = load_own_label(walk, row, this_label, SPEC)
            last_label = load_labels(walk, row, 3, SPEC)
        await_copies(LAG)
        x, t = load_tile(walk, 0, LAST, HELD, SPEC)  # (ROWS, REPEATS, LANES, VECTOR) each
        # The tile is in registers: its place is free for the next row's.
        next_row = rows_after(walk, row, 1, SPEC)
        next_counts = rows_that_count(walk, next_row, next_label, SPEC)
        copy_tile(walk, 0, next_row, next_counts, FIRST, HELD, SPEC)
        last_tile = tile_state(x, t, scales, SPEC)
        held = reduce_tiles(held, walk, 0, HELD - LAG, HELD, 1, scales, SPEC)
        state = merge_threads(merge_two(held, last_tile.state, SPEC), SPEC)  # (ROWS, LANES) to (ROWS,)
        state = convert_state(state, row_layout(SPEC))
        if LABELS:
            state = State(state.c, state.s, own_label.logit, state.s_t, state.a)

        of_row, log_z = row_loss(state, scales, SPEC)  # (ROWS,)
        if walk.part_number == 0:
            gl.store(row_losses + row, gl.where(counts, of_row, 0.0), mask=exists)
        if SPEC.REDUCE:
            if step == walk.steps - 1:
                # The last program needs nothing more of this one: it need not wait for this one's last gradient.
                barrier()
                arrive(mailbox.control + 1)
        if SPEC.GRAD:
            factors = gradient_factors(state, log_z, counts, scale, scales, SPEC)
        held = no_columns(SPEC)
        for tile_of_row in gl.static_range(HELD):
            if tile_of_row == HELD - LAG:
                await_copies(HELD - LAG)
                x, t = load_tile(walk, 0, FIRST, HELD, SPEC)  # (ROWS, REPEATS, LANES, VECTOR) each
                copy_tile(walk, 0, next_row, next_counts, LAST, HELD, SPEC)
                first_tile = tile_state(x, t, scales, SPEC)
                held = merge_two(held, first_tile.state, SPEC)
            if tile_of_row % READ == 0:
                if SPEC.GRAD:
                    raw = ()
                    for each in gl.static_range(tile_of_row, tile_of_row + READ):
                        raw = raw + (load_tile(walk, 0, each, each, SPEC),)  # type: ignore[assignment]  # noqa: RUF005
                for each in gl.static_range(tile_of_row, tile_of_row + READ):
                    copy_tile(walk, 0, next_row, next_counts, each, each, SPEC)
            if SPEC.GRAD:
                if tile_of_row == 0:
                    if opaque_true():
                        store_from_registers(walk, last_tile, factors, row, exists, LAST, SPEC)
                    store_from_registers(walk, first_tile, factors, row, exists, FIRST, SPEC)
                if opaque_true():
                    store_from_logits(walk, raw[tile_of_row % READ], scales, factors, row, exists, tile_of_row, SPEC)
            if tile_of_row >= LAG:
                # Copies that started after this tile's: those of the tiles between, and maybe the last tile's.
                held = reduce_tiles(
                    held, walk, 0, tile_of_row - LAG, tile_of_row - LAG + 1,
                    LAG + READ - 1 - tile_of_row % READ + (tile_of_row >= HELD - LAG), scales, SPEC,
                )  # fmt: skip

        if LABELS:
            if SPEC.GRAD:
                store_at_label(walk, own_label, factors, scale, row, scales, SPEC)
            this_label = next_label
            next_label = later_label
            later_label = last_label

    # Copies of rows past the last one are under way. They must end before the compiler reuses the shared memory.
    await_copies(0)
    if SPEC.REDUCE:
        finish(row_losses, loss, mailbox, n_rows, 0, scales, inverse, SPEC)
