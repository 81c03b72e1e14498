"""The tiling of the one-pass kernels: the shape of tiles, and how programs share the rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from triton import next_power_of_2
from triton.runtime import driver

from tpbench.kernels.block_caps import measured_cap

TILE_BYTES = 32768
"""Bytes of a tile of logits and target logits. A thread holds 32 two-byte numbers."""
RESERVED_BYTES = 1024
"""Shared memory for the compiler's reductions. Each program costs as many bytes again in addition to its own."""
SMALLEST_BLOCK = 1024
"""Smallest block, unless block_cap is smaller. A shard of fewer columns fills a part of its block. So the shards of a
short vocabulary need one block each, even if their widths differ."""
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
    properties = driver.active.utils.get_device_properties(device)
    return Machine(properties["multiprocessor_count"], properties["max_shared_mem"])


def _filled(columns: int, part_columns: int) -> float:
    """Return the share of the columns of all parts that a row fills."""
    return columns / (-(-columns // part_columns) * part_columns)


@functools.lru_cache(maxsize=256)
def tiling(
    rows: int, columns: int, share: int, world_size: int, itemsize: int, loss: str, block_cap: int | str,
    whole_vectors: bool, limits: Machine, widest: int | None = None, top_k: bool = False,
) -> Tiling | str:  # fmt: skip
    """Return the tiling for (rows, columns) logits, or the reason why there is none.

    share: columns per rank if the vocabulary is split evenly. This number is equal on all ranks, so that their tilings
    agree in everything that the exchange needs. One rank alone uses its columns, of which some may be padding.
    top_k: the target is a teacher's top k, for whose numbers the kernel of whole rows has no registers.
    widest: the most columns that a rank holds, if the ranks know it. If not, a rank with too many raises ValueError.
    """
    share = columns if world_size == 1 else share
    cap = measured_cap("one_read", loss, share) if block_cap == "auto" else int(block_cap)
    has_labels = loss == "cross_entropy"
    column_bytes = itemsize * (1 if has_labels else 2)  # the logit and, unless the target is a label, the target logit
    padded, full = max(SMALLEST_BLOCK, next_power_of_2(share)), TILE_BYTES // column_bytes

    # Six tiles of a row that fills a multiprocessor stay in shared memory, and two pass through a seventh place to
    # registers. Otherwise two programs would share the row and wait for each other.
    fits = limits.shared_bytes >= 7 * TILE_BYTES + RESERVED_BYTES
    whole = world_size == 1 and not top_k and fits and 4 * full < padded <= 8 * min(full, cap)
    # Two programs per multiprocessor: one works while the other waits, if 128 registers per thread are enough. The
    # launch is cooperative, so the driver refuses it if not all programs fit at once.
    if world_size > 1:
        short = padded <= full * (2 if has_labels else 1)
    else:
        short = padded <= min(full, cap) * (2 if top_k else 1)
    # The smallest tile has a vector of 16 bytes per thread. Seven such tiles of 8 warps, twice, must fit, too.
    smallest_tile = 8 * 32 * 16 * (column_bytes // itemsize)
    programs_per_sm = 2 if short and limits.shared_bytes >= 2 * (7 * smallest_tile + RESERVED_BYTES) else 1
    # Instructions limit the speed. Fewer warps repeat fewer of those that each warp executes once per row.
    warps = 8 if world_size > 1 or short or (padded > 4 * full and not whole) else 16

    tile_columns = full
    if world_size > 1:
        tiles, tile_columns = 4, full // programs_per_sm  # three hide the exchange
    elif whole:
        tiles = 8
    elif short and padded <= full:
        tiles = 1
    elif padded <= 4 * tile_columns:
        tiles = 2
        if padded > 2 * tile_columns:
            tile_columns *= 2  # a row that just fits: nothing to exchange
    else:
        tiles = 4
    places = tiles - 1 if whole else 2 * tiles - 1
    tiles_bytes = (limits.shared_bytes + RESERVED_BYTES) // programs_per_sm - 2 * RESERVED_BYTES
    while places * tile_columns * column_bytes > tiles_bytes:
        tile_columns //= 2
    block = min(tile_columns, cap, padded // tiles)
    # Five narrower tiles, if they are better filled: 75968 columns of a rank are 58% of 8 tiles and 93% of 10.
    half = tile_columns // 2
    fits = 9 * half * column_bytes <= tiles_bytes
    better = _filled(share, 5 * half) > 1.15 * _filled(share, tiles * block)
    if has_labels and world_size > 1 and block == tile_columns and fits and better:
        tiles, tile_columns, block = 5, half, half
        warps = 16 if programs_per_sm == 1 and share <= 5 * half else 8
    part_columns = tiles * block
    parts = max(1, -(-columns // part_columns))

    ranks = next_power_of_2(world_size)
    if world_size > 1:
        slots = next_power_of_2(2 * -(-share // part_columns))  # for shards of up to twice the even share
    else:
        slots = 0 if parts == 1 else next_power_of_2(parts)
    all_programs = limits.processors * programs_per_sm
    if ranks * slots > MAX_WORDS or slots > all_programs:  # all parts of a row run at once
        return f"its rows are too long with block_cap={block_cap}"
    if world_size > 1 and (widest or columns) > slots * part_columns:
        uneven = f"logits have {widest or columns} columns on a rank of {share} on the average: too uneven"
        if widest:
            return f"its {uneven}"
        raise ValueError(f"{uneven} for exchange='symmetric', use exchange='nccl'")
    walkers = all_programs // max(1, -(-share // part_columns))
    # As many rows per tile as possible without idle programs at the end.
    tile_rows = min(
        (1 << power for power in range(4, -1, -1)),
        key=lambda many: (
            many * block > tile_columns or many * ranks * slots > MAX_WORDS,
            many * -(-rows // (many * walkers)),
        ),
    )
    row_warps = min(warps, tile_rows)
    lanes = 32 * warps // row_warps
    vector = 16 // itemsize if whole_vectors else 1
    # Tiles reduced before the wait: all but the last, and one less if another program works during the wait.
    waits_alone = not has_labels or programs_per_sm == 1
    return Tiling(
        rows=tile_rows,
        repeats=max(1, block // (lanes * vector)),
        lanes=lanes,
        vector=vector,
        row_warps=row_warps,
        warps=warps,
        tiles=tiles,
        programs_per_sm=programs_per_sm,
        parts=parts,
        part_columns=-(-columns // (parts * tiles * vector)) * vector * tiles,
        slots=slots,
        whole=whole,
        ahead=tiles - (1 if waits_alone else 2) if slots else 0,
    )
