"""Losses of labels without a gradient: statistics of some rows at a time, and one exchange for all rows.

The statistics of a row are those of `row_terms`. Exponents and entropies are in bits until a row is complete,
because exp2 is the GPU's own instruction: exp would cost another multiplication.

The head's product stores them, and no logits. A program of the product holds a tile of logits in registers and stores
two or three numbers per row of it. A second kernel merges the tiles of a row. The product is
persistent: as many programs as multiprocessors compute one tile after the other, and load the next tile while they work
on the statistics of the last one. Masks are selections and no branches. After a branch that reads the accumulator,
ptxas would let matrix instructions run one after the other (its warning C7514), a third slower.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tpbench.kernels.cached_launch import INTERPRETED, cached_launch, launching
from tpbench.kernels.distributed import gather_by_rank
from tpbench.kernels.linear.chunks import HiddenStates, WeightGradient, chunks_of
from tpbench.kernels.row_loss import LaunchRecord, RowLoss, Rows
from tpbench.kernels.row_terms import reference, weigh
from tpbench.kernels.two_pass.launch import losses_of_statistics
from tpbench.kernels.two_pass.state import capped, round_to

NATS = tl.constexpr(math.log(2.0))
"""Nats in a bit."""
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


def bytes_of_tiles(columns: int, entropy: bool) -> int:
    """Return the workspace of one row: the statistics of its tiles."""
    return -(-columns // _COLUMNS) * (2 + entropy) * 4


class LossesOfLabels:
    """A call for losses and entropies of labels alone, and the memory for the statistics of its rows."""

    grad_hidden = None
    weight_gradient = WeightGradient(None, None, None, 0)

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, shards: int,
        workspace_gib: float | Literal["auto"], loss: RowLoss,
    ) -> None:  # fmt: skip
        self.weight, self.bias = _aligned(weight), bias
        self.loss, self.entropy = loss, loss.wants_entropy
        rows = len(hidden) * shards
        self.chunks = chunks_of(rows, shards, bytes_of_tiles(loss.vocabulary.share, self.entropy), workspace_gib)
        self.states = HiddenStates(hidden, None, loss.group, self.chunks)
        self.labels = self.chunks.in_order(labels)
        shape = (loss.numbers(self.entropy), rows)
        self.values = torch.empty(shape, dtype=torch.float32, device=hidden.device)
        """The statistics of the rows of all chunks, one chunk behind the other."""
        self.values[2] = 0.0  # each tile stores the logits of the labels that it holds
        tiles = (2 + self.entropy, -(-loss.vocabulary.valid // _COLUMNS), self.chunks.most)
        self.memory = torch.empty(tiles, dtype=torch.float32, device=hidden.device)
        self.workspace = self.memory.nbytes

    def run(self, rows: Rows) -> tuple[LaunchRecord | None, int]:
        """Compute the losses of all rows, which are in the order of chunks.

        Returns the kernels of a chunk, and the bytes that this rank sent.
        """
        loss, states = self.loss, self.states
        how: LaunchRecord | None = None
        for index in range(len(self.chunks)):
            chunk, place = states.chunk(index), self.chunks[index]
            states.prefetch(index + 1)  # no collective follows the product, so the next chunk is fetched beside it
            how = self._store(chunk, self.labels[place], place.start)
        gathered = gather_by_rank(self.values, loss.group, loss.vocabulary.world_size)
        with launching(self.weight.device):
            losses_of_statistics(loss, gathered, self.labels, rows)
        return how, (loss.vocabulary.world_size - 1) * self.values.nbytes + states.bytes_sent

    def _store(self, hidden: Tensor, labels: Tensor, first: int) -> LaunchRecord:
        """Queue the product of some rows, whose statistics are stored from row `first` on."""
        vocabulary, rows = self.loss.vocabulary, len(hidden)
        tiles = self.memory.shape[1]
        if tiles == 0:
            self.values[:2, first : first + rows] = torch.tensor([[float("-inf")], [0.0]], device=hidden.device)
            return LaunchRecord("two_kernels", _COLUMNS, 0, ())
        hidden = _aligned(hidden)
        on = None if INTERPRETED else torch.cuda.get_device_properties(hidden.device)
        programs = min(1 if on is None else on.multi_processor_count, -(-rows // _ROWS) * tiles)
        product = cached_launch(
            product_statistics_kernel, ENTROPY=self.entropy, SOFTCAP=self.loss.softcap or 0.0, PROGRAMS=programs,
            ROWS=_ROWS, COLUMNS=_COLUMNS, WIDTH=_WIDTH, GROUP=_GROUP, num_warps=8, num_stages=3,
        )  # fmt: skip
        merge = cached_launch(merge_tiles_kernel, ENTROPY=self.entropy, TILES=_MERGED_TILES, ROWS=_MERGED_ROWS)
        strides = (*self.memory.stride()[:2], self.values.shape[1])
        factors = (self.loss.logits_scale, self.loss.logits_scale / math.log(2.0))
        with launching(hidden.device):
            compiled = product(
                programs,
                (TensorDescriptor.from_tensor(hidden, [_ROWS, _WIDTH]),
                 TensorDescriptor.from_tensor(self.weight, [_COLUMNS, _WIDTH]),
                 self.bias, labels, self.memory, self.values),
                (*strides, rows, hidden.shape[1], first, vocabulary.valid, vocabulary.start), factors,
            )  # fmt: skip
            merge(-(-rows // _MERGED_ROWS), (self.memory, self.values), (*strides, rows, tiles, first), factors)
        return LaunchRecord("two_kernels", _COLUMNS, 0, (compiled,))


def _aligned(matrix: Tensor) -> Tensor:
    """Return the matrix in a form that the tensor memory accelerator can load: it, or a contiguous copy."""
    bytes_of_row = matrix.stride(0) * matrix.itemsize
    fits = matrix.stride(1) == 1 and bytes_of_row % _ALIGNMENT == 0 and matrix.data_ptr() % _ALIGNMENT == 0
    return matrix if fits else matrix.clone(memory_format=torch.contiguous_format)


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
