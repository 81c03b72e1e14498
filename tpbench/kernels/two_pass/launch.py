"""Host code of the two-pass kernels: their blocks, their launches, and the kernels over rows beside them."""

from __future__ import annotations

import contextlib
import functools
import importlib
from dataclasses import replace
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from tpbench.kernels.block_caps import measured_cap
from tpbench.kernels.cached_launch import cached_launch
from tpbench.kernels.collectives import gather_by_rank
from tpbench.kernels.row_loss import KernelTarget, Outputs, RowLoss, Scaling, Strides, labels_of
from tpbench.kernels.row_terms import RowOutputs
from tpbench.kernels.two_pass.kernels import (
    Shard,
    inverse_count_kernel,
    loss_and_gradient_kernel,
    mixture_kernel,
    reduce_kernel,
    row_loss_kernel,
    scale_kernel,
    sequence_mean_kernel,
    statistics_kernel,
)
from tpbench.kernels.two_pass.state import INTERPRETED, TwoPassSpec

_INTERPRETED_TILE = 2**20
"""Elements of a tile in the interpreter, the most that Triton allows: the cost is per operation, not per element."""
_INTERPRETED_CAP = 16384
_REDUCE_BLOCK = 4096


@functools.lru_cache(maxsize=256)  # every call asks for it
def block_for(
    columns: int, block_cap: int | Literal["auto"] = "auto", loss: str = "cross_entropy",
    algorithm: Literal["two_reads", "two_kernels"] = "two_kernels", share: int | None = None,
) -> int:  # fmt: skip
    """Return the column block of these kernels for `columns` local columns: a power of two, at most the cap.

    share: columns per rank if the vocabulary is split evenly; "auto" chooses by it (default: `columns`).
    """
    if block_cap == "auto":
        block_cap = _INTERPRETED_CAP if INTERPRETED else measured_cap(algorithm, loss, share or columns)
    return max(16, min(block_cap, int(triton.next_power_of_2(columns))))


def column_block(loss: RowLoss, columns: int) -> int:
    """Return the column block of these kernels for a loss over `columns` local columns."""
    return block_for(columns, loss.block_cap, loss.formula, loss.two_pass_algorithm, loss.vocabulary.share)


