"""The entropy loss by kernels that go over a row twice: once for its statistics, once for its gradient.

One launch can do both: then the second pass may find the row in the cache (`algorithm="two_reads"`). Or two launches do
it with the statistics in memory between them, where ranks exchange theirs (`algorithm="two_kernels"`).
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Literal

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from tpbench.kernels import two_pass_kernels
from tpbench.kernels.block_caps import measured_cap
from tpbench.kernels.cached_launch import cached_launch
from tpbench.kernels.losses import LABEL_LOSSES

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


def launch(
    logits: Tensor, target: Tensor, grad: Tensor | None, row_loss: Tensor, row_entropy: Tensor | None,
    group: dist.ProcessGroup | None, algorithm: Literal["two_reads", "two_kernels"], block: int, *, loss: str,
    logprob: bool, valid: int, vocab_start: int, vocab_size: int, ignore_index: int, logits_scale: float,
    target_scale: float,
    label_smoothing: float, z_loss: float, softcap: float, target_softcap: float, inverse_count: Tensor | None,
    grad_scale: float, entropy_scale: float, row_grad: Tensor | None, entropy_grad: Tensor | None, accumulate: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Queue the kernels on the current stream. They store row_loss and, where they are not None, entropies and grad.

    logprob: store log-probabilities of labels, the negative cross-entropies.
    Returns the compiled kernels that read the logits (None in the interpreter).
    """
    rows, columns = logits.shape
    world_size = 1 if group is None else group.size()
    width = statistics_width(loss, label_smoothing, row_entropy is not None)
    shape = tile(rows, block)
    strides = (*logits.stride(), *(target.stride() if target.dim() == 2 else (0, 0)))
    vocabulary = (valid, vocab_start, vocab_size, ignore_index)
    scales = (logits_scale, target_scale)
    of_rows: dict[str, Any] = {
        "LOSS": loss, "SMOOTHED": label_smoothing > 0, "ENTROPY": int(row_entropy is not None), "WIDTH": width,
    }  # fmt: skip
    flags = {**of_rows, "SOFTCAP": float(softcap), "TARGET_SOFTCAP": float(target_softcap), **shape}
    flags["WIDE"] = is_wide(columns, block, logits, target, grad)
    programs = -(-rows // shape["ROWS"])
    kernels = []
    gathered = None
    if algorithm == "two_kernels":
        statistics = torch.empty((width, rows), dtype=torch.float32, device=logits.device)
        states = cached_launch(two_pass_kernels.statistics_kernel, **flags)
        kernels.append(states(programs, (logits, target, statistics), (rows, *strides, *vocabulary), scales))
        gathered = statistics[None] if world_size == 1 else all_gather(statistics, group, world_size)
        block_of_rows = 4096 if INTERPRETED else 128
        losses = cached_launch(two_pass_kernels.row_loss_kernel, LOGPROB=logprob, ROWS=block_of_rows, **of_rows)
        losses(
            -(-rows // block_of_rows), (target, gathered, row_loss, row_entropy),
            (rows, world_size, vocab_size, ignore_index), (label_smoothing, z_loss),
        )  # fmt: skip
    if gathered is None or grad is not None:
        gradient = cached_launch(
            two_pass_kernels.loss_and_gradient_kernel, LOGPROB=logprob, ACCUMULATE=accumulate, **flags
        )
        kernels.append(
            gradient(
                programs,
                (logits, target, gathered, inverse_count, row_loss, grad, row_entropy, row_grad, entropy_grad),
                (rows, columns, world_size, *strides, *((0, 0) if grad is None else grad.stride()), *vocabulary),
                (*scales, label_smoothing, z_loss, grad_scale, entropy_scale),
            )
        )  # fmt: skip
    return tuple(kernels)


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


def inverse_count(labels: Tensor, vocab_size: int, ignore_index: int) -> Tensor:
    """Return 1 / rows that count, (1,) fp32 on the device. Labels are equal on all ranks: nothing to exchange."""
    inverse = torch.empty(1, dtype=torch.float32, device=labels.device)
    count = cached_launch(two_pass_kernels.inverse_count_kernel, BLOCK=_REDUCE_BLOCK, num_warps=8)
    count(1, (labels, inverse), (labels.shape[0], vocab_size, ignore_index))
    return inverse


def reduce(row_loss: Tensor, inverse_count: Tensor | None, factor: float, total: Tensor) -> None:
    """Store factor * sum(row_loss), times inverse_count unless it is None, in `total`. The sum has a fixed order."""
    kernel = cached_launch(two_pass_kernels.reduce_kernel, BLOCK=_REDUCE_BLOCK, num_warps=8)
    kernel(1, (row_loss, inverse_count, total), (row_loss.shape[0],), (factor,))


def all_gather(values: Tensor, group: dist.ProcessGroup | None, world_size: int) -> Tensor:
    """Gather the values of all ranks: (world_size, *values.shape), in rank order."""
    gathered = torch.empty((world_size * values.shape[0], *values.shape[1:]), dtype=values.dtype, device=values.device)
    gather_into(gathered, values, group)
    return gathered.view(world_size, *values.shape)


def gather_into(gathered: Tensor, values: Tensor, group: dist.ProcessGroup | None, async_op: bool = False) -> Any:
    """Gather the values of all ranks along their first dimension. Returns the work if async_op, else None."""
    # torch 2.13 renamed this function and warns of the old name.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(gathered, values, group=group, async_op=async_op)
