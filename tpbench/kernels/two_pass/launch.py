"""The entropy loss by kernels that go over a row twice: once for its statistics, once for its gradient.

One launch can do both: then the second pass may find the row in the cache (`algorithm="two_reads"`). Or two launches do
it with the statistics in memory between them, where ranks exchange theirs (`algorithm="two_kernels"`).
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from tpbench.kernels.block_caps import measured_cap
from tpbench.kernels.cached_launch import cached_launch
from tpbench.kernels.collectives import gather_by_rank
from tpbench.kernels.losses import LABEL_LOSSES
from tpbench.kernels.row_loss import Outputs, RowLoss, Scaling
from tpbench.kernels.two_pass import kernels as two_pass_kernels

INTERPRETED: bool = not isinstance(two_pass_kernels.statistics_kernel, triton.JITFunction)
"""True if the kernels run in Triton's interpreter: TRITON_INTERPRET was 1 when triton was imported."""

_INTERPRETED_TILE = 2**20
"""Elements of a tile in the interpreter, the most that Triton allows: the cost is per operation, not per element."""
_INTERPRETED_CAP = 16384
_REDUCE_BLOCK = 4096


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


def statistics_width(loss: str, label_smoothing: float = 0.0, entropy: bool = False) -> int:
    """Return the number of fp32 numbers per row that a rank contributes to the exchange."""
    if loss not in LABEL_LOSSES:
        return 5 + entropy
    return (4 if label_smoothing else 3) + entropy


def bytes_exchanged(
    rows: int, world_size: int, loss: str, label_smoothing: float = 0.0, entropy: bool = False
) -> int:  # fmt: skip
    """Return the bytes that one rank sends in a call: its statistics, to each of its peers."""
    return (world_size - 1) * rows * statistics_width(loss, label_smoothing, entropy) * 4


def column_block(loss: RowLoss, columns: int) -> int:
    """Return the column block of these kernels for a loss over `columns` local columns."""
    return block_for(columns, loss.block_cap, loss.formula, loss.two_pass_algorithm, loss.vocabulary.share)