def launch(
    loss: RowLoss, logits: Tensor, target: KernelTarget, outputs: Outputs, scaling: Scaling
) -> tuple[int, tuple[Any, ...], int]:
    """Queue the kernels for rows of logits on the current stream. They fill `outputs`.

    Returns the column block, the compiled kernels that read the logits (None in the interpreter), and the fp32 numbers
    of each row that a rank sends to every other one.
    """
    rows, columns = logits.shape
    vocabulary, grad = loss.vocabulary, outputs.grad
    inverse_count = scaling.inverse_count
    if scaling.count and inverse_count is None:
        inverse_count = inverse_row_count(labels_of(target), scaling.inputs.row_weight, loss)
    entropy = outputs.rows.entropy is not None
    width = loss.numbers(entropy)
    block = column_block(loss, columns)
    tile_rows, options = tile(rows, block, loss.top_block)
    programs = -(-rows // tile_rows)
    of_target = target.stride() if isinstance(target, Tensor) and target.dim() == 2 else (0, 0)
    of_read = (*logits.stride(), *of_target)
    of_grad = (0, 0) if grad is None else grad.stride()
    shard = Shard(vocabulary.valid, vocabulary.start, vocabulary.size, loss.ignore_index)
    scales = loss.scales(scaling)
    spec = _spec(loss, entropy, tile_rows)._replace(
        BLOCK=block, SOFTCAP=loss.softcap or 0.0, TARGET_SOFTCAP=loss.target_softcap or 0.0,
        WIDE=is_wide(columns, block, logits.stride(), of_target, of_grad),
    )  # fmt: skip
    kernels = []
    gathered = None
    if loss.two_pass_algorithm == "two_kernels":
        statistics = torch.empty((width, rows), dtype=torch.float32, device=logits.device)
        states = cached_launch(statistics_kernel, SPEC=spec, **options)
        # Strides of the gradient would only specialise the kernel.
        strides = Strides._make((*of_read, 0, 0))
        kernels.append(states(programs, (logits, target, statistics), (rows, strides, shard), scales))
        gathered = gather_by_rank(statistics, loss.group, vocabulary.world_size)
        if scaling.sequences is not None:
            logprobs = torch.empty_like(outputs.rows.loss)
            losses_of_statistics(loss.of_logprobs(), gathered, target, RowOutputs(logprobs), Scaling())
            scaling = with_sequence_means(loss, labels_of(target), logprobs, scaling, gradient=grad is not None)
        if loss.loss == "jsd":
            part = torch.empty((2, rows), dtype=torch.float32, device=logits.device)
            mixture = cached_launch(mixture_kernel, WIDTH=width, SPEC=spec, **options)
            integers = (rows, vocabulary.world_size, strides, shard)
            kernels.append(mixture(programs, (logits, target, gathered, part), integers, scales))
            of_p, of_q = gather_by_rank(part, loss.group, vocabulary.world_size).sum(0)
            scaling = replace(scaling, inputs=scaling.inputs._replace(divergence_p=of_p, divergence_q=of_q))
        losses_of_statistics(loss, gathered, target, outputs.rows, scaling)
    if gathered is None or grad is not None:
        spec = spec._replace(ACCUMULATE=outputs.accumulate)
        gradient = cached_launch(loss_and_gradient_kernel, WIDTH=width, SPEC=spec, **options)
        pointers = (logits, target, gathered, inverse_count, scaling.inputs, outputs.rows, grad)
        strides = Strides._make((*of_read, *of_grad))
        kernels.append(gradient(programs, pointers, (rows, columns, vocabulary.world_size, strides, shard), scales))
    reduced(outputs, inverse_count, scaling.mean)
    return block, tuple(kernels), width + 2 * (loss.loss == "jsd")


def losses_of_statistics(
    loss: RowLoss, gathered: Tensor, target: KernelTarget, outputs: RowOutputs, scaling: Scaling
) -> None:  # fmt: skip
    """Store the results of rows from all ranks' statistics, (world size, numbers, rows)."""
    world_size, width, rows = gathered.shape
    block = max(1, (_INTERPRETED_TILE // 256 if INTERPRETED else 128) // max(1, loss.top_block // 16))
    # No argument differs between ranks: the shard's columns don't matter here.
    shard = Shard(0, 0, loss.vocabulary.size, loss.ignore_index)
    cached_launch(row_loss_kernel, WIDTH=width, SPEC=_spec(loss, outputs.entropy is not None, block))(
        -(-rows // block), (target, gathered, scaling.inputs, outputs), (rows, world_size, shard), loss.scales(scaling)
    )


def _spec(loss: RowLoss, entropy: bool, rows: int) -> TwoPassSpec:
    """Return the constants of a kernel for tiles of so many rows."""
    top: dict[str, Any] = dict(zip(("TOP_K", "TOP_BLOCK", "TOP_LOSS", "BUCKET"), loss.top, strict=True))
    return TwoPassSpec(
        loss.formula, loss.label_smoothing > 0, entropy, loss.z_loss > 0, rows, BETA=loss.beta, **top
    )  # fmt: skip


def tile(rows: int, block: int, top_block: int = 0) -> tuple[int, dict[str, int]]:
    """Return the rows of a tile of `block` columns, and the options of its launch. top_block: of a teacher's top k."""
    if INTERPRETED:
        return min(int(triton.next_power_of_2(rows)), max(1, _INTERPRETED_TILE // max(block, top_block))), {}
    return 1, {"num_warps": min(32, max(4, block // 512))}


def is_wide(columns: int, block: int, *strides: tuple[int, ...]) -> bool:
    """Return whether column offsets need 64 bits: the end of the last block times the largest column stride."""
    return (columns + block) * max(column for _row, column in strides) >= 2**31


def launching(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context for kernel launches: Triton launches on the current device, not on that of the tensors."""
    if INTERPRETED:
        # Masked elements compute with -inf, of which numpy, the interpreter's backend, would warn.
        return importlib.import_module("numpy").errstate(all="ignore")  # type: ignore[no-any-return]
    return torch.cuda.device(device.index)  # torch takes 2 us to find the number of a torch.device


def inverse_row_count(labels: Tensor, row_weight: Tensor | None, loss: RowLoss) -> Tensor:
    """Return 1 / the number of rows that count, or 1 / the sum of their weights, (1,) fp32 on the device.

    Labels and weights are equal on all ranks, so nothing is exchanged.
    """
    inverse = torch.empty(1, dtype=torch.float32, device=labels.device)
    count = cached_launch(inverse_count_kernel, BLOCK=_REDUCE_BLOCK, num_warps=8)
    with launching(labels.device):
        count(1, (labels, row_weight, inverse), (labels.shape[0], loss.vocabulary.size, loss.ignore_index))
    return inverse


def with_sequence_means(loss: RowLoss, labels: Tensor, logprobs: Tensor, scaling: Scaling, gradient: bool) -> Scaling:
    """Return the factors with `log_ratio` and, for a gradient, `ratio_slope` of the rows' sequences.

    logprobs: (rows,) fp32, equal on all ranks.
    """
    rows, inputs = len(labels), scaling.inputs
    block, others = (256, 4096) if INTERPRETED else (16, 1024)
    kernel = cached_launch(sequence_mean_kernel, BLOCK=block, OTHERS=others, num_warps=8)
    for name in ("log_ratio", "ratio_slope")[: 1 + gradient]:
        means = torch.empty_like(logprobs)
        with launching(labels.device):
            kernel(
                -(-rows // block), (scaling.sequences, labels, logprobs, inputs, means),
                (rows, loss.vocabulary.size, loss.ignore_index), loss.scales(scaling),
            )  # fmt: skip
        inputs = inputs._replace(**{name: means})
    return replace(scaling, inputs=inputs, sequences=None)


def reduced(outputs: Outputs, inverse_count: Tensor | None, factor: float) -> Tensor:
    """Return the loss: the losses of rows, or their sum times the factors in `outputs.total`, if a total is wanted.

    The sum has a fixed order. inverse_count: a factor in memory, or None.
    """
    row_loss: Tensor = outputs.rows.loss
    if outputs.total is None:
        return row_loss
    if not row_loss.shape[0]:
        return outputs.total.zero_()
    kernel = cached_launch(reduce_kernel, BLOCK=_REDUCE_BLOCK, num_warps=8)
    with launching(row_loss.device):
        kernel(1, (row_loss, inverse_count, outputs.total), (row_loss.shape[0],), (factor,))
    return outputs.total


def scale_rows(grad: Tensor, factor: Tensor) -> Tensor:
    """Multiply (rows, columns) by a factor, () or (rows,), in place. Rows whose factor is 1 are not written."""
    rows, columns = grad.shape
    if grad.numel():
        block = block_for(columns)
        tile_rows, options = tile(rows, block)
        wide = is_wide(columns, block, grad.stride())
        scale = cached_launch(
            scale_kernel, PER_ROW=factor.dim(), WIDE=wide, ROWS=tile_rows, BLOCK=block, **options
        )  # fmt: skip
        with launching(grad.device):
            scale(-(-rows // tile_rows), (grad, factor), (rows, columns, *grad.stride()))
    return grad
