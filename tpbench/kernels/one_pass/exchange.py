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
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpbench.kernels.one_pass.layouts import (
    numbers_in_state,
    queues,
    row_layout,
    state_layout,
    words_layout,
    words_shape,
)
from tpbench.kernels.one_pass.ptx import await_words, first, send_word, vote
from tpbench.kernels.one_pass.state import empty_number, merge_along
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
    words: Any
    """int64 pointer: this rank's buffer."""
    failed: Any
    """int32 pointer: set if a wait passes its limit."""
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
    peer: Any
    """int32 (RANKS * SLOTS,): the rank of each queue."""
    row_in_tile: Any
    """int32 (ROWS,)"""


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
def open_exchange(mailbox, epoch, capacity, half, rank, part, n_parts, SPEC: gl.constexpr):
    """The `WordQueues` of a launch. capacity: rows that a half has room for. half: words of a half."""
    words: gl.constexpr = words_layout(SPEC)
    queue = gl.arange(0, queues(SPEC), gl.SliceLayout(0, words))
    peer = queue // SPEC.SLOTS
    slot = queue % SPEC.SLOTS
    row_in_tile = gl.arange(0, SPEC.ROWS, state_layout(SPEC))
    if SPEC.WORLD > 1:
        buffers = gl.load(mailbox.peers + peer, mask=peer < SPEC.WORLD, other=0)[None, :]
    else:
        buffers = (mailbox.words + queue * 0).to(gl.int64)[None, :]
    mine = ((peer < SPEC.WORLD) & fills(part, slot, n_parts))[None, :]
    empty = (slot != part)[None, :]
    own_queue = (rank * SPEC.SLOTS + slot)[None, :]
    pitch = capacity.to(gl.int64) * queues(SPEC)
    return WordQueues(epoch, half, pitch, mailbox.words, mailbox.failed, buffers, own_queue, mine, empty, queue, peer,
                    row_in_tile)  # fmt: skip


@gluon.jit
def wait_limits(limit_ns, SPEC: gl.constexpr):
    """int64 (ROWS, RANKS * SLOTS): nanoseconds that the wait for a word may take. 0 after a limit has passed."""
    return gl.zeros(words_shape(SPEC), gl.int64, words_layout(SPEC)) + limit_ns


@gluon.jit
def words_of_rows(first_row, n_rows, exchange, SPEC: gl.constexpr):
    """Return which rows from first_row on exist, bool (ROWS, 1), and where their words begin, int64 (ROWS, 1)."""
    row = (first_row + exchange.row_in_tile).to(gl.int64)
    exists = (row < n_rows)[:, None]
    return exists, word_at(exchange.epoch, exchange.half.to(gl.int64), row, 0, queues(SPEC))[:, None]


@gluon.jit
def send_state(state, first_row, n_rows, exchange, SPEC: gl.constexpr):
    """Send the states (ROWS,) of this part of the rows from first_row on to all ranks, and return `words_of_rows`."""
    exists, first_word = words_of_rows(first_row, n_rows, exchange, SPEC)
    send_numbers(numbers_of(state, SPEC), 0, exists, first_word, exchange, SPEC)
    return exists, first_word


@gluon.jit
def send_numbers(numbers, FIRST: gl.constexpr, exists, first_word, exchange, SPEC: gl.constexpr):
    """Send the numbers of rows from FIRST on, (ROWS,) each. exists, first_word: `words_of_rows`.

    Slots without a part receive the numbers of an empty state.
    """
    sent = gl.where(exchange.mine & exists, 1, 0)
    own_word = first_word + exchange.own_queue
    for number in gl.static_range(len(numbers)):
        value = gl.where(exchange.empty, empty_number(FIRST + number, SPEC), numbers[number][:, None])
        bits = value.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
        word = (exchange.epoch.to(gl.int64) << 32) | bits
        send_word(exchange.buffers + (own_word + (FIRST + number) * exchange.pitch) * 8, word, sent, SPEC)


@gluon.jit
def first_look(exists, first_word, exchange, SPEC: gl.constexpr, FIRST: gl.constexpr = 0):
    """Load the words of the states as they are now, or those of the two numbers from FIRST on.

    Returns which words to wait for, where the first word of each queue stands, and the words of each queue, one for
    each number. All have the shape (ROWS, RANKS * SLOTS).
    """
    needed = exists & (exchange.peer < SPEC.WORLD)[None, :]
    inbox = exchange.words + first_word + exchange.queue[None, :]
    if FIRST > 0:
        inbox += FIRST * exchange.pitch
    COUNT: gl.constexpr = 2 if FIRST > 0 else numbers_in_state(SPEC)
    words = ()
    for number in gl.static_range(COUNT):
        words = words + (gl.load(inbox + number * exchange.pitch, mask=needed, other=0, volatile=True),)
    return needed, inbox, words


@gluon.jit
def receive_state(looked, limits, exchange, SPEC: gl.constexpr):
    """Wait for the states of all parts of the rows, as `receive_numbers` does, and merge them. looked: `first_look`."""
    needed, inbox, words = looked
    numbers, limits, came = receive_numbers(words, inbox, needed, limits, 0, exchange, SPEC)
    return merge_along(state_of(numbers, SPEC), 1, SPEC), limits, came


@gluon.jit
def receive_numbers(words, inbox, needed, limits, FIRST: gl.constexpr, exchange, SPEC: gl.constexpr):
    """Wait for numbers of all parts of the rows, from FIRST on.

    Returns them, the limits of later waits and, with YIELDS, whether all words of the program came, bool (ROWS,). A
    number is NaN if its word never came, and that of an empty state from ranks that only fill up a power of two.
    """
    COUNT: gl.constexpr = len(words)
    like = gl.zeros_like(words[0])
    address = inbox.to(gl.int64)
    pitch = like + exchange.pitch * 8
    epoch = like.to(gl.int32) + exchange.epoch
    failed = like + exchange.failed.to(gl.int64)
    words = await_words(words, gl.where(needed, 1, 0), limits, address, pitch, epoch, failed)
    numbers = ()
    came = True
    if SPEC.YIELDS:
        all_came = epoch * 0 + 1
        for number in gl.static_range(COUNT):
            all_came = gl.where(needed & ((words[number] >> 32).to(gl.int32) != exchange.epoch), 0, all_came)
        came = gl.reduce(vote(all_came, SPEC), 1, first) > 0
    for number in gl.static_range(COUNT):
        value = words[number].to(gl.int32).to(gl.float32, bitcast=True)
        value = gl.where((words[number] >> 32).to(gl.int32) == exchange.epoch, value, float("nan"))
        numbers = numbers + (gl.where(needed, value, empty_number(FIRST + number, SPEC)),)
    return numbers, words[COUNT], came


@gluon.jit
def late_word(exchange, row, n_parts, part):
    """Return where the epoch of the last launch stands that left a part of a row."""
    return exchange.words + 2 * exchange.half.to(gl.int64) + MEETINGS + row * n_parts + part


@gluon.jit
def leave_late(walk, row, came, n_parts, exchange, SPEC: gl.constexpr):
    """Note that the program leaves rows (ROWS,) whose words did not come. Return which of the others exist."""
    exists = row < walk.n_rows
    came = gl.convert_layout(came, row_layout(SPEC))
    at = late_word(exchange, row, n_parts, walk.part_number)
    gl.store(at, row * 0 + exchange.epoch, mask=exists & ~came)
    return exists & came
