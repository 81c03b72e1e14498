"""A model of the one-pass kernel's exchange on ranks that overtake each other, run under adversarial schedules.

A program of the model accesses memory one step at a time: each word that it stores at each rank, each word that it
reads. The positions of words and the slots of programs come from the kernel's own functions, called on plain numbers.
The scheduler is that of probabilistic concurrency testing (Burckhardt et al., ASPLOS 2010): always the program of the
highest priority that can go on, and at a few random moments that one becomes the last. So whole ranks run ahead as far
as the exchange lets them.

A GPU of the model has room for some programs at a time, which start in the order of their kernels and streams. So a
program that waits keeps others from running, as on a GPU.
"""

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from triton import next_power_of_2

from tpbench.kernels.one_pass import exchange

word_at: Callable[[int, int, int, int, int], int] = exchange.word_at.fn
fills: Callable[[int, int, int], bool] = exchange.fills.fn


@dataclass(frozen=True)
class Launch:
    """One call. It is equal on all ranks, except how each rank shares its rows among programs."""

    rows: int
    width: int
    slots: int
    tile_rows: int
    parts: tuple[int, ...]
    """Programs that share a row, by rank."""
    walkers: tuple[int, ...]
    """Rows that a rank works on at a time, by rank."""
    alone: bool = False
    """Each warp walks down its own row of the tiles, without a barrier between warps."""
    yields: bool = False
    """Programs leave rows whose words come late to a later kernel."""


HALF = 64
"""Words of one half of a buffer."""
Word = tuple[int, object]
GOES_ON = -1
Program = Generator[int, bool, None]
"""Yields after each step: GOES_ON, or the version of the memory in which it did not find what it waits for. It is sent
whether its wait has passed its limit."""


@dataclass
class Kernel:
    """Programs that start in this order, as soon as there is room."""

    waiting: list[Program]
    launch: Launch | None = None
    """The launch whose words it sends."""
    running: list[Program] = field(default_factory=list)


@dataclass
class Rank:
    words: list[Word]
    room: int
    """Programs that can run at the same time."""
    epoch: int = 0
    version: int = 0
    """Changes with every store. A program that found no word need not look again before it changes."""
    met: dict[str, list[int]] = field(default_factory=dict)
    """The numbers that each rank has told at the meetings of a name."""
    streams: list[list[Kernel]] = field(default_factory=list)
    impatient: set[Program] = field(default_factory=set)
    """Programs whose waits have a limit."""

    @property
    def kernels(self) -> list[Kernel]:
        return [stream[0] for stream in self.streams if stream]

    @property
    def running(self) -> list[Program]:
        return [each for kernel in self.kernels for each in kernel.running]

    def start(self) -> None:
        """Start the next kernel of each stream if the last one is over, and the programs that now have room."""
        for stream in self.streams:
            while stream and not stream[0].waiting and not stream[0].running:
                self.epoch += stream.pop(0).launch is not None
            if stream:
                room = self.room - len(self.running)
                launch, programs = stream[0].launch, stream[0].waiting
                if launch is not None and not launch.yields and room < len(programs):
                    continue  # a cooperative launch
                stream[0].running += programs[:room]
                del programs[:room]


class Deadlock(Exception):
    """No program can go on. On a GPU only the limit ends such a wait."""


def meeting(ranks: list[Rank], me: int, name: str, number: Callable[[], int], left: list[Any] | None = None) -> Program:
    """Tell all ranks a number, and wait until all told as much, unless an empty list of rows is left."""
    told = number()
    for rank in ranks:
        rank.met.setdefault(name, [0] * len(ranks))[me] = told
        rank.version += 1
        yield GOES_ON
    while left is None or left:
        version = ranks[me].version
        if min(ranks[me].met[name]) >= told:
            return
        yield version


def late_rows(mine: Rank, left: list[tuple[list[int], list[Word]]]) -> Program:
    """Read the words of rows that programs left. All must be there, because the kernel may fill the GPU."""
    for places, words in left:
        for place, word in zip(places, words, strict=True):
            assert mine.words[place] == word
            yield GOES_ON


