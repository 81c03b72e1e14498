"""The one-pass kernels whose words have a whole row's time: for rows that programs share, and for two losses.

A program sends the state of a row before it receives those of the row before. So neither the way of the words nor
programs that are late by less than a row make it wait. Every tile has a place for each row that is under way, and none
stays in registers. Two programs share a multiprocessor: one computes while another moves memory. On one GPU a loop
works on the whole tiles, so that the code is short.

Jsd and total variation need both softmaxes of a row before a second sum over its columns. So their words travel twice.
Memory is read once. Each column of jsd takes five exponentials and logarithms, where reverse_kl takes three.

Measured on an H200, 4096 rows in bf16:

- labels: 0.649 ms in place of 0.862 at 151936 columns. Over two: 0.338 in place of 0.445.
- jsd: 1.277 and 1.765 ms at 131072 and 151936 columns, where reverse_kl takes 0.875 and 1.015. It took 1.411 and 1.765
  without the barrier, 1.532 at 131072 with eight warps, and 1.512 and 1.946 with q and p / q by exponentials of their
  own. The logarithm of the mixture itself took 1.361 and 1.739, but its rounding grows with the exponents.
  Over two H200s jsd takes 0.890 at 151936 columns. It took 1.308 with twice the words to read. At 131072 and 201088 it
  takes 0.660 and 1.188, and took 0.693 and 1.578 without the barrier. Another one after the first words costs 1%.
- Total variation takes 1.300 and 1.703 ms, and three kernels took 2.229 and 2.623. Over two H200s it takes 0.748 at
  131072 columns, and 0.806 with a barrier.
- The loop shortens the code of a softcap from 90 to 24 KiB. Warps had waited for code for 17% of the time. At 151936
  columns a softcap takes 1.006 ms in place of 1.063, with smoothing, a z-loss and entropies 1.03 in place of 1.41, a
  top k of 64 0.670 in place of 0.717 and labels 0.649 either way. At 256000 columns a softcap takes 1.69 in place of
  2.05, and labels lose 0.4%. In `one_pass_kernel` its barriers cost losses of two logits 2 to 5%.
- Options take 0.652 (smoothing), 0.654 (a bonus) and 0.661 ms (both) at 151936 columns. With three programs smoothing
  and the bonus took 0.661, and both 0.987, later 0.712 with a gradient stored before the row's second half was read.
- A softcap takes 1.55 times labels. Its 4.6 exponentials and reciprocals a column keep their unit busy for 77% of the
  time. Tanh by a polynomial, where all logits of a thread are below the cap, takes 0.977 ms, but 1.05 for larger
  logits. Three programs take 1.059, eight warps 1.204, one reciprocal for eight columns 0.5% less.
- Losses of two logits are slower here on one GPU, as no tile stays in registers: 0.968 ms, not 0.860, at 128256
  columns. Over two, soft_cross_entropy in one program of eight warps takes 0.372, 0.549 and 0.716 ms at 100352, 151936
  and 201088 columns, in `one_pass_kernel` 0.380, 0.561 and 0.741. Reverse_kl takes 0.575 at 151936, and 0.537 there.
- Over two H200s eight warps are faster: at 131072 columns an entropy bonus took 0.380 in place of 0.467 ms.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpbench.kernels.one_pass import exchange, kernels, layouts, ptx, rows, states, targets, tiles
from tpbench.kernels.row_terms import LN_2, reference

PLACES = gl.constexpr(3)
"""Rows of `mixture_kernel` that are under way."""


@gluon.jit
def _send_rows(walk, step, held, own, queues, SPEC: gl.constexpr):
    """Send the rows of a step, whose state by thread is `held`, with their targets. See `send_state` and `with_top`."""
    state = states.state_of_rows(walk, held, own.logit, SPEC)
    state, own, teacher = targets.with_top(walk, state, own, SPEC)
    return exchange.send_state(state, walk, step, queues, SPEC), own, teacher


@gluon.jit(do_not_specialize=kernels.ANY_VALUE)
def shared_rows_kernel(
    logits, target, grad, inputs, outputs, loss, mailbox, n_rows, n_columns, n_parts, part_columns, n_valid,
    vocab_start, vocab_size, ignore_index, strides, scales, rank, capacity, half, limit_ns, SPEC: gl.constexpr,
):  # fmt: skip
    """Compute the same as `one_pass_kernel` for rows that programs share."""
    gl.static_assert(SPEC.SLOTS > 0)
    TILES: gl.constexpr = SPEC.TILES
    LOOPED: gl.constexpr = layouts.looped(SPEC)
    walk = rows.open_walk(logits, target, grad, mailbox, n_rows, n_columns, n_parts, part_columns, n_valid,
                          vocab_start, vocab_size, ignore_index, strides, scales, 2, 2, SPEC)  # fmt: skip
    epoch = gl.load(mailbox.control) + 1

    # Copies of the first two rows start before anything else.
    row = rows.of_step(walk, 0, SPEC)  # (ROWS,)
    this_label = targets.load_labels(inputs, walk, row, SPEC)
    next_label = targets.load_labels(inputs, walk, rows.after(walk, row, 1, SPEC), SPEC)
    rows.copy_tiles(walk, 0, row, this_label, TILES, SPEC)
    next_row = rows.after(walk, row, 1, SPEC)
    rows.copy_tiles(walk, 1, next_row, next_label, TILES, SPEC)

    inverse, scale = rows.inverse_count(walk, inputs, loss, SPEC)
    later_label = targets.load_labels(inputs, walk, rows.after(walk, next_row, 1, SPEC), SPEC)
    queues, limits = exchange.open_exchange(walk, epoch, capacity, half, rank, n_parts, limit_ns, SPEC)

    counts, own = targets.load_own_label(walk, row, this_label, SPEC)
    if SPEC.TOP_K:
        own = targets.load_own_top(walk, row, counts, targets.load_top(walk, row, SPEC), SPEC)
        next_top = targets.load_top(walk, next_row, SPEC)
    held = tiles.reduce_tiles(states.no_columns(SPEC), walk, 0, 0, TILES, TILES, SPEC)
    sent, own, teacher = _send_rows(walk, 0, held, own, queues, SPEC)

    for step in range(walk.steps):
        row = rows.of_step(walk, step, SPEC)  # (ROWS,)
        exists = row < n_rows
        next_row = rows.after(walk, row, 1, SPEC)
        # The target's logits are loaded before the wait for copies, to arrive meanwhile.
        next_counts, next_own = targets.load_own_label(walk, next_row, next_label, SPEC)
        if SPEC.TOP_K:
            next_own = targets.load_own_top(walk, next_row, next_counts, next_top, SPEC)
            next_top = targets.load_top(walk, rows.after(walk, row, 2, SPEC), SPEC)
        values = rows.load_values(inputs, walk, row, SPEC)
        last_label = targets.load_labels(inputs, walk, rows.after(walk, row, 3, SPEC), SPEC)

        next_at = (step + 1) % 2
        held = tiles.reduce_tiles(states.no_columns(SPEC), walk, next_at, 0, TILES, 0, SPEC)
        next_sent, next_own, next_teacher = _send_rows(walk, step + 1, held, next_own, queues, SPEC)

        looked = exchange.first_look(sent, queues, SPEC)
        state, limits, came = exchange.receive_state(looked, limits, queues, SPEC)
        exists = exchange.leave_late(walk, row, exists, came, n_parts, queues, SPEC)
        terms, factors = rows.complete_rows(
            walk, step, row, counts, exists, state, teacher, inputs, values, outputs, scale, SPEC
        )
        copied_row = rows.after(walk, next_row, 1, SPEC)
        copied = targets.rows_that_count(walk, copied_row, later_label, SPEC)
        if LOOPED > 0:
            for tile_of_row in range(LOOPED):
                tiles.store_and_copy(walk, step % 2, factors, row, exists, copied_row, copied, tile_of_row, SPEC)
        for tile_of_row in gl.static_range(LOOPED, TILES):
            tiles.store_and_copy(walk, step % 2, factors, row, exists, copied_row, copied, tile_of_row, SPEC)
        targets.store_at_target(walk, own, state, terms, factors, row, exists, SPEC)
        counts, own, teacher, sent = next_counts, next_own, next_teacher, next_sent
        next_label, later_label = later_label, last_label

    rows.finish(walk, outputs.loss, loss, epoch, inverse, SPEC)


@gluon.jit
def _plus(a_1, b_1, a_2, b_2):
    return a_1 + a_2, b_1 + b_2


@gluon.jit
def _divergences(walk, at, state, copied_row, copied, SPEC: gl.constexpr):
    """Sum KL(p || mixture) and KL(q || mixture) over the part of rows whose tiles are at place `at`, (ROWS,) in bits.

    Also returns of each tile the numbers of its gradient: s p times the slope of a cap, log2(mixture / p), and the
    exponents. Copies of other rows start as soon as a tile has left its place.
    """
    reference_x = layouts.row_to_thread(reference(state.m), SPEC)[:, None, :, None]
    shift = layouts.row_to_thread(gl.log2(state.s) - gl.log2(state.s_t), SPEC)[:, None, :, None]
    reference_t = layouts.row_to_thread(reference(state.m_t), SPEC)[:, None, :, None]
    of_p = layouts.zeros_by_thread(SPEC)
    of_q = of_p
    kept = ()
    TILES: gl.constexpr = SPEC.TILES
    for tile_of_row in gl.static_range(TILES):
        raw_x, raw_t = tiles.load_tile(walk, at, tile_of_row, SPEC)
        tiles.copy_tile(walk, at, copied_row, copied, tile_of_row, SPEC)
        x, slope = states.exponents(raw_x, walk.scales.logits, reference_x, SPEC.SOFTCAP)
        t, _ = states.exponents(raw_t, walk.scales.target, reference_t, SPEC.TARGET_SOFTCAP)
        x, p, q, over_p, over_q = states.compare_softmaxes(x, t + shift, SPEC)
        if (SPEC.SOFTCAP > 0 or SPEC.TARGET_SOFTCAP > 0) and not layouts.is_whole(tile_of_row, SPEC):
            inside = layouts.inside_softmax(x, walk.valid, tile_of_row, SPEC)
            p, q = gl.where(inside, p, 0.0), gl.where(inside, q, 0.0)
        of_p += ptx.sum_products_in_thread(p, over_p, FINITE=True)
        of_q += ptx.sum_products_in_thread(q, over_q, FINITE=True)
        if SPEC.SOFTCAP > 0:
            p *= slope
        kept += ((p, over_p, x),)
    of_p, of_q = gl.reduce((of_p, of_q), 1, _plus)
    layout: gl.constexpr = layouts.state_layout(SPEC)
    factor = -1.0 / state.s
    return (gl.convert_layout(of_p, layout) * factor, gl.convert_layout(of_q, layout) * factor), kept


@gluon.jit
def _row_state(walk, step, LATER: gl.constexpr, queues, SPEC: gl.constexpr):
    """Reduce and send the rows of a step. Returns what `send_state` does."""
    held = tiles.reduce_tiles(states.no_columns(SPEC), walk, step % PLACES, 0, SPEC.TILES, LATER, SPEC)
    state = states.state_of_rows(walk, held, walk.row_in_tile, SPEC)
    return exchange.send_state(state, walk, step, queues, SPEC)


@gluon.jit(do_not_specialize=kernels.ANY_VALUE)
def mixture_kernel(
    logits, target, grad, inputs, outputs, loss, mailbox, n_rows, n_columns, n_parts, part_columns, n_valid,
    vocab_start, vocab_size, ignore_index, strides, scales, rank, capacity, half, limit_ns, SPEC: gl.constexpr,
):  # fmt: skip
    """Compute jsd or total variation, and its gradient. The parameters are those of `one_pass_kernel`.

    For each row a program, which works on three rows at a time:

      1. receives the state of this row, sums its divergences from the mixture, and sends them. The numbers of its
         gradient stay in registers, and a row is copied into the freed places
      2. reduces the row after the next to its state, and sends it
      3. receives the divergences of this row, and stores its gradient
    """
    gl.static_assert(SPEC.SLOTS > 0 and layouts.compares_softmaxes(SPEC))
    TILES: gl.constexpr = SPEC.TILES
    FIRST: gl.constexpr = layouts.numbers_in_state(SPEC)
    walk = rows.open_walk(logits, target, grad, mailbox, n_rows, n_columns, n_parts, part_columns, n_valid,
                          vocab_start, vocab_size, ignore_index, strides, scales, PLACES, PLACES, SPEC)  # fmt: skip
    epoch = gl.load(mailbox.control) + 1
    for place in gl.static_range(PLACES):
        row = rows.of_step(walk, place, SPEC)  # (ROWS,)
        rows.copy_tiles(walk, place, row, targets.load_labels(inputs, walk, row, SPEC), TILES, SPEC)
    inverse, scale = rows.inverse_count(walk, inputs, loss, SPEC)
    queues, limits = exchange.open_exchange(walk, epoch, capacity, half, rank, n_parts, limit_ns, SPEC)

    sent = _row_state(walk, 0, 2 * TILES, queues, SPEC)
    next_sent = _row_state(walk, 1, TILES, queues, SPEC)
    for step in range(walk.steps):
        row = rows.of_step(walk, step, SPEC)  # (ROWS,)
        exists = row < n_rows
        copied_row = rows.after(walk, row, PLACES, SPEC)
        label = targets.load_labels(inputs, walk, row, SPEC)  # it says whether the row counts
        copied_label = targets.load_labels(inputs, walk, copied_row, SPEC)
        values = rows.load_values(inputs, walk, row, SPEC)
        looked = exchange.first_look(sent, queues, SPEC)
        state, limits, _came = exchange.receive_state(looked, limits, queues, SPEC)
        copied = targets.rows_that_count(walk, copied_row, copied_label, SPEC)
        divergences, kept = _divergences(walk, step % PLACES, state, copied_row, copied, SPEC)
        exchange.send_numbers(divergences, FIRST, sent, queues, SPEC)
        later_sent = _row_state(walk, step + 2, TILES, queues, SPEC)

        looked = exchange.first_look(sent, queues, SPEC, FIRST)
        parts, limits, _came = exchange.receive_numbers(looked, limits, FIRST, queues, SPEC)
        if exchange.go_on_together(SPEC):
            ptx.barrier()
        divergences = (gl.sum(parts[0], axis=1) * LN_2, gl.sum(parts[1], axis=1) * LN_2)
        counts = targets.rows_that_count(walk, row, label, SPEC)
        values = values[:6] + divergences + values[8:]
        _terms, factors = rows.complete_rows(
            walk, step, row, counts, exists, state, state, inputs, values, outputs, scale, SPEC
        )
        if SPEC.GRAD:
            for tile_of_row in gl.static_range(TILES):
                p, over_p, x = kept[tile_of_row]
                g = tiles.times_difference(p, over_p * -1.0, x, factors, SPEC)
                tiles.store_gradient(walk, g, row, exists, tile_of_row, SPEC)
        sent, next_sent = next_sent, later_sent

    rows.finish(walk, outputs.loss, loss, epoch, inverse, SPEC)
