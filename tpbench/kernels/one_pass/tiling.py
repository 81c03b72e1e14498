"""The tiling of the one-pass kernels: the shape of tiles, and how programs share the rows.

A part of a row has whole tiles first. Only its last tile is masked, and it may be smaller than the others. Equal tiles
that are all filled in part cost instructions and registers in every tile: 128256 columns took 0.683 ms on an H200
instead of 0.550 (labels), and 1.176 instead of 0.860 (reverse_kl).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

from triton import next_power_of_2
from triton.runtime import driver

from tpbench.kernels import COMPARING_LOSSES
from tpbench.kernels.block_caps import measured_cap

TILE_BYTES = 32768
"""Bytes of a tile of logits and target logits. A thread holds 32 two-byte numbers."""
RESERVED_BYTES = 1024
"""Shared memory for the compiler's reductions. Each program costs as many bytes again in addition to its own."""
SMALLEST_BLOCK = 1024
"""Smallest block, unless block_cap is smaller. A shard of fewer columns fills a part of its block. So the shards of a
short vocabulary need one block each, even if their widths differ."""
NEARLY = 0.95
"""Share of the columns of its tiles that a shard fills nearly. Labels took 0.318 ms at 64128 columns over two H200s in
programs that share rows, and take 0.309; 0.166 and 0.157 at 32064."""
MAX_WORDS = 256
"""Most words of one kind of number for the rows of a tile: a warp holds them in registers, eight per thread."""
LINE_VECTORS = 8
"""Vectors of 16 bytes in a cache line. Parts begin at whole lines, if rows do."""
Kernel = Literal["one_pass", "whole_row", "shared_rows", "mixture"]
"""`kernels` and `shared_rows` explain them."""


class Shape(NamedTuple):
    """The kernel for rows of a width, and what it needs of a multiprocessor."""

    kernel: Kernel
    block: int
    """Columns of a tile, but for the last one."""
    tile_columns: int
    """Columns of all rows of a tile together, at most."""
    part_columns: int
    """Most columns of a part."""
    warps: int
    programs_per_sm: int


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The shape of tiles, (ROWS, REPEATS, LANES, VECTOR), and how a program works on them: constants of its kernel."""

    KERNEL: Kernel
    ROWS: int
    REPEATS: int
    """Vectors of a row that one thread holds."""
    LAST_REPEATS: int
    """The same of the last tile of a part."""
    LANES: int
    """Threads that share a row of a tile."""
    VECTOR: int
    """Neighbouring columns that one thread copies at once: 16 bytes. 1: rows do not consist of such vectors."""
    ROW_WARPS: int
    """Rows of a tile that warps work on side by side."""
    WARPS: int
    """Warps of a program."""
    TILES: int
    """Tiles of a program's part of a row."""
    SLOTS: int
    """Parts that each rank sends, some of them empty: a power of two, equal on all ranks. 0: nothing to exchange."""
    AHEAD: int
    """Tiles of the next row that `one_pass` reduces before the wait for this row's words."""


