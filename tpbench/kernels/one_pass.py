"""When and how `entropy_loss` runs as one kernel that reads each logit once: `_one_pass_kernel`."""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tpbench.kernels.block_caps import measured_cap
from tpbench.kernels.launches import Launch, launch_of

TILE_BYTES = 32768
"""Logits and target logits: 32 numbers a thread in registers if they are of two bytes."""
RESERVED_BYTES = 1024
"""Of shared memory, for the compiler's reductions; and as much again each program costs besides its own."""
SMALLEST_BLOCK = 1024
"""But for a block_cap below: short rows fill it only in part, and need not be split where they are uneven."""
MAX_WORDS = 256
"""Of one kind of number, for the rows of a tile: a warp holds them in registers, eight a thread."""
LOG2_E = math.log2(math.e)

WAIT_LIMIT_S = 120.0
"""How long a kernel waits for a peer's statistics, which may be late as its host compiles or loads, before it gives up:
the loss is then NaN and the next call raises, as does every later one: the ranks' launches no longer correspond."""


@dataclass(frozen=True)
class Tiling:
    """The shape of tiles and how programs share them. A shard's width and alignment may make it differ on ranks."""

    rows: int
    repeats: int
    lanes: int
    vector: int
    row_warps: int
    warps: int
    tiles: int
    """Tiles of a part of a row: the last (of whole rows two) is kept in registers, the others in shared memory."""
    programs_per_sm: int
    parts: int
    """Programs that share a row on this rank."""
    part_columns: int
    slots: int
    """Parts that each rank sends, some of them empty: a power of two, equal on all ranks. 0: nothing to exchange."""
    whole: bool = False
    """The row fills the multiprocessor: two of its tiles are kept in registers, and the others have one place each in
    shared memory, where else the next row has its own beside it."""
    ahead: int = 0
    """Of a row's tiles but the last, those reduced while the words of the row before travel, at most tiles - 1."""

    @property
    def registers(self) -> int:
        """The most that a thread may take for programs_per_sm to fit."""
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
    """What a tiling must fit into."""

    processors: int
    shared_bytes: int


@functools.cache
def machine(device: int) -> Machine:
    """Of a CUDA device."""
    properties = triton.runtime.driver.active.utils.get_device_properties(device)
    return Machine(properties["multiprocessor_count"], properties["max_shared_mem"])


