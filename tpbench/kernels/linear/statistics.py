"""Losses of labels without a gradient: statistics of some rows at a time, and one exchange for all rows.

The statistics of a row are those of `two_pass.state`. Exponents and entropies are in bits until a row is complete,
because exp2 is the GPU's own instruction: exp would cost another multiplication.

Where the GPU allows it, the head's product stores them, and no logits. A program of the product holds a tile of logits
in registers and stores three or four numbers per row of it. A second kernel merges the tiles of a row. The product is
persistent: as many programs as multiprocessors compute one tile after the other, and load the next tile while they work
on the statistics of the last one. Masks are selections and no branches. After a branch that reads the accumulator,
ptxas would let matrix instructions run one after the other (its warning C7514), a third slower.

Elsewhere a kernel reads logits. Each thread keeps a running state of its own columns, and threads merge once per row. A
general tile reduces over its threads several times.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton decides the types of a kernel's arguments.

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tpbench.kernels.cached_launch import cached_launch
from tpbench.kernels.collectives import gather_by_rank
from tpbench.kernels.entropy.launch_rows import How
from tpbench.kernels.linear.chunks import compute_logits
from tpbench.kernels.row_loss import RowLoss
from tpbench.kernels.two_pass.kernels import bytes_exchanged, launching, losses_of_statistics, statistics_width
from tpbench.kernels.two_pass.state import INTERPRETED, capped, reference, round_to, weigh

_VECTOR = 8
_REPEATS = 4
_WARPS = 4
_LANES = 32 * _WARPS
NATS = tl.constexpr(math.log(2.0))
"""Nats in a bit."""
_LEAST = tl.constexpr(-1e30)
"""The least exponent. Its power of two is 0, and 0 times it is 0, while 0 times -inf would be NaN."""
_ROWS, _COLUMNS, _WIDTH = 128, 256, 64
"""Rows, columns and summed elements of a tile. Other shapes were slower on H200."""
_GROUP = 16
"""Tiles of rows that neighbouring programs share, so that they find the same weights in the L2 cache."""
_MERGED_TILES, _MERGED_ROWS = 32, 32
_ALIGNMENT = 16
"""Bytes: of addresses and row strides of what the tensor memory accelerator loads."""
_INTERPRETED = tl.constexpr(INTERPRETED)
_HOPPER = 9
"""The compute capability for which tiles and speed were measured."""


class RowStatistics:
    """The statistics of all rows of a problem with labels, without label smoothing and without a gradient."""

    def __init__(self, loss: RowLoss, rows: int, device: torch.device, entropy: bool) -> None:
        self.loss, self.entropy = loss, entropy
        self.values = torch.empty(
            (statistics_width(loss.loss, 0.0, entropy), rows), dtype=torch.float32, device=device
        )  # fmt: skip

    def finish(self, labels: Tensor, row_loss: Tensor, row_entropy: Tensor | None) -> int:
        """Exchange the statistics and store losses and entropies of all rows. Returns the bytes that this rank sent."""
        world_size = self.loss.vocabulary.world_size
        gathered = gather_by_rank(self.values, self.loss.group, world_size)
        with launching(row_loss.device):
            losses_of_statistics(self.loss, gathered, labels, row_loss, row_entropy)
        return bytes_exchanged(len(labels), world_size, self.loss.loss, 0.0, self.entropy)


class LabelStatistics(RowStatistics):
    """The statistics of all rows, from the logits of some rows at a time."""

    def __init__(self, loss: RowLoss, rows: int, weight: Tensor, bias: Tensor | None, entropy: bool, most: int) -> None:
        """`most`: rows of a chunk."""
        super().__init__(loss, rows, weight.device, entropy)
        self.weight, self.bias = weight, bias
        self.memory = weight.new_empty((most, len(weight)))

    def store(self, hidden: Tensor, labels: Tensor, first: int) -> How:
        """Queue the product of some rows and the kernel for their logits. Statistics are stored from row `first` on."""
        vocabulary, rows = self.loss.vocabulary, len(hidden)
        logits = self.memory[:rows]
        compute_logits(hidden, self.weight, self.bias, logits)
        kernel = cached_launch(
            label_statistics_kernel, ENTROPY=int(self.entropy), SOFTCAP=float(self.loss.softcap), VECTOR=_VECTOR,
            LANES=_LANES, REPEATS=_REPEATS, num_warps=_WARPS,
        )  # fmt: skip
        with launching(logits.device):
            compiled = kernel(
                rows, (logits, labels, self.values),
                (self.values.shape[1], first, logits.stride(0), vocabulary.valid, vocabulary.start, vocabulary.size,
                 self.loss.ignore_index), (self.loss.logits_scale, self.loss.logits_scale / math.log(2.0)),
            )  # fmt: skip
        return How("two_kernels", _VECTOR * _LANES * _REPEATS, 0, (compiled,))


@triton.jit
def label_statistics_kernel(
    logits, target, statistics, n_rows, first_row, logits_row, n_valid, vocab_start, vocab_size, ignore_index,
    logits_scale, scale_bits, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, VECTOR: tl.constexpr, LANES: tl.constexpr,
    REPEATS: tl.constexpr,
):  # fmt: skip
    """Store the state of the `n_valid` columns of one row in `statistics`, (3 or 4, n_rows) fp32, at first_row + row.

    A tile is (REPEATS, LANES, VECTOR): a thread has REPEATS vectors of neighbouring columns.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(target + row).to(tl.int64)
    counts = (label != ignore_index) & (label >= 0) & (label < vocab_size)
    stop = tl.where(counts, n_valid, 0)  # rows that do not count are not read
    lane = tl.arange(0, LANES)
    repeat = tl.arange(0, REPEATS)[:, None, None]
    of_tile = repeat * (LANES * VECTOR) + lane[None, :, None] * VECTOR + tl.arange(0, VECTOR)[None, None, :]
    m = tl.full([LANES], float("-inf"), tl.float32)
    s = tl.zeros([LANES], tl.float32)
    h = tl.zeros([LANES], tl.float32)
    begin = logits + row * logits_row
    for start in range(0, stop, REPEATS * LANES * VECTOR):
        column = start + of_tile
        inside = column < n_valid
        x = capped(tl.load(begin + column, mask=inside, other=float("-inf")).to(tl.float32), SOFTCAP)
        if SOFTCAP > 0:
            x = tl.where(inside, x, float("-inf"))
        largest = tl.maximum(m, tl.max(tl.max(x, axis=2), axis=0))
        r = reference(largest)
        bits = (x - r[None, :, None]) * scale_bits
        power = tl.exp2(bits)
        factor = tl.exp2((m - r) * scale_bits)
        if ENTROPY:
            h = weigh(factor, h + s * ((reference(m) - r) * scale_bits))
            bits = tl.maximum(bits, _LEAST, propagate_nan=tl.PropagateNan.ALL)
            h += tl.sum(tl.sum(power * bits, axis=2), axis=0)
        s = s * factor + tl.sum(tl.sum(power, axis=2), axis=0)
        m = largest
    of_row = tl.max(m, axis=0)
    factor = tl.exp2((m - reference(of_row)) * scale_bits)
    local = label - vocab_start
    held = counts & (local >= 0) & (local < n_valid)
    x_label = capped(tl.load(begin + local, mask=held, other=0.0).to(tl.float32), SOFTCAP) * logits_scale
    place = statistics + first_row + row
    tl.store(place, of_row * logits_scale)
    tl.store(place + n_rows, tl.sum(s * factor, axis=0))
    tl.store(place + 2 * n_rows, tl.where(held, x_label, 0.0))
    if ENTROPY:
        shift = (reference(m) - reference(of_row)) * scale_bits
        tl.store(place + 3 * n_rows, tl.sum(weigh(factor, h + s * shift), axis=0) * NATS)


