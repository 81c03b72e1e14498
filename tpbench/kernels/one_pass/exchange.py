"""The exchange of row states between the programs of one row, on this GPU and on other ranks.

A word is 8 bytes: the epoch (32 bits, it counts launches) and an fp32 number. One store writes both. So a reader that
sees the epoch has the number, without flags and without fences. A program stores its words into the buffer of every
rank, over NVLink for peers, and polls its own buffer.

Buffers have two halves, and the parity of the epoch selects one. A rank that is one launch ahead writes to the other
half. It cannot be two launches ahead, since each launch waits for all ranks. A half is half of the buffer for every
shape of a launch: neighbouring launches of different shapes must not overlap either. The last program advances the
epoch in device memory, after all programs have read it. So the replay of a CUDA graph advances it, too.

All parts of a row are at the same step of programs that run at the same time (a cooperative launch), so that every wait
ends. A wait for a peer that died ends by its limit: then `failed` is set, and the missing numbers become NaN.

Long launches begin with a meeting of ranks. One warp waits for late ranks, and leaves the multiprocessors to other
streams. Two H100s, three bf16 products of 4096^3 on another stream of the rank that waits 1 ms, for 4096 tokens and
131072 columns: 0.606 ms with a meeting, 1.735 without, 0.784 beside NCCL's all-gather. It costs one more launch and one
transfer between GPUs, too much for short launches.

A launch that yields (exchange="yielding") has four kernels. Only single warps wait long, and every other kernel can
always run:

1. Ranks meet.
2. A program that has waited `launch.YIELD_NS` leaves its rows, and later ones whose words are not there. It sends all
   its own words. The launch isn't cooperative, because no program needs others to run at the same time.
3. If programs left rows, ranks meet again. Then all words are there.
4. `late_rows_kernel` reads those rows once more and stores their results, or ends at once.

Two H200s, 4096 rows of labels in bf16, in ms: with 32768, 65536 and 131072 columns 0.097, 0.172 and 0.319, where
exchange="symmetric" takes 0.087, 0.160 and 0.312. 1,000 steps beside all-gathers on another stream, started in opposite
orders on the ranks, had the right bits, and so had 2,000 calls beside FSDP2. Ranks left rows in a tenth of the steps.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpbench.kernels.one_pass import layouts, ptx, states
from tpbench.kernels.row_terms import numbers_of, state_of
from tpbench.kernels.symmetric import MOST_RANKS

MEETINGS = gl.constexpr(2 * MOST_RANKS)
"""Words of meetings in a buffer, behind its two halves."""


class WordQueues(NamedTuple):
    """The queues of one launch. A queue holds the words of one part of a row: queue = rank * SLOTS + slot."""

    epoch: Any
    half: Any
    """Words of one half of a buffer."""
    pitch: Any
    """int64: words between two numbers of one row. Each number of the state has a section for all rows."""
    mailbox: Any
    buffers: Any
    """int64 (1, RANKS * SLOTS): address of the buffer that each queue is sent to."""
    own_queue: Any
    """int32 (1, RANKS * SLOTS): the queue there that this rank's words of the slot stand in."""
    mine: Any
    """bool (1, RANKS * SLOTS): this program sends the slot."""
    empty: Any
    """bool (1, RANKS * SLOTS): the slot has no part of the row."""
    queue: Any
    """int32 (RANKS * SLOTS,)"""
    exists: Any
    """bool (1, RANKS * SLOTS): the queue is of a rank. Others only fill up a power of two."""


# The next two functions are arithmetic on integers. Tests also call them on plain numbers, in a model of ranks that
# overtake each other.
@gluon.jit
def word_at(epoch, half, row, queue, QUEUES: gl.constexpr):
    """The position of a row's first word of a queue in a rank's buffer."""
    return (epoch & 1) * half + row * QUEUES + queue


@gluon.jit
def fills(part, slot, n_parts):
    """Return whether the program of a part writes a slot: its own slot, or its share of the slots that have no part.

    Slots without a part are sent as empty states. So readers need not know how many parts a peer has.
    """
    return slot % n_parts == part