def _next_power_of_2(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


@functools.lru_cache(maxsize=256)
def tiling(
    rows: int, columns: int, share: int, world_size: int, itemsize: int, loss: str, block_cap: int | str,
    whole_vectors: bool, on: Machine, widest: int | None = None,
) -> Tiling | str:  # fmt: skip
    """The tiling for (rows, columns) logits, or why there is none.

    share: columns that a rank holds if the vocabulary is split evenly: what is equal on all ranks, so that they agree
    on everything that they must agree on. One rank alone goes by its columns, of which some may be padding.
    widest: the most columns that a rank holds, where ranks know. Where not, a rank with too many raises ValueError.
    """
    share = columns if world_size == 1 else share
    column_bytes = itemsize * (1 if loss == "cross_entropy" else 2)
    wanted = max(SMALLEST_BLOCK, _next_power_of_2(share))
    most = TILE_BYTES // column_bytes
    cap = measured_cap("one_read", loss, share) if block_cap == "auto" else int(block_cap)
    # A row that fills a multiprocessor: six tiles of it stay in shared memory, and two pass through a seventh place to
    # registers. Else it would be two programs', which wait for each other.
    fits = on.shared_bytes >= 7 * TILE_BYTES + RESERVED_BYTES
    whole = world_size == 1 and fits and 4 * most < wanted <= 8 * min(most, cap)
    exchanged = world_size > 1 or (wanted > 4 * most and not whole)
    # One program's wait is the other's work, where its 128 registers a thread do for what it holds. The launch is a
    # cooperative one, refused where not all programs fit at once.
    halves = world_size > 1 and wanted <= most * (2 if loss == "cross_entropy" else 1)
    # The smallest tile is a vector of 16 bytes a thread: seven of 8 warps, twice, are too much for small memories.
    halves = halves and on.shared_bytes >= 2 * (7 * 8 * 32 * 16 * (column_bytes // itemsize) + RESERVED_BYTES)
    per_sm = 2 if halves else 1
    most, room = most // per_sm, (on.shared_bytes + RESERVED_BYTES) // per_sm - RESERVED_BYTES
    # Instructions are what is short: what a warp does once a row, above all with words, is done by fewer of them.
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
    ranks = _next_power_of_2(world_size)
    slots = 0 if parts == 1 else _next_power_of_2(parts)
    if world_size > 1:
        slots = _next_power_of_2(2 * -(-share // part))  # for shards of up to twice the even share
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
    # The most rows a tile that cost no idle programs at the end.
    tile_rows = min(
        (1 << power for power in range(4, -1, -1)),
        key=lambda many: (many * block > most or many * ranks * slots > MAX_WORDS, many * -(-rows // (many * walkers))),
    )
    row_warps = min(warps, tile_rows)
    # Reduced before the wait: all but the last, and one less where the other program fills it.
    ahead = tiles - (2 if loss == "cross_entropy" and halves else 1) if slots else 0
    lanes = 32 * warps // row_warps
    repeats = max(1, block // (lanes * vector))
    tile_columns = -(-columns // (parts * tiles * vector)) * vector
    return Tiling(
        tile_rows, repeats, lanes, vector, row_warps, warps, tiles, per_sm, parts, tile_columns * tiles, slots, whole,
        ahead,
    )  # fmt: skip


class Workspace:
    """What programs of one launch tell each other through memory, and launches the next."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.control = torch.zeros(2, dtype=torch.int32, device=device)
        """Epoch, and how many programs are done."""
        self.failed = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        """Set by a kernel that gave up waiting: in the host's memory, to be read without synchronisation."""
        self.words = torch.empty(0, dtype=torch.int64, device=device)
        self.peers = self.words
        """(world size,) int64: addresses of all ranks' words; unused on one rank."""
        self.half = 0
        """Words of one parity."""

    def enter(self) -> None:
        """Before each launch: RuntimeError if an earlier one gave up waiting."""
        if self.failed.item():
            raise RuntimeError(
                f"an earlier entropy_loss waited {WAIT_LIMIT_S:.0f} s in vain for the statistics of another rank, "
                "which died, did not call it, or was kept from it by another stream's collective (then say "
                "exchange='nccl'): its loss is NaN, and this group can exchange no more"
            )

    def reserve(self, words: int) -> None:
        """Room for so many words of one parity. New memory is filled with zeros, which is no launch's epoch."""
        if words > self.half:
            half = _next_power_of_2(words)
            self._allocate(half)
            self.half = half

    def _allocate(self, half: int) -> None:
        self.words = torch.zeros(2 * half, dtype=torch.int64, device=self.device)
        self.peers = self.words


@functools.cache
def _local_workspace(device: torch.device, stream: int) -> Workspace:
    return Workspace(device)


def local_workspace(device: torch.device) -> Workspace:
    """For a vocabulary that is all here: one a stream, as launches of different streams may overlap.

    One more is for all captured graphs, made before the first is captured: memory made in a capture is the graph's. So
    two graphs that hold this kernel must not be replayed at the same time, as with the libraries' own workspaces.
    """
    captured = _local_workspace(device, -1)
    if torch.cuda.is_current_stream_capturing():
        return captured
    return _local_workspace(device, stream_of(device))


def stream_of(device: torch.device) -> int:
    """The handle of its current stream, as Triton asks for it: a torch.cuda.Stream takes ten times as long to get."""
    return int(triton.runtime.driver.active.get_current_stream(device.index))


class Form(NamedTuple):
    """What a tensor has in common with others that are launched alike: all but its values and its memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    misaligned: int
    """Bytes past a multiple of 16."""


def form(tensor: Tensor) -> Form:
    """A tensor's."""
    return Form(tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16)


@dataclass(frozen=True)
class Prepared:
    """A call of one form and its options, but for its memory and its scales."""

    tiling: Tiling
    kernel: Launch
    programs: int
    integers: tuple[int, ...]
    """The kernel's, but for the workspace's."""
    rank: int
    row_words: int
    """Words of a row in a workspace, at least 1."""
    words: int
    """That a workspace must have room for. 0: nothing is exchanged."""
    bytes_sent: int
    """By this rank to its peers: a word of 8 bytes for each number and each part of a row."""


@functools.lru_cache(maxsize=256)
def prepare(
    logits: Form, target: Form, out: Form | None, device: int, *, loss: str, valid: int, vocab_start: int,
    vocab_size: int, ignore_index: int, reduce: bool, count: bool, z_loss: bool, label_smoothing: bool,
    accumulate: bool, block_cap: int | str, share: int, widest: int | None, rank: int, world_size: int,
) -> Prepared | str:  # fmt: skip
    """How the kernel does what is asked, or why it cannot: over several ranks by what is equal on all of them.

    Pure, and remembered: what is left to a call is to hand over its memory.
    """
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or later"
    if label_smoothing or accumulate:
        return "it has no label_smoothing and accumulates into no tensor"
    if loss != "cross_entropy" and target.dtype != logits.dtype:
        return f"it needs targets of the logits' dtype, got {target.dtype} and {logits.dtype}"
    vectors = aligned(logits, target if loss != "cross_entropy" else None, out)
    if world_size == 1 and not vectors:
        return "its rows must be contiguous and made of whole 16-byte vectors"
    on = machine(device)
    rows, columns = logits.shape
    plan = tiling(rows, columns, share, world_size, logits.dtype.itemsize, loss, block_cap, vectors, on, widest)
    if isinstance(plan, str):
        return plan
    unit = plan.vector
    width = 3 if loss == "cross_entropy" else 5  # numbers of a row's state
    slots = _next_power_of_2(world_size) * plan.slots
    walkers = min(max(1, on.processors * plan.programs_per_sm // plan.parts), -(-rows // plan.rows))
    full = columns == plan.parts * plan.tiles * plan.columns
    both = target.strides if loss != "cross_entropy" else (0, 0)
    to = logits.strides if out is None else out.strides
    kernel = launch_of(
        importlib.import_module("tpbench.kernels._one_pass_kernel").one_pass_kernel,
        LOSS=loss, GRAD=out is not None, REDUCE=reduce, COUNT=count, ROWS=plan.rows, REPEATS=plan.repeats,
        LANES=plan.lanes, VECTOR=plan.vector, ROW_WARPS=plan.row_warps, TILES=plan.tiles, WORLD=world_size,
        SLOTS=plan.slots, Z_LOSS=z_loss, FULL=full, MASKED=not full or valid < columns,
        ALIGNED=plan.vector > 1, AHEAD=plan.ahead, WHOLE=plan.whole, num_warps=plan.warps, enable_fp_fusion=False,
        launch_cooperative_grid=plan.slots > 0,
        **({"maxnreg": plan.registers} if plan.programs_per_sm > 1 else {}),
    )  # fmt: skip
    return Prepared(
        tiling=plan,
        kernel=kernel,
        programs=walkers * plan.parts,
        integers=(
            rows, columns, plan.parts, plan.part_columns // unit, valid, vocab_start, vocab_size, ignore_index,
            logits.strides[0] // unit, logits.strides[1], both[0] // unit, both[1], to[0] // unit, to[1],
        ),
        rank=rank,
        row_words=width * max(1, slots),
        words=width * rows * slots,
        bytes_sent=(world_size - 1) * rows * width * plan.slots * 8,
    )  # fmt: skip


def aligned(*tensors: Form | None) -> bool:
    """Whether all rows are contiguous and made of whole vectors of 16 bytes at multiples of 16 bytes."""
    return all(
        each is None
        or (
            each.strides[1] == 1
            and each.shape[1] * each.dtype.itemsize % 16 == 0
            and each.strides[0] * each.dtype.itemsize % 16 == 0
            and each.misaligned == 0
        )
        for each in tensors
    )


def launch(
    prepared: Prepared, logits: Tensor, target: Tensor, grad: Tensor | None, row_loss: Tensor, total: Tensor | None,
    workspace: Workspace, *, logits_scale: float, temperature: float, z_loss: float, grad_scale: float,
    loss_scale: float,
) -> Any:  # fmt: skip
    """Queue the kernel on the current stream: row_loss, grad and total, each where it is not None. Returns it."""
    workspace.reserve(prepared.words)
    k = logits_scale * LOG2_E
    return prepared.kernel(
        prepared.programs,
        (
            logits, target, logits if grad is None else grad, row_loss, row_loss if total is None else total,
            workspace.words, workspace.peers, workspace.control, workspace.failed,
        ),
        prepared.integers,
        (k, k / temperature, z_loss, grad_scale * logits_scale, loss_scale),
        (prepared.rank, workspace.half // prepared.row_words, workspace.half, int(WAIT_LIMIT_S * 1e9)),
    )  # fmt: skip