def is_supported(hidden: Tensor) -> bool:
    """Return whether the product of these hidden states can store statistics. Equal on all ranks of like GPUs."""
    if hidden.dtype == torch.float32 or hidden.shape[1] * hidden.itemsize % _ALIGNMENT:
        return False
    return INTERPRETED or torch.cuda.get_device_capability(hidden.device)[0] == _HOPPER


def bytes_of_tiles(columns: int, entropy: bool) -> int:
    """Return the workspace of one row: the statistics of its tiles."""
    return -(-columns // _COLUMNS) * _tile_numbers(entropy) * 4


def _tile_numbers(entropy: bool) -> int:
    return 2 + entropy


class ProductStatistics(RowStatistics):
    """The statistics of all rows, from the product of hidden states and the head's weight."""

    def __init__(self, loss: RowLoss, rows: int, weight: Tensor, bias: Tensor | None, entropy: bool, most: int) -> None:
        """`most`: rows of a chunk."""
        super().__init__(loss, rows, weight.device, entropy)
        self.values[2] = 0.0  # each tile stores the logits of the labels that it holds
        self.weight, self.bias = _aligned(weight), bias
        tiles = -(-loss.vocabulary.valid // _COLUMNS)
        self.memory = torch.empty((_tile_numbers(entropy), tiles, most), dtype=torch.float32, device=weight.device)

    def store(self, hidden: Tensor, labels: Tensor, first: int) -> How:
        """Queue the product of some rows, whose statistics are stored from row `first` on."""
        vocabulary, rows = self.loss.vocabulary, len(hidden)
        tiles = self.memory.shape[1]
        if tiles == 0:
            self.values[:2, first : first + rows] = torch.tensor([[float("-inf")], [0.0]], device=hidden.device)
            return How("two_kernels", _COLUMNS, 0, ())
        hidden = _aligned(hidden)
        scale_bits = self.loss.logits_scale / math.log(2.0)
        programs = min(_processors(hidden.device), -(-rows // _ROWS) * tiles)
        product = cached_launch(
            product_statistics_kernel, ENTROPY=self.entropy, SOFTCAP=float(self.loss.softcap), PROGRAMS=programs,
            ROWS=_ROWS, COLUMNS=_COLUMNS, WIDTH=_WIDTH, GROUP=_GROUP, num_warps=8, num_stages=3,
        )  # fmt: skip
        merge = cached_launch(merge_tiles_kernel, ENTROPY=self.entropy, TILES=_MERGED_TILES, ROWS=_MERGED_ROWS)
        strides = (*self.memory.stride()[:2], self.values.shape[1])
        factors = (self.loss.logits_scale, scale_bits)
        with launching(hidden.device):
            compiled = product(
                programs,
                (TensorDescriptor.from_tensor(hidden, [_ROWS, _WIDTH]),
                 TensorDescriptor.from_tensor(self.weight, [_COLUMNS, _WIDTH]),
                 self.bias, labels, self.memory, self.values),
                (*strides, rows, hidden.shape[1], first, vocabulary.valid, vocabulary.start), factors,
            )  # fmt: skip
            merge(-(-rows // _MERGED_ROWS), (self.memory, self.values), (*strides, rows, tiles, first), factors)
        return How("two_kernels", _COLUMNS, 0, (compiled,))


def _aligned(matrix: Tensor) -> Tensor:
    """Return the matrix in a form that the tensor memory accelerator can load: it, or a contiguous copy."""
    fits = matrix.stride(1) == 1 and matrix.stride(0) * matrix.itemsize % _ALIGNMENT == 0
    return (
        matrix if fits and matrix.data_ptr() % _ALIGNMENT == 0 else matrix.clone(memory_format=torch.contiguous_format)
    )


def _processors(device: torch.device) -> int:
    return 1 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _multiply_add(left, right, sum):
    """left @ right + sum, in fp32. The interpreter's product would take the bits of bf16 numbers for integers."""
    if _INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, sum)


@triton.jit
def product_statistics_kernel(
    hidden, weight, bias, labels, tile_statistics, statistics, number_stride, tile_stride, all_rows, n_rows, width,
    first_row, n_valid, vocab_start, logits_scale, scale_bits, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr,
    PROGRAMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute hidden @ weight.T + bias, and store the statistics of each row of each tile.

    Args:
        hidden: Descriptor of (n_rows, width).
        weight: Descriptor of (at least n_valid, width).
        bias: (n_valid,), or None.
        labels: (n_rows,), global columns.
        tile_statistics: (numbers, tiles, rows) fp32. The numbers are the maximum, the sum of powers and, with ENTROPY,
            the sum of power * exponent in bits.
        statistics: (numbers, all_rows) fp32. Its third number, the label's logit, is stored from row first_row on.
    """
    row_tiles = tl.cdiv(n_rows, ROWS)
    column_tiles = tl.cdiv(n_valid, COLUMNS)
    steps = tl.cdiv(width, WIDTH)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        first_of_group = tile // (GROUP * column_tiles) * GROUP
        group = min(row_tiles - first_of_group, GROUP)
        row_tile = first_of_group + tile % (GROUP * column_tiles) % group
        column_tile = tile % (GROUP * column_tiles) // group
        x = tl.zeros([ROWS, COLUMNS], tl.float32)
        for step in range(steps):
            left = hidden.load([row_tile * ROWS, step * WIDTH])
            right = weight.load([column_tile * COLUMNS, step * WIDTH])
            x = _multiply_add(left, right.T, x)
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        if bias is not None:
            x += tl.load(bias + column, mask=column < n_valid, other=0.0).to(tl.float32)[None, :]
        x = capped(round_to(x, hidden.dtype).to(tl.float32), SOFTCAP)
        x = tl.where(column[None, :] < n_valid, x, float("-inf"))
        m = tl.max(x, axis=1)
        bits = (x - reference(m)[:, None]) * scale_bits
        power = tl.exp2(bits)

        row = row_tile * ROWS + tl.arange(0, ROWS)
        exists = row < n_rows
        place = tile_statistics + column_tile.to(tl.int64) * tile_stride + row
        tl.store(place, m, mask=exists)
        tl.store(place + number_stride, tl.sum(power, axis=1), mask=exists)
        if ENTROPY:
            place += number_stride  # twice the stride of a large workspace does not fit into 32 bits
            tl.store(place + number_stride, tl.sum(weigh(power, bits), axis=1), mask=exists)
        local = tl.load(labels + row, mask=exists, other=-1).to(tl.int64) - vocab_start
        held = (local >= column_tile * COLUMNS) & (local < min(n_valid, (column_tile + 1) * COLUMNS))
        local = tl.where(held, local, -1).to(tl.int32)
        x_label = tl.sum(tl.where(column[None, :] == local[:, None], x, 0.0), axis=1)
        tl.store(statistics + 2 * all_rows + first_row + row, x_label * logits_scale, mask=exists & held)


@triton.jit
def merge_tiles_kernel(
    tile_statistics, statistics, number_stride, tile_stride, all_rows, n_rows, n_tiles, first_row, logits_scale,
    scale_bits, ENTROPY: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the statistics of the tiles of each row, (numbers, n_tiles, rows), into `statistics` at first_row + row."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < n_rows
    m = tl.full([ROWS], float("-inf"), tl.float32)
    s = tl.zeros([ROWS], tl.float32)
    h = tl.zeros([ROWS], tl.float32)
    for start in range(0, n_tiles, TILES):
        tile = start + tl.arange(0, TILES)
        mask = (tile < n_tiles)[:, None] & exists[None, :]
        place = tile_statistics + tile.to(tl.int64)[:, None] * tile_stride + row[None, :]
        m_2 = tl.load(place, mask=mask, other=float("-inf"))
        s_2 = tl.load(place + number_stride, mask=mask, other=0.0)
        largest = tl.maximum(m, tl.max(m_2, axis=0))
        r = reference(largest)
        factor = tl.exp2((m - r) * scale_bits)
        factor_2 = tl.exp2((m_2 - r[None, :]) * scale_bits)
        if ENTROPY:
            h_2 = tl.load(place + number_stride + number_stride, mask=mask, other=0.0)
            shift_2 = (reference(m_2) - r[None, :]) * scale_bits
            h = weigh(factor, h + s * ((reference(m) - r) * scale_bits))
            h += tl.sum(weigh(factor_2, h_2 + s_2 * shift_2), axis=0)
        s = s * factor + tl.sum(s_2 * factor_2, axis=0)
        m = largest
    place = statistics + first_row + row
    tl.store(place, m * logits_scale, mask=exists)
    tl.store(place + all_rows, s, mask=exists)
    if ENTROPY:
        tl.store(place + 3 * all_rows, h * NATS, mask=exists)