@gluon.jit
def open_exchange(walk, epoch, capacity, half, rank, n_parts, limit_ns, SPEC: gl.constexpr):
    """The `WordQueues` of a launch, and the limits of waits. capacity: rows that a half has room for.

    half: words of a half. limits: int64 (ROWS, RANKS * SLOTS), nanoseconds that the wait for a word may take. They are
    0 after one has passed.
    """
    mailbox = walk.mailbox
    words: gl.constexpr = layouts.words_layout(SPEC)
    queue = gl.arange(0, layouts.queues(SPEC), gl.SliceLayout(0, words))
    peer = queue // SPEC.SLOTS
    slot = queue % SPEC.SLOTS
    if SPEC.WORLD > 1:
        buffers = gl.load(mailbox.peers + peer, mask=peer < SPEC.WORLD, other=0)[None, :]
    else:
        buffers = (mailbox.words + queue * 0).to(gl.int64)[None, :]
    mine = ((peer < SPEC.WORLD) & fills(walk.part_number, slot, n_parts))[None, :]
    empty = (slot != walk.part_number)[None, :]
    own_queue = (rank * SPEC.SLOTS + slot)[None, :]
    pitch = capacity.to(gl.int64) * layouts.queues(SPEC)
    exists = (peer < SPEC.WORLD)[None, :]
    queues = WordQueues(epoch, half, pitch, mailbox, buffers, own_queue, mine, empty, queue, exists)
    shape: gl.constexpr = [SPEC.ROWS, layouts.queues(SPEC)]
    return queues, gl.zeros(shape, gl.int64, words) + limit_ns


@gluon.jit
def words_of_step(walk, step, queues, SPEC: gl.constexpr):
    """Return which rows of a step exist, bool (ROWS, 1), and where their words begin, int64 (ROWS, 1)."""
    row_in_tile = gl.arange(0, SPEC.ROWS, layouts.state_layout(SPEC))
    row = ((walk.walker + step * walk.walkers) * SPEC.ROWS + row_in_tile).to(gl.int64)
    exists = (row < walk.n_rows)[:, None]
    return exists, word_at(queues.epoch, queues.half.to(gl.int64), row, 0, layouts.queues(SPEC))[:, None]


@gluon.jit
def send_state(state, walk, step, queues, SPEC: gl.constexpr):
    """Send the states (ROWS,) of this part of the rows of a step to all ranks, and return `words_of_step`."""
    at = words_of_step(walk, step, queues, SPEC)
    send_numbers(numbers_of(state, SPEC), 0, at, queues, SPEC)
    return at


@gluon.jit
def send_numbers(numbers, FIRST: gl.constexpr, at, queues, SPEC: gl.constexpr):
    """Send the numbers of rows from FIRST on, (ROWS,) each. at: `words_of_step`.

    Slots without a part receive the numbers of an empty state.
    """
    exists, first_word = at
    sent = gl.where(queues.mine & exists, 1, 0)
    own_word = first_word + queues.own_queue
    for number in gl.static_range(len(numbers)):
        value = gl.where(queues.empty, states.empty_number(FIRST + number, SPEC), numbers[number][:, None])
        bits = value.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
        word = (queues.epoch.to(gl.int64) << 32) | bits
        ptx.send_word(queues.buffers + (own_word + (FIRST + number) * queues.pitch) * 8, word, sent, SPEC)


@gluon.jit
def first_look(at, queues, SPEC: gl.constexpr, FIRST: gl.constexpr = 0):
    """Load the words of the states as they are now, or those of the two numbers from FIRST on. at: `words_of_step`.

    Returns which words to wait for, where the first word of each queue stands, and the words of each queue, one for
    each number. All have the shape (ROWS, RANKS * SLOTS).
    """
    exists, first_word = at
    needed = exists & queues.exists
    inbox = queues.mailbox.words + first_word + queues.queue[None, :] + FIRST * queues.pitch
    COUNT: gl.constexpr = 2 if FIRST > 0 else layouts.numbers_in_state(SPEC)
    words = ()
    for number in gl.static_range(COUNT):
        words = words + (gl.load(inbox + number * queues.pitch, mask=needed, other=0, volatile=True),)
    return needed, inbox, words


@gluon.jit
def receive_state(looked, limits, queues, SPEC: gl.constexpr):
    """Wait for the states of all parts of the rows, as `receive_numbers` does, and merge them. looked: `first_look`."""
    numbers, limits, came = receive_numbers(looked, limits, 0, queues, SPEC)
    return states.merge_along(state_of(numbers, SPEC), 1, SPEC), limits, came


@gluon.jit
def receive_numbers(looked, limits, FIRST: gl.constexpr, queues, SPEC: gl.constexpr):
    """Wait for numbers of all parts of the rows, from FIRST on.

    Returns them, the limits of later waits and, with YIELDS, whether all words of the program came, bool (ROWS,). A
    number is NaN if its word never came, and that of an empty state from ranks that only fill up a power of two.
    """
    needed, inbox, words = looked
    COUNT: gl.constexpr = len(words)
    like = gl.zeros_like(words[0])
    address = inbox.to(gl.int64)
    pitch = like + queues.pitch * 8
    epoch = like.to(gl.int32) + queues.epoch
    failed = like + queues.mailbox.failed.to(gl.int64)
    words = ptx.await_words(words, gl.where(needed, 1, 0), limits, address, pitch, epoch, failed)
    numbers = ()
    came = True
    if SPEC.YIELDS:
        all_came = epoch * 0 + 1
        for number in gl.static_range(COUNT):
            all_came = gl.where(needed & ((words[number] >> 32).to(gl.int32) != queues.epoch), 0, all_came)
        came = gl.reduce(ptx.vote(all_came, SPEC), 1, ptx.first) > 0
    for number in gl.static_range(COUNT):
        value = words[number].to(gl.int32).to(gl.float32, bitcast=True)
        value = gl.where((words[number] >> 32).to(gl.int32) == queues.epoch, value, float("nan"))
        numbers = numbers + (gl.where(needed, value, states.empty_number(FIRST + number, SPEC)),)
    return numbers, words[COUNT], came