def launch(loss: RowLoss, logits: Tensor, target: Tensor, outputs: Outputs, scaling: Scaling) -> tuple[Any, ...]:
    """Queue the kernels for rows of logits on the current stream. They fill `outputs`.

    Returns the compiled kernels that read the logits (None in the interpreter).
    """
    rows, columns = logits.shape
    vocabulary, grad, row_entropy = loss.vocabulary, outputs.grad, outputs.row_entropy
    world_size = vocabulary.world_size
    inverse_count = scaling.inverse_count
    if scaling.count and inverse_count is None:
        inverse_count = inverse_row_count(target, vocabulary.size, loss.ignore_index)
    entropy = row_entropy is not None
    width = statistics_width(loss.formula, loss.label_smoothing, entropy)
    block = column_block(loss, columns)
    shape = tile(rows, block)
    programs = -(-rows // shape["ROWS"])
    strides = (*logits.stride(), *(target.stride() if target.dim() == 2 else (0, 0)))
    shard = (vocabulary.valid, vocabulary.start, vocabulary.size, loss.ignore_index)
    scales = (loss.logits_scale, loss.target_scale)
    constants: dict[str, Any] = {
        "LOSS": loss.formula, "SMOOTHED": loss.label_smoothing > 0, "ENTROPY": int(entropy),
        "SOFTCAP": float(loss.softcap), "TARGET_SOFTCAP": float(loss.target_softcap), "WIDTH": width, **shape,
        "WIDE": is_wide(columns, block, logits, target, grad),
    }  # fmt: skip
    kernels = []
    gathered = None
    if loss.two_pass_algorithm == "two_kernels":
        statistics = torch.empty((width, rows), dtype=torch.float32, device=logits.device)
        states = cached_launch(two_pass_kernels.statistics_kernel, **constants)
        kernels.append(states(programs, (logits, target, statistics), (rows, *strides, *shard), scales))
        gathered = gather_by_rank(statistics, loss.group, world_size)
        losses_of_statistics(loss, gathered, target, outputs.row_loss, row_entropy)
    if gathered is None or grad is not None:
        gradient = cached_launch(
            two_pass_kernels.loss_and_gradient_kernel, LOGPROB=loss.is_logprob, ACCUMULATE=outputs.accumulate,
            **constants,
        )  # fmt: skip
        kernels.append(
            gradient(
                programs,
                (logits, target, gathered, inverse_count, outputs.row_loss, grad, row_entropy, scaling.row_grad,
                 scaling.entropy_grad),
                (rows, columns, world_size, *strides, *((0, 0) if grad is None else grad.stride()), *shard),
                (*scales, loss.label_smoothing, loss.z_loss, loss.grad_scale(scaling), scaling.grad_scale),
            )
        )  # fmt: skip
    if outputs.total is not None:
        reduce(outputs.row_loss, inverse_count, scaling.mean, outputs.total)
    return tuple(kernels)


def losses_of_statistics(
    loss: RowLoss, gathered: Tensor, target: Tensor, row_loss: Tensor, row_entropy: Tensor | None
) -> None:
    """Store losses and entropies of rows from all ranks' statistics, (world size, numbers, rows)."""
    world_size, width, rows = gathered.shape
    block = 4096 if INTERPRETED else 128
    kernel = cached_launch(
        two_pass_kernels.row_loss_kernel, LOSS=loss.formula, LOGPROB=loss.is_logprob,
        SMOOTHED=loss.label_smoothing > 0, ENTROPY=int(row_entropy is not None), WIDTH=width, ROWS=block,
    )  # fmt: skip
    kernel(
        -(-rows // block), (target, gathered, row_loss, row_entropy),
        (rows, world_size, loss.vocabulary.size, loss.ignore_index), (loss.label_smoothing, loss.z_loss),
    )  # fmt: skip


def tile(rows: int, block: int) -> dict[str, int]:
    """Return the tile shape and launch options."""
    if INTERPRETED:
        return {"ROWS": min(triton.next_power_of_2(rows), max(1, _INTERPRETED_TILE // block)), "BLOCK": block}
    return {"ROWS": 1, "BLOCK": block, "num_warps": min(32, max(4, block // 512))}


def is_wide(columns: int, block: int, *tensors: Tensor | None) -> bool:
    """Return whether column offsets need 64 bits: the end of the last block times the largest column stride."""
    strides = (each.stride(1) for each in tensors if each is not None and each.dim() == 2)
    return (columns + block) * max(strides) >= 2**31


def launching(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context for kernel launches: Triton launches on the current device, not on that of the tensors."""
    if INTERPRETED:
        # Masked elements compute with -inf, of which numpy, the interpreter's backend, would warn.
        return importlib.import_module("numpy").errstate(all="ignore")  # type: ignore[no-any-return]
    return torch.cuda.device(device.index)  # torch takes 2 us to find the number of a torch.device


def inverse_row_count(labels: Tensor, vocab_size: int, ignore_index: int) -> Tensor:
    """Return 1 / the number of rows that count, (1,) fp32 on the device.

    Labels are equal on all ranks, so nothing is exchanged.
    """
    inverse = torch.empty(1, dtype=torch.float32, device=labels.device)
    count = cached_launch(two_pass_kernels.inverse_count_kernel, BLOCK=_REDUCE_BLOCK, num_warps=8)
    count(1, (labels, inverse), (labels.shape[0], vocab_size, ignore_index))
    return inverse


def reduced(outputs: Outputs, scaling: Scaling) -> Tensor:
    """Return the loss: the total, after it was reduced from the losses of rows, or these where no total is wanted."""
    if outputs.total is None:
        return outputs.row_loss
    if len(outputs.row_loss):
        with launching(outputs.row_loss.device):
            reduce(outputs.row_loss, scaling.inverse_count, scaling.mean, outputs.total)
    return outputs.total


def reduce(row_loss: Tensor, inverse_count: Tensor | None, factor: float, total: Tensor) -> None:
    """Store factor * sum(row_loss), times inverse_count unless it is None, in `total`. The sum has a fixed order."""
    kernel = cached_launch(two_pass_kernels.reduce_kernel, BLOCK=_REDUCE_BLOCK, num_warps=8)
    kernel(1, (row_loss, inverse_count, total), (row_loss.shape[0],), (factor,))