@dataclass(frozen=True, kw_only=True)
class Tiling(Tile):
    """The shape of tiles and how programs share them. The width and alignment of a shard may make it differ by rank."""

    programs_per_sm: int
    parts: int
    """Programs that share a row on this rank."""
    part_columns: int

    @property
    def registers(self) -> int:
        """Most registers per thread, a multiple of 8, with which programs_per_sm programs fit."""
        return min(255, 65536 // (32 * self.WARPS * self.programs_per_sm) // 8 * 8)

    @property
    def columns(self) -> int:
        """Columns that a tile has room for, but for the last one."""
        return self.REPEATS * self.LANES * self.VECTOR

    @property
    def room(self) -> int:
        """Columns that a part has room for."""
        return ((self.TILES - 1) * self.REPEATS + self.LAST_REPEATS) * self.LANES * self.VECTOR

    @property
    def block(self) -> int:
        """Columns of the widest tile that are used."""
        return min(self.columns, self.part_columns)


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


def _shape(
    share: int, world_size: int, loss: str, column_bytes: int, cap: int, top_k: bool, options: bool, limits: Machine,
) -> Shape:  # fmt: skip
    has_labels = loss == "cross_entropy"
    padded, full = max(SMALLEST_BLOCK, next_power_of_2(share)), TILE_BYTES // column_bytes

    def bytes_of_tiles(programs_per_sm: int) -> int:
        return (limits.shared_bytes + RESERVED_BYTES) // programs_per_sm - 2 * RESERVED_BYTES

    # Six tiles of a row that fills a multiprocessor stay in shared memory, and two pass through a seventh place to
    # registers. Otherwise two programs would share the row and wait for each other.
    if loss in COMPARING_LOSSES:
        tile_columns = full // 2
        while 2 * 3 * tile_columns * column_bytes > bytes_of_tiles(2):  # two tiles, with three places each
            tile_columns //= 2
        block: int = min(tile_columns, cap, padded // 2)
        return Shape("mixture", block, tile_columns, 2 * block, 4, 2)
    fits = limits.shared_bytes >= 7 * TILE_BYTES + RESERVED_BYTES
    if world_size == 1 and not top_k and fits and 4 * full < padded <= 8 * min(full, cap):
        return Shape("whole_row", padded // 8, padded // 8, padded, 16, 1)
    # Labels need few instructions: memory would wait for the exchange, unless the words have a whole row's time. Two
    # programs have few warps each, whose registers hold the numbers of more columns at once.
    # Shards of 16384 columns and less are faster if a tile has several of their rows. No row of a top k is whole.
    block = min(full // (4 if world_size == 1 else 2), cap)  # a smaller one would need many tiles

    # A shard that nearly fills tiles of one program is as fast as one that does.
    fills = share == padded or (padded <= 4 * full and share >= NEARLY * padded)
    long = share > (4 if top_k else 8) * full if world_size == 1 else share > full and (options or not fills)
    warps = 8 if options and world_size > 1 else 4
    if has_labels and block >= full // 4 and long:
        room = bytes_of_tiles(2) // (block * column_bytes) * block // 2  # each tile has two places
        return Shape("shared_rows", block, block, room, warps, 2)

    # Two programs per multiprocessor: one works while the other waits, if 128 registers per thread are enough. The
    # launch is cooperative, so the driver refuses it if not all programs fit at once.
    if world_size > 1:
        short = padded <= full * (2 if has_labels else 1)
    else:
        short = padded <= min(full, cap) * (2 if top_k else 1)
    # The smallest tile has a vector of 16 bytes per thread. Seven such tiles of 8 warps, twice, must fit, too.
    smallest_tile = 8 * 32 * 16 * (2 - has_labels)
    programs_per_sm = 2 if short and limits.shared_bytes >= 2 * (7 * smallest_tile + RESERVED_BYTES) else 1
    # Instructions limit the speed. Fewer warps repeat fewer of those that each warp executes once per row.
    warps = 8 if world_size > 1 or short or padded > 4 * full else 16
    tiles, block = 4, full
    if world_size > 1:
        block = full // programs_per_sm  # three tiles hide the exchange
    elif short and padded <= full:
        tiles, block = (2, full // 2) if options else (1, full)
    elif padded <= 2 * full:
        tiles = 2
    elif padded <= 4 * full and not options:
        tiles, block = 2, 2 * full  # a row that just fits: nothing to exchange
    # Tiles of half the width leave registers and fill a part better, if seven of them make no more parts.
    kernel: Kernel = "one_pass"
    no_more_parts = fits and -(-share // (7 * full // 2)) == -(-share // (4 * full))
    if not has_labels and tiles == 4 and padded > 2 * full and cap >= full // 2 and no_more_parts:
        tiles, block = 7, full // 2
        if loss == "soft_cross_entropy" and world_size > 1 and share > 4 * full and not options:
            kernel = "shared_rows"
    while (2 * tiles - 1) * block * column_bytes > bytes_of_tiles(programs_per_sm):
        block //= 2
    tile_columns, block = block, min(block, cap, padded // tiles)
    return Shape(kernel, block, tile_columns, tiles * block, warps, programs_per_sm)


@functools.lru_cache(maxsize=256)
def tiling(
    rows: int, columns: int, share: int, world_size: int, itemsize: int, loss: str, block_cap: int | str,
    whole_vectors: bool, limits: Machine, widest: int | None = None, top_k: bool = False, options: bool = False,
) -> Tiling | str:  # fmt: skip
    """Return the tiling for (rows, columns) logits, or the reason why there is none.

    share: columns per rank if the vocabulary is split evenly. This number is equal on all ranks, so that their tilings
    agree in everything that the exchange needs. One rank alone uses its columns, of which some may be padding.
    top_k: the target is a teacher's top k.
    options: a thread lacks registers for the loss's terms beside 64 numbers of a tile.
    widest: the most columns that a rank holds, if the ranks know it. If not, a rank with too many raises ValueError.
    """
    share = columns if world_size == 1 else share
    cap = measured_cap("one_read", loss, share) if block_cap == "auto" else int(block_cap)
    has_labels = loss == "cross_entropy"
    column_bytes = itemsize * (1 if has_labels else 2)  # the logit and, unless the target is a label, the target logit
    shape = _shape(share, world_size, loss, column_bytes, cap, top_k, options, limits)
    part_columns = shape.part_columns
    parts = max(1, -(-columns // part_columns))
    ranks = next_power_of_2(world_size)
    if world_size > 1:
        # For shards of up to 1.5 times the even share. With twice that, jsd at 75968 columns would read 64 words of
        # each kind in place of 32, and take 1.31 ms in place of 0.97.
        slots = next_power_of_2(-(-3 * -(-share // part_columns) // 2))
    else:
        slots = 0 if parts == 1 and loss not in COMPARING_LOSSES else next_power_of_2(parts)
    all_programs = limits.processors * shape.programs_per_sm
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
            many * shape.block > shape.tile_columns or many * ranks * slots > MAX_WORDS,
            many * -(-rows // (many * walkers)),
        ),
    )
    row_warps = min(shape.warps, tile_rows)
    lanes = 32 * shape.warps // row_warps
    vector = 16 // itemsize if whole_vectors else 1
    line = LINE_VECTORS * vector if whole_vectors else 1
    part_columns = max(1, -(-columns // (parts * line))) * line
    parts = max(1, -(-columns // part_columns))
    repeats = max(1, shape.block // (lanes * vector))
    tiles = max(2 if slots else 1, -(-part_columns // (repeats * lanes * vector)))
    last_columns = part_columns - (tiles - 1) * repeats * lanes * vector
    # All but the last, and one less if another program works during the wait.
    ahead = tiles - (2 if has_labels and shape.programs_per_sm > 1 else 1)
    return Tiling(
        KERNEL=shape.kernel,
        ROWS=tile_rows,
        REPEATS=repeats,
        LAST_REPEATS=min(repeats, next_power_of_2(max(1, -(-last_columns // (lanes * vector))))),
        LANES=lanes,
        VECTOR=vector,
        ROW_WARPS=row_warps,
        WARPS=shape.warps,
        TILES=tiles,
        programs_per_sm=shape.programs_per_sm,
        parts=parts,
        part_columns=part_columns,
        SLOTS=slots,
        AHEAD=ahead if slots else 0,
    )
