"""The entropy loss and its gradient over a vocabulary sharded across tensor-parallel ranks: see `entropy_loss`."""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from tpbench.kernels import _checks, _entropy_kernels, one_pass, symmetric

Loss = Literal["cross_entropy", "soft_cross_entropy", "reverse_kl", "forward_kl"]

INTERPRETED: bool = not isinstance(_entropy_kernels.statistics_kernel, triton.JITFunction)
"""Whether the kernels run in Triton's interpreter: TRITON_INTERPRET=1 when triton was imported."""

_INTERPRETED_TILE = 2**20
"""Elements of a tile in the interpreter, the most that Triton allows: its cost is by operation, not by element."""
_REDUCE_BLOCK = 4096


@dataclass(frozen=True)
class EntropyLossResult:
    """What `entropy_loss` returns."""

    loss: Tensor
    """fp32 scalar; (rows,) with reduction="none". The same bits on every rank of the group."""
    row_loss: Tensor
    """(rows,) fp32: each row's loss, 0 where it does not count."""
    grad: Tensor | None
    """(rows, local vocab): of the (reduced) loss with respect to the local logits, times grad_scale."""
    block: int
    """Columns of the kernels' block."""


def block_for(columns: int, block_cap: int | Literal["auto"] = "auto", loss: Loss = "cross_entropy") -> int:
    """The column block that the kernels use for `columns` local columns: a power of two, at most the cap."""
    if block_cap == "auto":
        # Two-logit losses hold two tiles and their differences in registers, labels one.
        block_cap = 16384 if INTERPRETED or loss == "cross_entropy" else 8192
    return max(16, min(block_cap, int(triton.next_power_of_2(columns))))


def statistics_width(loss: Loss, label_smoothing: float = 0.0) -> int:
    """The fp32 numbers a row that a rank contributes to the exchange."""
    if loss != "cross_entropy":
        return 5
    return 4 if label_smoothing else 3


def bytes_exchanged(rows: int, world_size: int, loss: Loss, label_smoothing: float = 0.0) -> int:
    """Bytes that one rank sends in a call: its statistics, to each of its peers."""
    return (world_size - 1) * rows * statistics_width(loss, label_smoothing) * 4


