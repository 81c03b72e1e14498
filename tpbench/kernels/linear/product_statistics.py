"""Losses of labels without a gradient, from the head's product itself: no logit is stored.

A program of the product holds a tile of logits in registers. It stores their statistics, three or four numbers per row,
in place of the logits. A second kernel merges the tiles of a row. The statistics are those of `label_statistics`.

The product is persistent: as many programs as multiprocessors compute one tile after the other, and load the next tile
while they work on the statistics of the last one. Masks are selections and no branches. After a branch that reads the
accumulator, ptxas would let matrix instructions run one after the other (its warning C7514), a third slower.
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
from tpbench.kernels.entropy.launch_rows import How
from tpbench.kernels.linear.label_statistics import NATS, RowStatistics
from tpbench.kernels.row_loss import RowLoss
from tpbench.kernels.two_pass.launch import INTERPRETED, launching
from tpbench.kernels.two_pass.state import capped, reference_of, round_to, weigh

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


def is_supported(hidden: Tensor) -> bool:
    """Return whether the product of these hidden states can store statistics. Equal on all ranks of like GPUs."""
    if hidden.dtype == torch.float32 or hidden.shape[1] * hidden.itemsize % _ALIGNMENT:
        return False
    return INTERPRETED or torch.cuda.get_device_capability(hidden.device)[0] == _HOPPER


def bytes_of_row(columns: int, entropy: bool) -> int:
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
        bits = (x - reference_of(m)[:, None]) * scale_bits
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
        own = tl.sum(tl.where(column[None, :] == local[:, None], x, 0.0), axis=1)
        tl.store(statistics + 2 * all_rows + first_row + row, own * logits_scale, mask=exists & held)


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
    e = tl.zeros([ROWS], tl.float32)
    for start in range(0, n_tiles, TILES):
        tile = start + tl.arange(0, TILES)
        mask = (tile < n_tiles)[:, None] & exists[None, :]
        place = tile_statistics + tile.to(tl.int64)[:, None] * tile_stride + row[None, :]
        m_2 = tl.load(place, mask=mask, other=float("-inf"))
        s_2 = tl.load(place + number_stride, mask=mask, other=0.0)
        largest = tl.maximum(m, tl.max(m_2, axis=0))
        reference = reference_of(largest)
        factor = tl.exp2((m - reference) * scale_bits)
        factor_2 = tl.exp2((m_2 - reference[None, :]) * scale_bits)
        if ENTROPY:
            e_2 = tl.load(place + number_stride + number_stride, mask=mask, other=0.0)
            shift_2 = (reference_of(m_2) - reference[None, :]) * scale_bits
            e = weigh(factor, e + s * ((reference_of(m) - reference) * scale_bits))
            e += tl.sum(weigh(factor_2, e_2 + s_2 * shift_2), axis=0)
        s = s * factor + tl.sum(s_2 * factor_2, axis=0)
        m = largest
    place = statistics + first_row + row
    tl.store(place, m * logits_scale, mask=exists)
    tl.store(place + all_rows, s, mask=exists)
    if ENTROPY:
        tl.store(place + 3 * all_rows, e * NATS, mask=exists)
