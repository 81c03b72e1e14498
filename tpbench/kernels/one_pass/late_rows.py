"""The kernel of rows that programs left because words of another rank did not come in time (exchange="yielding").

A launch that yields has four kernels, so that only single warps wait long, and every other kernel can always run:

1. Ranks meet: a rank that is late costs the others one warp.
2. A program that has waited `launch.YIELD_NS` leaves its rows, and later ones whose words are not there. It sends all
   its own words. The launch isn't cooperative, because no program needs others to run at the same time.
3. If programs left rows, ranks meet again. Then all words are there.
4. This kernel reads those rows once more and stores their results, or ends at once.

Two H200s, 4096 rows of labels in bf16, in ms: with 32768, 65536 and 131072 columns 0.092, 0.168 and 0.315, where
exchange="symmetric" takes 0.084, 0.156 and 0.306. 1,000 steps beside all-gathers on another stream, started in opposite
orders on the ranks, had the right bits, and so had 1,000 beside FSDP2. A rank left rows in 26 to 56% of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpbench.kernels.one_pass.exchange import (
    first_look,
    late_word,
    open_exchange,
    receive_state,
    wait_limits,
    words_of_rows,
)
from tpbench.kernels.one_pass.kernels import ANY_VALUE
from tpbench.kernels.one_pass.ptx import arrive, await_copies, barrier
from tpbench.kernels.one_pass.rows import (
    complete_rows,
    finish,
    inverse_count,
    load_labels,
    load_own_label,
    load_values,
    open_walk,
    rows_of_step,
)
from tpbench.kernels.one_pass.state import tile_state
from tpbench.kernels.one_pass.tiles import (
    copy_tile,
    gradient_factors,
    load_tile,
    store_at_label,
    store_from_logits,
    store_from_registers,
)
from tpbench.kernels.one_pass.tops import load_own_top, load_top, store_at_top, with_top


@gluon.jit(do_not_specialize=ANY_VALUE)
def late_rows_kernel(
    logits, target, grad, inputs, outputs, loss, mailbox, n_rows, n_columns, n_parts, part_columns, n_valid,
    vocab_start, vocab_size, ignore_index, strides, scales, rank, capacity, half, limit_ns, SPEC: gl.constexpr,
    IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute the same as `one_pass_kernel` for the rows that it left, or nothing if there are none.

    A program works on rows that the same program left. All words have arrived or are on their way. IN_REGISTERS: the
    gradient of a last tile comes from registers, as in `one_pass_kernel`, so that it has the same bits.
    """
    if gl.load(mailbox.control + 2) != 0:
        walk = open_walk(logits, target, grad, mailbox, n_rows, n_columns, n_parts, part_columns,
                         n_valid, vocab_start, vocab_size, ignore_index, strides, scales, 1, 1, SPEC)  # fmt: skip
        TILES: gl.constexpr = SPEC.TILES
        epoch = gl.load(mailbox.control)
        inverse = inverse_count(walk, inputs, loss, SPEC)
        scale = scales.grad * inverse
        exchange = open_exchange(mailbox, epoch, capacity, half, rank, walk.part_number, n_parts, SPEC)
        limits = wait_limits(limit_ns, SPEC)
        for step in range(walk.steps):
            first = (walk.walker + step * walk.walkers) * SPEC.ROWS
            if gl.load(late_word(exchange, first, n_parts, walk.part_number)) == epoch:
                row = rows_of_step(walk, step, SPEC)  # (ROWS,)
                exists = row < n_rows
                counts, own_label = load_own_label(walk, row, load_labels(inputs, walk, row, 0, SPEC), SPEC)
                if SPEC.GRAD:
                    for tile_of_row in gl.static_range(TILES):
                        copy_tile(walk, 0, row, counts, tile_of_row, tile_of_row, SPEC)
                values = load_values(inputs, walk, row, SPEC)
                words_exist, first_word = words_of_rows(first, n_rows, exchange, SPEC)
                looked = first_look(words_exist, first_word, exchange, SPEC)
                state, limits, _came = receive_state(looked, limits, exchange, SPEC)
                teacher = own_label
                if SPEC.TOP_K:
                    top = load_own_top(walk, row, counts, load_top(walk, row, SPEC), SPEC)
                    _own_state, own_label, teacher = with_top(walk, state, top, SPEC)
                terms = complete_rows(
                    walk, -1, row, counts, exists, state, teacher, inputs, values, outputs, scale, SPEC
                )
                if SPEC.GRAD:
                    factors = gradient_factors(state, terms, counts, SPEC)
                    for tile_of_row in gl.static_range(TILES):
                        await_copies(TILES - 1 - tile_of_row)
                        raw = load_tile(walk, 0, tile_of_row, tile_of_row, SPEC)
                        if IN_REGISTERS and tile_of_row == TILES - 1:
                            tile = tile_state(raw[0], raw[1], walk.part.valid, tile_of_row, scales, SPEC)
                            store_from_registers(walk, tile, factors, row, exists, tile_of_row, SPEC)
                        else:
                            store_from_logits(walk, raw, factors, row, exists, tile_of_row, SPEC)
                    if SPEC.TOP_K:
                        store_at_top(walk, own_label, state, terms, row, exists, SPEC)
                    else:
                        store_at_label(walk, own_label, factors, row, exists, SPEC)
        barrier()
        arrive(mailbox.control + 1)
        finish(walk, outputs.loss, loss, epoch, inverse, SPEC)
        if gl.program_id(0) == gl.num_programs(0) - 1:
            gl.store(mailbox.control + 2, 0)
