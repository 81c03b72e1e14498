"""The tiling of the one-pass kernels: the shape of tiles, and how programs share the rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import triton

from tpbench.kernels.block_caps import measured_cap

TILE_BYTES = 32768
"""Bytes of a tile of logits and target logits. Of two bytes each, a thread holds 32 numbers in registers."""
RESERVED_BYTES = 1024
"""Shared memory for the compiler's reductions. Each program costs as many bytes again in addition to its own."""
SMALLEST_BLOCK = 1024
"""Smallest block, unless block_cap is smaller. Short rows fill a part of it, so that uneven rows stay in one piece."""
MAX_WORDS = 256
"""Most words of one kind of number for the rows of a tile: a warp holds them in registers, eight per thread."""


@dataclass(frozen=True)
class Tiling:
    """The shape of tiles and how programs share them. The width and alignment of a shard may make it differ by rank."""

    rows: int
    repeats: int
    lanes: int
    vector: int
    row_warps: int
    warps: int
    tiles: int
    """Tiles of a part of a row. The last one (of whole rows two) is kept in registers, the others in shared memory."""
    programs_per_sm: int
    parts: int
    """Programs that share a row on this rank."""
    part_columns: int
    slots: int
    """Parts that each rank sends, some of them empty: a power of two, equal on all ranks. 0: nothing to exchange."""
    whole: bool = False
    """The row fills a multiprocessor. Two of its tiles are kept in registers, and each of the others has one place in
    shared memory. Otherwise each tile has a second place for the next row's tile."""
    ahead: int = 0
    """Tiles of the next row that are reduced while this row's words travel: at most tiles - 1."""

    @property
    def registers(self) -> int:
        """Most registers per thread with which programs_per_sm programs fit."""
        return min(255, 65536 // (32 * self.warps * self.programs_per_sm))

    @property
    def columns(self) -> int:
        """Columns that a tile has room for."""
        return self.repeats * self.lanes * self.vector

    @property
    def block(self) -> int:
        """Columns of a tile that are used."""
        return self.part_columns // self.tiles


@dataclass(frozen=True)
class Machine:
    """The limits that a tiling must respect."""

    processors: int
    shared_bytes: int


@functools.cache
def machine(device: int) -> Machine:
    """Return the limits of a CUDA device."""
    properties = triton.runtime.driver.active.utils.get_device_properties(device)
    return Machine(properties["multiprocessor_count"], properties["max_shared_mem"])


def next_power_of_2(value: int) -> int:
    """Return the smallest power of two that is at least `value`."""
    return 1 << max(0, value - 1).bit_length()


@functools.lru_cache(maxsize=256)
def tiling(
    rows: int, columns: int, share: int, world_size: int, itemsize: int, loss: str, block_cap: int | str,
    whole_vectors: bool, on: Machine, widest: int | None = None,
) -> Tiling | str:  # fmt: skip
    """Return the tiling for (rows, columns) logits, or the reason why there is none.

    share: columns per rank if the vocabulary is split evenly. This number is equal on all ranks, so that their tilings
    agree in everything that the exchange needs. One rank alone uses its columns, of which some may be padding.
    widest: the most columns that a rank holds, if the ranks know it. If not, a rank with too many raises ValueError.
    """
    share = columns if world_size == 1 else share
    column_bytes = itemsize * (1 if loss == "cross_entropy" else 2)
    wanted = max(SMALLEST_BLOCK, next_power_of_2(share))
    most = TILE_BYTES // column_bytes
    cap = measured_cap("one_read", loss, share) if block_cap == "auto" else int(block_cap)
    # Six tiles of a row that fills a multiprocessor stay in shared memory, and two pass through a seventh place to
    # registers. Otherwise two programs would share the row and wait for each other.
    fits = on.shared_bytes >= 7 * TILE_BYTES + RESERVED_BYTES
    whole = world_size == 1 and fits and 4 * most < wanted <= 8 * min(most, cap)
    exchanged = world_size > 1 or (wanted > 4 * most and not whole)
    # Two programs per multiprocessor: one works while the other waits, if 128 registers per thread are enough. The
    # launch is cooperative, so the driver refuses it if not all programs fit at once.
    halves = world_size > 1 and wanted <= most * (2 if loss == "cross_entropy" else 1)
    # The smallest tile has a vector of 16 bytes per thread. Seven such tiles of 8 warps, twice, must fit, too.
    halves = halves and on.shared_bytes >= 2 * (7 * 8 * 32 * 16 * (column_bytes // itemsize) + RESERVED_BYTES)
    per_sm = 2 if halves else 1
    most, room = most // per_sm, (on.shared_bytes + RESERVED_BYTES) // per_sm - RESERVED_BYTES
    # Instructions limit the speed. Fewer warps repeat fewer of those that each warp executes once per row.
    warps = 8 if exchanged else 16
    vector = 16 // itemsize if whole_vectors else 1
    if world_size > 1:
        tiles = 4  # three hide the exchange
    elif whole:
        tiles = 8
    elif 2 * most < wanted <= 4 * most:
        most, tiles = 2 * most, 2  # a row that just fits: nothing to exchange
    else:
        tiles = 2 if wanted <= 2 * most else 4
    while (tiles - 1 if whole else 2 * tiles - 1) * most * column_bytes + RESERVED_BYTES > room:
        most //= 2
    block = min(most, cap, wanted // tiles)
    part = tiles * block
    parts = max(1, -(-columns // part))
    ranks = next_power_of_2(world_size)
    slots = 0 if parts == 1 else next_power_of_2(parts)
    if world_size > 1:
        slots = next_power_of_2(2 * -(-share // part))  # for shards of up to twice the even share
    if ranks * slots > MAX_WORDS or slots > on.processors * per_sm:  # all parts of a row run at once
        return f"its rows are too long with block_cap={block_cap}"
    if world_size > 1 and (widest or columns) > slots * part:
        uneven = (
            f"{widest or columns} columns on {'a' if widest else 'this'} rank of {share} on the average: too uneven"
        )
        if widest:
            return f"its logits have {uneven}"
        raise ValueError(f"logits have {uneven} for exchange='symmetric', use exchange='nccl'")
    walkers = on.processors * per_sm // max(1, -(-share // part))
    # As many rows per tile as possible without idle programs at the end.
    tile_rows = min(
        (1 << power for power in range(4, -1, -1)),
        key=lambda many: (many * block > most or many * ranks * slots > MAX_WORDS, many * -(-rows // (many * walkers))),
    )
    row_warps = min(warps, tile_rows)
    # Tiles reduced before the wait: all but the last, and one less if another program works during the wait.
    ahead = tiles - (2 if loss == "cross_entropy" and halves else 1) if slots else 0
    lanes = 32 * warps // row_warps
    repeats = max(1, block // (lanes * vector))
    tile_columns = -(-columns // (parts * tiles * vector)) * vector
    return Tiling(
        tile_rows, repeats, lanes, vector, row_warps, warps, tiles, per_sm, parts, tile_columns * tiles, slots, whole,
        ahead,
    )  # fmt: skip