def entropy_loss(
    logits: Tensor,
    target: Tensor,
    *,
    loss: Loss = "cross_entropy",
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    logits_scale: float = 1.0,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    grad: Literal["new", "in_place", "none"] | Tensor = "new",
    grad_scale: float = 1.0,
    block_cap: int | Literal["auto"] = "auto",
    exchange: Literal["auto", "nccl", "symmetric"] = "auto",
) -> EntropyLossResult:
    """The loss of each row and, in the same go, the gradient with respect to the local logits.

    With x = logits_scale * logits, p = softmax(x), t = logits_scale / temperature * target and q = softmax(t), all over
    the whole vocabulary of V = vocab_size columns, a row's loss is

    - cross_entropy: (1 - e) * -log p[label] + e * mean(-log p), with e = label_smoothing (Szegedy et al. 2016,
      arXiv:1512.00567, section 7, as in torch.nn.functional.cross_entropy);
      gradient by x: p - (1 - e) * onehot(label) - e / V
    - soft_cross_entropy: -sum(q log p), gradient p - q (Hinton et al. 2015, arXiv:1503.02531, equation 2)
    - forward_kl: KL(q || p) = sum(q (log q - log p)), gradient p - q
    - reverse_kl: KL(p || q) = sum(p (log p - log q)), gradient p * (log p - log q - KL(p || q))

    plus z_loss * log(sum(exp(x)))^2 with gradient 2 * z_loss * log(sum(exp(x))) * p (PaLM, arXiv:2204.02311, section
    5). The softmax over tiles and ranks is the online one (Milakov and Gimelshein 2018, arXiv:1805.02867). The gradient
    is also scaled by logits_scale, by the reduction and by grad_scale, in fp32, and rounded once.

    Ranks exchange once, a few fp32 numbers a row, and all merge them in the same order, so that the loss has the same
    bits on all of them. Nothing here waits for the device (but see vocab_start), so that a CUDA graph can
    capture it. It is no autograd operation; `tpbench.kernels.EntropyLoss` is.

    Args:
        logits: (rows, local vocab) in bfloat16, float16 or float32, with any strides; on a GPU, or on a CPU in Triton's
            interpreter.
        target: for cross_entropy the labels, (rows,) int32 or int64, global columns, equal on all ranks. A row
            whose label is ignore_index or is no column of the vocabulary does not count: it has no loss and a zero
            gradient, and its logits are not read. For the other losses the target logits, shaped like the logits.
        group: process group over which the vocabulary is sharded, contiguous in rank order; None: it is all here.
        vocab_start: the first global column held here. By default from the ranks' local sizes: unless both vocab_start
            and vocab_size are given, on all ranks, every call gathers the sizes, and the host waits for them.
        vocab_size: columns of the whole vocabulary; columns at or past it are padding, outside the softmax and with a
            zero gradient. By default all columns of all ranks.
        reduction: of the rows' losses: "mean" over the rows that count (0 if none does), "sum" or "none".
        logits_scale, temperature: positive; the temperature softens the target logits only.
        grad: "new" makes a tensor like the logits; "in_place" writes over the logits; "none" makes none; a tensor
            shaped like the logits, of any supported dtype, is added to in fp32.
        grad_scale: factor on the gradient (not on the loss), as of a loss scaler or of gradient accumulation.
        block_cap: most columns in a kernel's block, a power of two; "auto" chooses.
        exchange: how statistics travel. "symmetric": within one kernel, which reads each logit once, through memory
            that the ranks share over NVLink; on a group's first use its ranks set that up together. "nccl": between
            two kernels, by one all-gather through the group's backend (gloo on a CPU). "auto": nccl, until symmetric
            has been measured with more than two ranks. Where no kernel of one pass fits (label_smoothing, a grad to
            accumulate into, targets of another dtype, very long rows) two do it, whatever is asked for.

    A row whose logits are -inf throughout has no softmax: its loss and gradient are NaN. A weight on a probability of
    zero makes the loss infinite, as it should, and reverse_kl's gradient then is NaN.

    Raises:
        TypeError, ValueError: naming the argument that is wrong and what would be right.
        RuntimeError: logits on a CPU and not in the interpreter; exchange="symmetric" where it is not available; a
            rank whose peer did not answer an earlier call (that call's loss is NaN).
    """
    _check(logits, target, loss, group, vocab_start, vocab_size, reduction, ignore_index, block_cap, exchange, grad)
    for name, value in (("logits_scale", logits_scale), ("temperature", temperature)):
        _checks.number(name, value, positive=True)
    _checks.number("label_smoothing", label_smoothing, high=1.0)
    _checks.number("z_loss", z_loss)
    _check_grad_scale(grad_scale)
    if loss == "cross_entropy" and temperature != 1.0:
        raise ValueError(f"temperature softens target logits: it must be 1 for loss='cross_entropy', got {temperature}")
    if loss != "cross_entropy" and label_smoothing:
        raise ValueError(f"label_smoothing smooths labels: it must be 0 for loss={loss!r}, got {label_smoothing}")

    logits, target = logits.detach(), target.detach()
    if loss == "cross_entropy":
        target = target.contiguous()
    rows, columns = logits.shape
    world_size = 1 if group is None else dist.get_world_size(group)
    start, size = _layout(columns, group, world_size, vocab_start, vocab_size, logits.device)
    out = _output(logits, grad)
    row_loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows == 0:
        nothing = row_loss if reduction == "none" else row_loss.sum()
        return EntropyLossResult(nothing, row_loss, out, block_for(columns, block_cap, loss))

    labels_mean = loss == "cross_entropy" and reduction == "mean"
    mean = 1.0 / rows if reduction == "mean" and not labels_mean else 1.0
    valid = min(max(size - start, 0), columns)
    peers = _peers(exchange, group, world_size, logits.device)
    if peers is not None and one_pass.covers(logits, target, loss, grad, label_smoothing):
        one_pass.check_earlier(logits.device)
        vectors = one_pass.aligned(logits, target if target.dim() == 2 else None, out)
        plan = one_pass.tiling(
            rows, columns, -(-size // world_size), world_size, logits.itemsize, loss == "cross_entropy", block_cap,
            vectors, one_pass.machine(logits.device.index),
        )  # fmt: skip
        if plan is not None and (vectors or world_size > 1):
            total = None if reduction == "none" else torch.empty((), dtype=torch.float32, device=logits.device)
            with _launching(logits.device):
                one_pass.launch(
                    logits, target, out, row_loss, total,
                    one_pass.local_workspace(logits.device) if isinstance(peers, str) else peers, plan, loss=loss,
                    valid=valid, vocab_start=start, vocab_size=size, ignore_index=ignore_index,
                    logits_scale=logits_scale, temperature=temperature, z_loss=z_loss, grad_scale=grad_scale * mean,
                    loss_scale=mean, count=labels_mean, world_size=world_size,
                    rank=0 if group is None else dist.get_rank(group),
                )  # fmt: skip
            return EntropyLossResult(row_loss if total is None else total, row_loss, out, plan.block)

    block = block_for(columns, block_cap, loss)
    width = statistics_width(loss, label_smoothing)
    tile = _tile(rows, block)
    both = (target.stride(0), target.stride(1)) if target.dim() == 2 else (0, 0)
    strides = (*logits.stride(), *both)
    scales = (logits_scale, logits_scale / temperature)
    flags: dict[str, Any] = {"LOSS": loss, "SMOOTHED": label_smoothing > 0, "WIDTH": width, **tile}
    flags["WIDE"] = _is_wide(columns, block, logits, target, out)
    grid = (triton.cdiv(rows, tile["ROWS"]),)
    with _launching(logits.device):
        inverse_count = _inverse_count(target, size, ignore_index) if labels_mean else None
        gathered = None
        if world_size > 1:
            statistics = torch.empty((width, rows), dtype=torch.float32, device=logits.device)
            _entropy_kernels.statistics_kernel[grid](
                logits, target, statistics, rows, *strides, valid, start, size, ignore_index, *scales, **flags
            )
            gathered = _all_gather(statistics, group, world_size)
            block_of_rows = 4096 if INTERPRETED else 128
            _entropy_kernels.row_loss_kernel[(triton.cdiv(rows, block_of_rows),)](
                target, gathered, row_loss, rows, world_size, size, ignore_index, label_smoothing, z_loss,
                LOSS=loss, SMOOTHED=label_smoothing > 0, WIDTH=width, ROWS=block_of_rows,
            )  # fmt: skip
        if gathered is None or out is not None:
            _entropy_kernels.loss_and_gradient_kernel[grid](
                logits, target, gathered, inverse_count, row_loss, out, rows, columns, world_size, *strides,
                *((0, 0) if out is None else out.stride()), valid, start, size, ignore_index, *scales, label_smoothing,
                z_loss, grad_scale * mean, ACCUMULATE=isinstance(grad, Tensor), **flags,
            )  # fmt: skip
        total = row_loss if reduction == "none" else _reduce(row_loss, inverse_count, mean)
    return EntropyLossResult(total, row_loss, out, block)


def _check(
    logits: Any, target: Any, loss: Any, group: Any, vocab_start: Any, vocab_size: Any, reduction: Any,
    ignore_index: Any, block_cap: Any, exchange: Any, grad: Any,
) -> None:  # fmt: skip
    _checks.matrix("logits", logits)
    _checks.choice("loss", loss, _checks.LOSSES)
    _checks.choice("reduction", reduction, _checks.REDUCTIONS)
    _checks.choice("exchange", exchange, _checks.EXCHANGES)
    _checks.target(target, logits, loss)
    _checks.gradient(grad, logits)
    _checks.group(group)
    _checks.whole("ignore_index", ignore_index)
    _checks.block_cap(block_cap)
    if vocab_start is not None:
        _checks.whole("vocab_start", vocab_start, 0)
    if vocab_size is not None:
        _checks.whole("vocab_size", vocab_size, 1)
    if not INTERPRETED and logits.device.type != "cuda":
        raise RuntimeError(
            f"logits must be on a CUDA device, got {logits.device}; on a CPU the kernels run in Triton's interpreter "
            "only: set TRITON_INTERPRET=1 before triton is imported"
        )


def _peers(
    exchange: str, group: dist.ProcessGroup | None, world_size: int, device: torch.device
) -> symmetric.PeerWorkspace | str | None:
    """The group's workspace; a word where no rank is needed; None where two kernels do the work."""
    if exchange == "nccl" or INTERPRETED:
        if exchange == "symmetric":
            raise RuntimeError("exchange='symmetric' needs CUDA devices: use 'nccl' or 'auto'")
        return None
    if world_size == 1 or group is None:
        return "alone"
    if exchange == "auto":
        return None
    found = symmetric.workspace(group, device)
    if isinstance(found, str):
        if exchange == "symmetric":
            raise RuntimeError(f"exchange='symmetric' is not available: {found}; use 'nccl' or 'auto'")
        return None
    return found


def _check_grad_scale(grad_scale: Any) -> None:
    if isinstance(grad_scale, bool) or not isinstance(grad_scale, (int, float)):
        raise TypeError(f"grad_scale must be a number, got {type(grad_scale).__name__}")


def _tile(rows: int, block: int) -> dict[str, int]:
    """Tile shape and launch options."""
    if INTERPRETED:
        return {"ROWS": min(triton.next_power_of_2(rows), max(1, _INTERPRETED_TILE // block)), "BLOCK": block}
    return {"ROWS": 1, "BLOCK": block, "num_warps": min(32, max(4, block // 512))}


def _is_wide(columns: int, block: int, *tensors: Tensor | None) -> bool:
    """Whether column offsets need 64 bits: the last block's, past the end too, by the largest column stride."""
    strides = (each.stride(1) for each in tensors if each is not None and each.dim() == 2)
    return (columns + block) * max(strides) >= 2**31


def _output(logits: Tensor, grad: str | Tensor) -> Tensor | None:
    if isinstance(grad, Tensor):
        return grad.detach()
    if grad == "new":
        return torch.empty_like(logits, memory_format=torch.contiguous_format)
    return logits if grad == "in_place" else None


def _launching(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Around kernel launches: Triton launches on the current device, whatever the tensors'."""
    if INTERPRETED:
        # Lanes that a mask throws away compute with -inf, of which numpy, which interprets, would warn.
        return importlib.import_module("numpy").errstate(all="ignore")  # type: ignore[no-any-return]
    return torch.cuda.device(device)


def _inverse_count(labels: Tensor, vocab_size: int, ignore_index: int) -> Tensor:
    """1 / rows that count, (1,) fp32 on the device. Labels are the same on all ranks: nothing to exchange."""
    inverse = torch.empty(1, dtype=torch.float32, device=labels.device)
    _entropy_kernels.inverse_count_kernel[(1,)](
        labels, inverse, labels.shape[0], vocab_size, ignore_index, BLOCK=_REDUCE_BLOCK, num_warps=8
    )
    return inverse


def _reduce(row_loss: Tensor, inverse_count: Tensor | None, factor: float) -> Tensor:
    total = torch.empty((), dtype=torch.float32, device=row_loss.device)
    _entropy_kernels.reduce_kernel[(1,)](
        row_loss, inverse_count, total, row_loss.shape[0], factor, BLOCK=_REDUCE_BLOCK, num_warps=8
    )
    return total


def _all_gather(values: Tensor, group: dist.ProcessGroup | None, world_size: int) -> Tensor:
    """(world_size, *values.shape), in rank order."""
    gathered = torch.empty((world_size * values.shape[0], *values.shape[1:]), dtype=values.dtype, device=values.device)
    # Renamed in torch 2.13, which warns of the old name.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, values, group=group)
    return gathered.view(world_size, *values.shape)


def _layout(
    columns: int, group: dist.ProcessGroup | None, world_size: int, vocab_start: int | None, vocab_size: int | None,
    device: torch.device,
) -> tuple[int, int]:  # fmt: skip
    """The first column here and the columns of the whole vocabulary."""
    if group is not None and world_size > 1:
        if vocab_start is not None and vocab_size is not None:
            return vocab_start, vocab_size
        # Not remembered by local size: that may change on some ranks only, and those would gather alone.
        sizes = _all_gather(torch.tensor([columns], device=device), group, world_size).flatten().tolist()
        start, total = sum(sizes[: dist.get_rank(group)]), sum(sizes)
    else:
        start, total = 0, columns
        if vocab_start not in (None, 0):
            raise ValueError(
                f"vocab_start must be 0 or None without a group of ranks that hold the rest, got {vocab_start}"
            )
    if vocab_size is not None and vocab_size > total:
        raise ValueError(f"vocab_size must be at most the {total} columns held in all, got {vocab_size}")
    return (start if vocab_start is None else vocab_start), (total if vocab_size is None else vocab_size)