@gluon.jit
def late_word(queues, row, n_parts, part):
    """Return where the epoch of the last launch stands that left a part of a row."""
    return queues.mailbox.words + 2 * queues.half.to(gl.int64) + MEETINGS + row * n_parts + part


@gluon.constexpr_function
def go_on_together(spec):
    """After the words of a row came, all warps wait for each other: where this was measured to be faster.

    Over two H200s reverse_kl at 151936 columns took 0.600 ms where each warp went on as soon as it had seen the words,
    and 0.562 with a barrier, on one H200 1.023 and 1.015. Over two labels took 0.307 and take 0.297 at 128256 columns,
    and with entropies 0.339 and 0.319 at 131072.

    Slower are forward_kl in four tiles (0.438 and 0.441 at 131072), a top k (0.391 and 0.420 at 151936) and, in the
    kernel of shared rows, labels (0.227 and 0.229 at 100352), gradients of entropies (0.369 and 0.375 at 151936),
    smoothing (0.361 and 0.366) and a softcap (0.577 and 0.601 at 131072). On one H200 smoothing with an entropy takes
    0.665 ms at 151936 columns, and 0.686 with a barrier.
    """
    if spec.KERNEL == "mixture":
        return spec.LOSS == "jsd"
    if spec.TOP_K:
        return False
    if spec.KERNEL == "shared_rows" and layouts.has_labels(spec):
        return spec.ENTROPY and not spec.ENTROPY_GRAD and spec.WORLD > 1 and not spec.SMOOTHED and spec.SOFTCAP == 0
    return spec.ROWS == 1 and (spec.TILES == 7 or spec.LOSS in ("cross_entropy", "reverse_kl"))


@gluon.jit
def leave_late(walk, row, exists, came, n_parts, queues, SPEC: gl.constexpr):
    """With YIELDS note that the program leaves rows (ROWS,) whose words did not come. Return which others exist.

    Warps wait for each other here where that is faster. With YIELDS their vote made them wait already.
    """
    if SPEC.YIELDS:
        came = gl.convert_layout(came, layouts.row_layout(SPEC))
        at = late_word(queues, row, n_parts, walk.part_number)
        gl.store(at, row * 0 + queues.epoch, mask=exists & ~came)
        return exists & came
    else:
        if go_on_together(SPEC):
            ptx.barrier()
        return exists


_MEET = tl.constexpr(
    """{
    .reg .pred p;
    .reg .b32 seen;
    .reg .b64 began, now;
    setp.eq.b32 p, $5, 0;
    @p bra DONE;
    st.relaxed.sys.global.b32 [$1], $3;
    setp.eq.b32 p, $6, 0;
    @p bra DONE;
    mov.u64 began, %globaltimer;
    AGAIN: ld.relaxed.sys.global.b32 seen, [$2];
    sub.s32 seen, seen, $3;
    setp.ge.s32 p, seen, 0;
    @p bra DONE;
    mov.u64 now, %globaltimer;
    sub.s64 now, now, began;
    setp.lt.s64 p, now, $4;
    @p bra AGAIN;
    DONE: mov.b32 $0, 0;
    }"""
)


@triton.jit(do_not_specialize=["rank", "place", "ahead", "limit_ns"])
def meeting_kernel(mailbox, rank, place, ahead, limit_ns, WORLD: tl.constexpr, RANKS: tl.constexpr):
    """Tell all ranks the epoch of a launch, and wait until all of them have told it or a later one.

    ahead: 1 before the launch. 0 after it: then the kernel waits only if this rank's programs left rows. mailbox:
    `launch.Mailbox`. place: of the ranks' words of 8 bytes in each rank's buffer. RANKS: WORLD filled up to a power of
    two. A wait ends after limit_ns: the next kernel waits, too, and says so.
    """
    peer = tl.arange(0, RANKS)
    exists = peer < WORLD
    there = tl.load(mailbox.peers + peer, mask=exists, other=0) + (place + rank) * 8
    here = (mailbox.words + (place + peer)).to(tl.int64)
    epoch = tl.load(mailbox.control) + ahead + peer * 0
    waits = tl.load(mailbox.control + 2) + ahead + peer * 0
    limit = peer.to(tl.int64) * 0 + limit_ns
    tl.inline_asm_elementwise(
        _MEET, "=r,l,l,r,l,r,r", [there, here, epoch, limit, exists.to(tl.int32), waits], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