def kernels_of(ranks: list[Rank], me: int, launch: Launch) -> list[Kernel]:
    """Return the kernels that a rank starts for a launch."""
    left: list[Any] = []
    programs = [
        program(ranks, me, launch, left, walker, part, only)
        for walker in range(launch.walkers[me])
        for part in range(launch.parts[me])
        for only in (range(launch.tile_rows) if launch.alone else (None,))
    ]
    if not launch.yields:
        return [Kernel(programs, launch)]
    mine = ranks[me]
    mine.impatient.update(programs)
    first = meeting(ranks, me, "before", lambda: mine.epoch + 1)
    second = meeting(ranks, me, "after", lambda: mine.epoch, left)
    return [Kernel([first]), Kernel(programs, launch), Kernel([second]), Kernel([late_rows(mine, left)])]


def program(
    ranks: list[Rank], me: int, launch: Launch, left: list[Any], walker: int, part: int, only: int | None = None
) -> Program:
    """Run one program, or only its warps that have row `only` of each tile."""
    mine, world = ranks[me], len(ranks)
    epoch = mine.epoch + 1
    queues = next_power_of_2(world) * launch.slots
    capacity = HALF // launch.width // queues
    pitch = capacity * queues

    def place(row: int, kind: int, rank: int, slot: int) -> int:
        return word_at(epoch, HALF, row, rank * launch.slots + slot, queues) + kind * pitch

    def expected(row: int, kind: int, rank: int, slot: int) -> Word:
        return epoch, (rank, slot if slot < launch.parts[rank] else "nothing", row, kind)

    patient = True
    for first in range(walker * launch.tile_rows, launch.rows, launch.walkers[me] * launch.tile_rows):
        rows = range(first, min(first + launch.tile_rows, launch.rows))
        if only is not None:
            rows = rows[only : only + 1]
        for kind in range(launch.width):
            for row in rows:
                for peer in range(world):
                    for slot in range(launch.slots):
                        if fills(part, slot, launch.parts[me]):
                            ranks[peer].words[place(row, kind, me, slot)] = expected(row, kind, me, slot)
                            ranks[peer].version += 1
                            yield GOES_ON
        needed = [
            (row, kind, rank, slot)
            for kind in range(launch.width)
            for row in rows
            for rank in range(world)
            for slot in range(launch.slots)
        ]
        late = True
        while late:
            found, version = [], mine.version
            for each in needed:
                found.append(mine.words[place(*each)])
                yield GOES_ON
            late = any(word[0] != epoch for word in found)
            if late and patient:
                patient = not (yield version)
            if late and not patient:
                left.append(([place(*each) for each in needed], [expected(*each) for each in needed]))
                break
        assert late or found == [expected(*each) for each in needed]


