"""The one-pass kernels: they read each logit once, and compute the loss of each row and its gradient.

A *tile* is ROWS rows by at most REPEATS * LANES * VECTOR columns, and a *part* of a row is TILES neighbouring tiles.
README.md explains the kernels. The reduction over threads, with its barriers, happens once per row. `one_pass_kernel`:

    for each row:
      1. load the last tile to registers, merge the state of the row, and send it
      2. reduce the next row's first tiles, while the words travel
      3. receive the states of all parts
      4. store the gradient of the last tile
      5. for each other tile: store its gradient, start to copy into the freed place, and reduce the next row's tile

Tried, with figures of an H200, 4096 rows in bf16:

- A register that doesn't fit costs more than many instructions: its number comes back from the L2, because the loop
  streams through the caches. reverse_kl at 128256 columns took 1.251 ms with six such registers and 0.860 ms without.
  14% of the samples waited for one of them. So the masks of a last tile are computed where they are needed
  (`opaque_zero`).
- Logits past the end of a row can be copies of one vector of -inf. Every multiprocessor then reads the same line: 3.5
  ms in place of 0.79 at 151936 columns.
- Options need registers, so tiles in registers are raw logits where that saves some (`keeps_raw`). A softcap took 0.947
  ms at 131072 columns with exponentials and 40 spilled registers, and takes 0.747 with raw logits.
- Seven tiles of half the width, in place of four, take 0.537 ms in place of 0.566 for reverse_kl at 151936 columns over
  two H200s, and 0.694 in place of 0.718 at 100352 on one. They lose where a row then has more parts. Speed depends
  on the order of instructions, too: a z-loss adds 7 to 3,390 of a row, and then takes 0.602 ms.
- A sum of products without guards, computed again where it is NaN, saves 3% of the instructions of reverse_kl, but its
  branch costs more: 1.061 ms in place of 1.016 at 151936 columns on one.
- With both smoothing and an entropy, a first row spills over 100 registers. A scheduling barrier in each reduction
  avoids this and is slower: 0.120 ms in place of 0.104 for 32768 columns over two H200s.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpbench.kernels.one_pass import exchange, ptx, rows, states, targets, tiles
from tpbench.kernels.row_terms import merge_two

ANY_VALUE = [
    "n_rows", "n_columns", "part_columns", "n_valid", "vocab_start", "vocab_size", "ignore_index", "rank", "capacity",
    "half", "limit_ns",
]  # fmt: skip
"""Parameters for whose values the kernels are not specialised."""
LAG = gl.constexpr(2)
"""Tiles of a whole row between the start of a tile's copy and its reduction."""
READ = gl.constexpr(2)
"""Tiles of a whole row that are loaded together for their gradients. Their places become free at once, after one
barrier."""


