"""Losses of labels without a gradient: statistics of some rows at a time, and one exchange for all rows.

The statistics of a row are those of `two_pass.state`. Here each thread keeps a running state of its own columns, and
threads merge once per row. A general tile reduces over its threads several times. Exponents and entropies are in bits
until a row is complete, because exp2 is the GPU's own instruction: exp would cost another multiplication.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton decides the types of a kernel's arguments.

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpbench.kernels.cached_launch import cached_launch
from tpbench.kernels.collectives import gather_by_rank
from tpbench.kernels.entropy.launch_rows import How
from tpbench.kernels.linear.logits import compute_logits
from tpbench.kernels.row_loss import RowLoss
from tpbench.kernels.two_pass import launch as two_pass
from tpbench.kernels.two_pass.launch import launching, statistics_width
from tpbench.kernels.two_pass.state import capped, reference_of, weigh

_VECTOR = 8
_REPEATS = 4
_WARPS = 4
_LANES = 32 * _WARPS
NATS = tl.constexpr(math.log(2.0))
"""Nats in a bit."""
_LEAST = tl.constexpr(-1e30)
"""The least exponent. Its power of two is 0, and 0 times it is 0, while 0 times -inf would be NaN."""


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
            two_pass.losses_of_statistics(self.loss, gathered, labels, row_loss, row_entropy)
        return two_pass.bytes_exchanged(len(labels), world_size, self.loss.loss, 0.0, self.entropy)


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
    e = tl.zeros([LANES], tl.float32)
    begin = logits + row * logits_row
    for start in range(0, stop, REPEATS * LANES * VECTOR):
        column = start + of_tile
        inside = column < n_valid
        x = capped(tl.load(begin + column, mask=inside, other=float("-inf")).to(tl.float32), SOFTCAP)
        if SOFTCAP > 0:
            x = tl.where(inside, x, float("-inf"))
        largest = tl.maximum(m, tl.max(tl.max(x, axis=2), axis=0))
        reference = reference_of(largest)
        bits = (x - reference[None, :, None]) * scale_bits
        power = tl.exp2(bits)
        factor = tl.exp2((m - reference) * scale_bits)
        if ENTROPY:
            e = weigh(factor, e + s * ((reference_of(m) - reference) * scale_bits))
            bits = tl.maximum(bits, _LEAST, propagate_nan=tl.PropagateNan.ALL)
            e += tl.sum(tl.sum(power * bits, axis=2), axis=0)
        s = s * factor + tl.sum(tl.sum(power, axis=2), axis=0)
        m = largest
    of_row = tl.max(m, axis=0)
    factor = tl.exp2((m - reference_of(of_row)) * scale_bits)
    local = label - vocab_start
    held = counts & (local >= 0) & (local < n_valid)
    own = capped(tl.load(begin + local, mask=held, other=0.0).to(tl.float32), SOFTCAP) * logits_scale
    place = statistics + first_row + row
    tl.store(place, of_row * logits_scale)
    tl.store(place + n_rows, tl.sum(s * factor, axis=0))
    tl.store(place + 2 * n_rows, tl.where(held, own, 0.0))
    if ENTROPY:
        shift = (reference_of(m) - reference_of(of_row)) * scale_bits
        tl.store(place + 3 * n_rows, tl.sum(weigh(factor, e + s * shift), axis=0) * NATS)