def run(world: int, launches: list[Launch], seed: int, changes: int = 6, collectives: int = 0, room: int = 99) -> int:
    """Run all launches on all ranks by one schedule, and collectives on another stream, in any order.

    Returns the number of steps. Raises Deadlock."""
    chance = random.Random(seed)
    ranks = [Rank([(0, None)] * (2 * HALF), room) for _ in range(world)]
    for me, rank in enumerate(ranks):
        others = [
            Kernel([meeting(ranks, me, "other", lambda number=number: number)]) for number in range(1, collectives + 1)
        ]
        rank.streams = [[kernel for launch in launches for kernel in kernels_of(ranks, me, launch)], others]
        chance.shuffle(rank.streams)
    priority: dict[Program, float] = {}
    looked: dict[Program, int] = {}
    demote_at = sorted(chance.randrange(3000) for _ in range(changes))
    steps = 0
    favour = [chance.random() for _ in ranks]  # ranks as a whole run ahead, not only programs
    while True:
        for rank in ranks:
            rank.start()
        programs = [
            (priority.setdefault(each, favour[me] + 0.3 * chance.random()), me, each)
            for me, rank in enumerate(ranks)
            for each in rank.running
        ]
        able = [found for found in programs if looked.get(found[2]) != ranks[found[1]].version]
        over = [found for found in programs if found not in able and found[2] in ranks[found[1]].impatient]
        is_over = bool(over) and (not able or chance.random() < 0.02)
        if is_over:
            able = [chance.choice(over)]
        if not able:
            if any(rank.running or any(rank.streams) for rank in ranks):
                raise Deadlock
            return steps
        highest, me, each = max(able, key=lambda found: found[0])
        rivals = [(other, ranks[rank]) for level, rank, other in programs if level > highest]  # all of them wait
        goes_on = True
        while goes_on:
            steps += 1
            try:
                looked[each] = each.send(is_over) if each in looked else next(each)
            except StopIteration:
                next(kernel for kernel in ranks[me].kernels if each in kernel.running).running.remove(each)
                goes_on = False
            else:
                is_over = False
                found_news = any(looked.get(other) != rank.version for other, rank in rivals)
                goes_on = looked[each] == GOES_ON and not found_news
            if demote_at and steps >= demote_at[0]:
                demote_at.pop(0)
                favour[me] = -steps
                priority = {other: value for other, value in priority.items() if other not in ranks[me].running}
                goes_on = False


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[Launch]]:
    """Launches of changing shapes that fit half a buffer, over 1 to 5 ranks that share their rows differently."""
    world = draw(st.integers(1, 5))
    chance = random.Random(draw(st.integers(0, 2**32)))
    launches = []
    for _ in range(draw(st.integers(2, 4))):
        width, slots, tile_rows = chance.choice((3, 5)), chance.choice((1, 2, 4)), chance.randint(1, 2)
        most = HALF // width // (next_power_of_2(world) * slots)
        if most:
            rows = chance.randint(1, min(most, 6))
            parts = tuple(chance.randint(1, slots) for _ in range(world))
            walkers = tuple(chance.randint(1, -(-rows // tile_rows)) for _ in range(world))
            alone, yields = chance.random() < 0.5, chance.random() < 0.5
            launches.append(Launch(rows, width, slots, tile_rows, parts, walkers, alone, yields))
    return world, launches


@settings(max_examples=120)
@given(case=cases(), seed=st.integers(0, 2**32))
def test_every_rank_reads_its_own_launch_and_no_wait_is_endless(case: tuple[int, list[Launch]], seed: int) -> None:
    world, launches = case
    run(world, launches, seed)


FOUR = [Launch(4, 3, 1, 1, (1, 1, 1, 1), (4, 2, 1, 4))] * 4
"""Four launches of four ranks, each of which walks down the rows in another stride."""
WARPS = [Launch(5, 3, 1, 2, (1, 1, 1), (3, 2, 1), True)] * 3
"""Warps that wait for their own rows."""
PARTS = [Launch(4, 3, 2, 1, (2, 2), (2, 2))]
TWO = [Launch(4, 3, 1, 1, (1, 1), (1, 4))] * 3
SHAPES = [Launch(1, 5, 4, 1, (4, 1), (1, 1)), Launch(10, 3, 1, 5, (1, 1), (1, 2))] * 2
"""A half has 64 words. 10 rows of 3 numbers for two ranks fill 60. 1 row of 5 numbers in 8 queues fills 40, where the
second half would begin if halves depended on the shape."""


@pytest.mark.parametrize("launches", [FOUR, WARPS, PARTS, TWO, SHAPES], ids=["four", "warps", "parts", "two", "shapes"])
def test_ranks_under_many_schedules(launches: list[Launch]) -> None:
    for seed in range(40):
        run(len(launches[0].parts), launches, seed)


@pytest.mark.parametrize("launches", [FOUR, WARPS, PARTS, TWO, SHAPES], ids=["four", "warps", "parts", "two", "shapes"])
def test_yielding_ranks_beside_collectives_of_another_stream(launches: list[Launch]) -> None:
    yielding = [replace(launch, yields=True) for launch in launches]
    for seed in range(40):
        run(len(launches[0].parts), yielding, seed, collectives=seed % 5, room=2 + seed % 4)


def test_a_launch_that_does_not_yield_can_wait_for_a_collective_that_it_keeps_from_running() -> None:
    whole_gpu = [Launch(4, 3, 1, 1, (1, 1), (4, 4))] * 2
    with pytest.raises(Deadlock):
        for seed in range(40):
            run(2, whole_gpu, seed, collectives=2, room=4)