@gluon.constexpr_function
def _end_of_read(tile_of_row, held):
    """The tile after those that are loaded together with this one."""
    return min(tile_of_row // READ.value * READ.value + READ.value, held)


@gluon.constexpr_function
def _copies_after(tile_of_row, stored, held):
    """Copies that start after this tile's until a tile is stored: those of the tiles between, and maybe the last's."""
    return _end_of_read(stored, held) - 1 - tile_of_row + (stored >= held - LAG.value)


@gluon.jit(do_not_specialize=ANY_VALUE)
def one_pass_kernel(
    logits, target, grad, inputs, outputs, loss, mailbox, n_rows, n_columns, n_parts, part_columns, n_valid,
    vocab_start, vocab_size, ignore_index, strides, scales, rank, capacity, half, limit_ns, SPEC: gl.constexpr,
):  # fmt: skip
    """Compute the loss and the gradient of rows of n_columns logits, of which n_valid belong to the softmax.

    The types of inputs, outputs, strides and scales are in `kernel_arguments`, those of mailbox and SPEC in `launch`.
    The other integers stay apart, because Triton specialises a kernel for each integer of a tuple. The order of the
    parameters decides which registers the compiler spills: keep it, or measure. part_columns is in vectors.

    loss: fp32 scalar, scales.total times the sum of row losses; with COUNT this and the gradient are divided by the
    number of rows that count. With COUNT and without REDUCE, `loss` holds 1 / that number, since the rows may be some
    of a larger problem. capacity: rows that half a buffer has room for.
    """
    EXCHANGE: gl.constexpr = SPEC.SLOTS > 0
    TILES: gl.constexpr = SPEC.TILES
    AHEAD: gl.constexpr = SPEC.AHEAD
    HELD: gl.constexpr = TILES - 1  # tiles that stay in shared memory, with a place for this row and one for the next
    LAST: gl.constexpr = TILES - 1  # the tile that passes on to registers
    FIRST_LOOK: gl.constexpr = AHEAD - 1 if AHEAD > 0 else 0
    walk = rows.open_walk(logits, target, grad, mailbox, n_rows, n_columns, n_parts, part_columns, n_valid,
                          vocab_start, vocab_size, ignore_index, strides, scales, 2, 1, SPEC)  # fmt: skip
    epoch = 0
    if EXCHANGE:
        epoch = gl.load(mailbox.control) + 1

    # Copies of the first tiles start before anything else.
    row = rows.of_step(walk, 0, SPEC)  # (ROWS,)
    first_label = targets.load_labels(inputs, walk, row, SPEC)
    next_label = targets.load_labels(inputs, walk, rows.after(walk, row, 1, SPEC), SPEC)
    counts = rows.copy_tiles(walk, 0, row, first_label, HELD, SPEC)
    next_row = rows.after(walk, row, 1, SPEC)
    tiles.copy_tile(walk, 0, row, counts, LAST, SPEC)
    rows.copy_tiles(walk, 1, next_row, next_label, HELD, SPEC)

    inverse, scale = rows.inverse_count(walk, inputs, loss, SPEC)
    # Labels of this row and of the next two rows. Each label is loaded a step before its first use. The order in which
    # these variables are assigned decides which registers are spilled.
    this_label = first_label
    later_label = targets.load_labels(inputs, walk, rows.after(walk, next_row, 1, SPEC), SPEC)
    if SPEC.TOP_K:
        this_top = targets.load_top(walk, row, SPEC)
    if EXCHANGE:
        queues, limits = exchange.open_exchange(walk, epoch, capacity, half, rank, n_parts, limit_ns, SPEC)

    # The state of the next row's tiles that have arrived.
    held = tiles.reduce_tiles(states.no_columns(SPEC), walk, 0, 0, HELD, HELD + 1, SPEC)

    for step in range(walk.steps):
        row = rows.of_step(walk, step, SPEC)  # (ROWS,)
        exists = row < n_rows
        # The label's logit is loaded before the wait for copies, to arrive meanwhile.
        counts, own_label = targets.load_own_label(walk, row, this_label, SPEC)
        if SPEC.TOP_K:
            own_label = targets.load_own_top(walk, row, counts, this_top, SPEC)
            this_top = targets.load_top(walk, rows.after(walk, row, 1, SPEC), SPEC)
        values = rows.load_values(inputs, walk, row, SPEC)
        last_label = targets.load_labels(inputs, walk, rows.after(walk, row, 3, SPEC), SPEC)
        ptx.await_copies(HELD)
        x, t = tiles.load_tile(walk, 0, LAST, SPEC)  # (ROWS, REPEATS, LANES, VECTOR) each
        # The tile is in registers: its place is free for the next row's.
        next_row = rows.after(walk, row, 1, SPEC)
        next_counts = targets.rows_that_count(walk, next_row, next_label, SPEC)
        tiles.copy_tile(walk, 0, next_row, next_counts, LAST, SPEC)
        last_tile = states.tile_state(walk, x, t, LAST, SPEC)
        held = merge_two(held, last_tile.state, ptx.exp2, SPEC)
        state = states.state_of_rows(walk, held, own_label.logit, SPEC)  # (ROWS, LANES) to (ROWS,)
        state, own_label, teacher = targets.with_top(walk, state, own_label, SPEC)
        if EXCHANGE:
            sent = exchange.send_state(state, walk, step, queues, SPEC)

        # Reduce the next row's first AHEAD tiles while the words travel. The others are reduced between gradients of
        # tiles. So stores and copies occupy the memory all the time, and a copy has a whole step to arrive.
        next_at = (step + 1) % 2
        held = tiles.reduce_tiles(states.no_columns(SPEC), walk, next_at, 0, FIRST_LOOK, HELD + 1 - FIRST_LOOK, SPEC)
        if EXCHANGE:
            # The last of those tiles hides the latency of a first look.
            looked = exchange.first_look(sent, queues, SPEC)
        held = tiles.reduce_tiles(held, walk, next_at, FIRST_LOOK, AHEAD, HELD + 1 - AHEAD, SPEC)
        if EXCHANGE:
            state, limits, came = exchange.receive_state(looked, limits, queues, SPEC)
            exists = exchange.leave_late(walk, row, exists, came, n_parts, queues, SPEC)

        terms, factors = rows.complete_rows(
            walk, step, row, counts, exists, state, teacher, inputs, values, outputs, scale, SPEC
        )
        if SPEC.GRAD:
            tiles.store_from_registers(walk, last_tile, factors, row, exists, LAST, SPEC)
        copied_row = rows.after(walk, next_row, 1, SPEC)
        copied = targets.rows_that_count(walk, copied_row, later_label, SPEC)
        for tile_of_row in gl.static_range(HELD):
            tiles.store_and_copy(walk, step % 2, factors, row, exists, copied_row, copied, tile_of_row, SPEC)
            if tile_of_row >= AHEAD:
                held = tiles.reduce_tiles(held, walk, next_at, tile_of_row, tile_of_row + 1, HELD + 1, SPEC)
        targets.store_at_target(walk, own_label, state, terms, factors, row, exists, SPEC)
        this_label = next_label
        next_label = later_label
        later_label = last_label

    rows.finish(walk, outputs.loss, loss, epoch, inverse, SPEC)


@gluon.jit(do_not_specialize=ANY_VALUE)
def whole_row_kernel(
    logits, target, grad, inputs, outputs, loss, mailbox, n_rows, n_columns, n_parts, part_columns, n_valid,
    vocab_start, vocab_size, ignore_index, strides, scales, rank, capacity, half, limit_ns, SPEC: gl.constexpr,
):  # fmt: skip
    """Compute the same as `one_pass_kernel` for rows that fill the shared memory of a multiprocessor.

    Each program works on whole rows: two programs that shared such a row would wait for each other. The first and the
    last tile share one place in shared memory and move from there to registers. Each other tile has a place of its own
    and stays there. The next row's tiles come into each place as soon as this row's tile has left it. The state of a
    tile is computed LAG tiles after its copy started.

    Measured gain over rows that programs share, 4096 rows in bf16: on an H200 (commit 7747057) 0.582 instead of
    0.596 ms for labels at 131072 columns, and 0.410 instead of 0.474 ms for reverse_kl at 65536. On an H100, whose
    memory is slower, nothing for labels, and 1.7% for losses against target logits.
    """
    gl.static_assert(SPEC.SLOTS == 0 and not SPEC.TOP_K)
    TILES: gl.constexpr = SPEC.TILES
    HELD: gl.constexpr = TILES - 2  # tiles that stay in shared memory; two pass on to registers:
    FIRST: gl.constexpr = TILES - 2
    LAST: gl.constexpr = TILES - 1
    # Tiles of the next row whose copies have started when the last tile's starts.
    COPIED: gl.constexpr = _end_of_read(HELD - LAG - 1, HELD)
    walk = rows.open_walk(logits, target, grad, mailbox, n_rows, n_columns, n_parts, part_columns, n_valid,
                          vocab_start, vocab_size, ignore_index, strides, scales, 1, 1, SPEC)  # fmt: skip

    # Copies of the first tiles start before anything else.
    row = rows.of_step(walk, 0, SPEC)  # (ROWS,)
    first_label = targets.load_labels(inputs, walk, row, SPEC)
    next_label = targets.load_labels(inputs, walk, rows.after(walk, row, 1, SPEC), SPEC)
    counts = targets.rows_that_count(walk, row, first_label, SPEC)
    tiles.copy_tile(walk, 0, row, counts, FIRST, SPEC)
    for tile_of_row in gl.static_range(HELD):
        if tile_of_row == HELD - LAG:
            ptx.await_copies(HELD - LAG)
            x, t = tiles.load_tile(walk, 0, FIRST, SPEC)  # (ROWS, REPEATS, LANES, VECTOR) each
            tiles.copy_tile(walk, 0, row, counts, LAST, SPEC)
            first_tile = states.tile_state(walk, x, t, FIRST, SPEC)
        tiles.copy_tile(walk, 0, row, counts, tile_of_row, SPEC)
    next_row = rows.after(walk, row, 1, SPEC)

    inverse, scale = rows.inverse_count(walk, inputs, loss, SPEC)
    # Labels of this row and of the next two rows. Each label is loaded a step before its first use.
    this_label = first_label
    later_label = targets.load_labels(inputs, walk, rows.after(walk, next_row, 1, SPEC), SPEC)

    # The state of the row's tiles that have arrived.
    held = first_tile.state
    for tile_of_row in gl.static_range(HELD - LAG):
        if ptx.opaque_true():
            held = tiles.reduce_tiles(held, walk, 0, tile_of_row, tile_of_row + 1, HELD - tile_of_row, SPEC)

    for step in range(walk.steps):
        row = rows.of_step(walk, step, SPEC)  # (ROWS,)
        exists = row < n_rows
        counts, own_label = targets.load_own_label(walk, row, this_label, SPEC)
        values = rows.load_values(inputs, walk, row, SPEC)
        last_label = targets.load_labels(inputs, walk, rows.after(walk, row, 3, SPEC), SPEC)
        ptx.await_copies(HELD - COPIED)
        x, t = tiles.load_tile(walk, 0, LAST, SPEC)  # (ROWS, REPEATS, LANES, VECTOR) each
        # The tile is in registers: its place is free for the next row's.
        next_row = rows.after(walk, row, 1, SPEC)
        next_counts = targets.rows_that_count(walk, next_row, next_label, SPEC)
        tiles.copy_tile(walk, 0, next_row, next_counts, FIRST, SPEC)
        last_tile = states.tile_state(walk, x, t, LAST, SPEC)
        held = tiles.reduce_tiles(held, walk, 0, HELD - LAG, HELD, 1, SPEC)
        held = merge_two(held, last_tile.state, ptx.exp2, SPEC)
        state = states.state_of_rows(walk, held, own_label.logit, SPEC)  # (ROWS, LANES) to (ROWS,)

        terms, factors = rows.complete_rows(
            walk, step, row, counts, exists, state, own_label, inputs, values, outputs, scale, SPEC
        )
        held = states.no_columns(SPEC)
        for tile_of_row in gl.static_range(HELD):
            if tile_of_row == HELD - LAG:
                ptx.await_copies(COPIED)
                x, t = tiles.load_tile(walk, 0, FIRST, SPEC)  # (ROWS, REPEATS, LANES, VECTOR) each
                tiles.copy_tile(walk, 0, next_row, next_counts, LAST, SPEC)
                first_tile = states.tile_state(walk, x, t, FIRST, SPEC)
                held = merge_two(held, first_tile.state, ptx.exp2, SPEC)
            if tile_of_row % READ == 0:
                if SPEC.GRAD:
                    raw = ()
                    for neighbour in gl.static_range(tile_of_row, _end_of_read(tile_of_row, HELD)):
                        raw = raw + (tiles.load_tile(walk, 0, neighbour, SPEC),)
                for neighbour in gl.static_range(tile_of_row, _end_of_read(tile_of_row, HELD)):
                    tiles.copy_tile(walk, 0, next_row, next_counts, neighbour, SPEC)
            if SPEC.GRAD:
                if tile_of_row == 0:
                    if ptx.opaque_true():
                        tiles.store_from_registers(walk, last_tile, factors, row, exists, LAST, SPEC)
                    tiles.store_from_registers(walk, first_tile, factors, row, exists, FIRST, SPEC)
                if ptx.opaque_true():
                    tiles.store_from_logits(walk, raw[tile_of_row % READ], factors, row, exists, tile_of_row, SPEC)
            if tile_of_row >= LAG:
                held = tiles.reduce_tiles(
                    held, walk, 0, tile_of_row - LAG, tile_of_row - LAG + 1,
                    _copies_after(tile_of_row - LAG, tile_of_row, HELD), SPEC,
                )  # fmt: skip

        targets.store_at_target(walk, own_label, state, terms, factors, row, exists, SPEC)
        this_label = next_label
        next_label = later_label
        later_label = last_label

    rows.finish(walk, outputs.loss, loss, 0, inverse, SPEC)


@gluon.jit(do_not_specialize=ANY_VALUE)
def late_rows_kernel(
    logits, target, grad, inputs, outputs, loss, mailbox, n_rows, n_columns, n_parts, part_columns, n_valid,
    vocab_start, vocab_size, ignore_index, strides, scales, rank, capacity, half, limit_ns, SPEC: gl.constexpr,
):  # fmt: skip
    """Compute the same as `one_pass_kernel` for the rows that it left, or nothing if there are none.

    A program works on rows that the same program left. All words have arrived or are on their way. The
    gradient of a last tile comes from registers if that of `one_pass_kernel` does, so that it has the same bits.
    """
    if gl.load(mailbox.control + 2) != 0:
        walk = rows.open_walk(logits, target, grad, mailbox, n_rows, n_columns, n_parts, part_columns,
                              n_valid, vocab_start, vocab_size, ignore_index, strides, scales, 1, 1, SPEC)  # fmt: skip
        TILES: gl.constexpr = SPEC.TILES
        epoch = gl.load(mailbox.control)
        inverse, scale = rows.inverse_count(walk, inputs, loss, SPEC)
        queues, limits = exchange.open_exchange(walk, epoch, capacity, half, rank, n_parts, limit_ns, SPEC)
        for step in range(walk.steps):
            first = (walk.walker + step * walk.walkers) * SPEC.ROWS
            if gl.load(exchange.late_word(queues, first, n_parts, walk.part_number)) == epoch:
                row = rows.of_step(walk, step, SPEC)  # (ROWS,)
                exists = row < n_rows
                label = targets.load_labels(inputs, walk, row, SPEC)
                counts, own_label = targets.load_own_label(walk, row, label, SPEC)
                if SPEC.GRAD:
                    rows.copy_tiles(walk, 0, row, label, TILES, SPEC)
                values = rows.load_values(inputs, walk, row, SPEC)
                looked = exchange.first_look(exchange.words_of_step(walk, step, queues, SPEC), queues, SPEC)
                state, limits, _came = exchange.receive_state(looked, limits, queues, SPEC)
                if SPEC.TOP_K:
                    own_label = targets.load_own_top(walk, row, counts, targets.load_top(walk, row, SPEC), SPEC)
                _own_state, own_label, teacher = targets.with_top(walk, state, own_label, SPEC)
                terms, factors = rows.complete_rows(
                    walk, -1, row, counts, exists, state, teacher, inputs, values, outputs, scale, SPEC
                )
                if SPEC.GRAD:
                    for tile_of_row in gl.static_range(TILES):
                        ptx.await_copies(TILES - 1 - tile_of_row)
                        raw = tiles.load_tile(walk, 0, tile_of_row, SPEC)
                        if SPEC.KERNEL == "one_pass" and tile_of_row == TILES - 1:
                            tile = states.tile_state(walk, raw[0], raw[1], tile_of_row, SPEC)
                            tiles.store_from_registers(walk, tile, factors, row, exists, tile_of_row, SPEC)
                        else:
                            tiles.store_from_logits(walk, raw, factors, row, exists, tile_of_row, SPEC)
                targets.store_at_target(walk, own_label, state, terms, factors, row, exists, SPEC)
        ptx.barrier()
        ptx.arrive(mailbox.control + 1)
        rows.finish(walk, outputs.loss, loss, epoch, inverse, SPEC)
        if gl.program_id(0) == gl.num_programs(0) - 1:
            gl.store(mailbox.control + 2, 0)
