"""`entropy_loss`: the entropy loss and its gradient over a vocabulary sharded across tensor-parallel ranks."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.kernels import _checks, symmetric, two_pass
from tpbench.kernels.losses import LOSSES, Loss
from tpbench.kernels.one_pass.launch import launch
from tpbench.kernels.one_pass.plan import Prepared, form, prepare
from tpbench.kernels.one_pass.workspace import local_workspace
from tpbench.kernels.two_pass import INTERPRETED, all_gather, block_for, launching


@dataclass(frozen=True)
class How:
    """The kernels that ran, and the bytes that they sent."""

    algorithm: Literal["two_reads", "two_kernels", "one_read"]
    block: int
    """Columns of the kernels' block."""
    bytes_sent: int = 0
    """Bytes that this rank sent to its peers."""
    kernels: tuple[Any, ...] = ()
    """The compiled kernels that read the logits (see `compiled.worst`). Each is None in the interpreter."""


@dataclass(frozen=True)
class EntropyLossResult:
    """The result of `entropy_loss`."""

    loss: Tensor
    """fp32 scalar, or (rows,) with reduction="none". Every rank of the group has the same bits."""
    row_loss: Tensor
    """(rows,) fp32: each row's loss, 0 for a row that does not count."""
    grad: Tensor | None
    """(rows, local vocab): gradient of the (reduced) loss with respect to the local logits, times grad_scale."""
    how: How


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
    algorithm: Literal["auto", "two_reads", "two_kernels", "one_read"] = "auto",
) -> EntropyLossResult:
    """Compute the loss of each row and, in the same call, the gradient with respect to the local logits.

    Notation: x = logits_scale * logits, p = softmax(x), t = logits_scale / temperature * target, and q = softmax(t).
    Each softmax is over the whole vocabulary of V = vocab_size columns. A row's loss is

    - cross_entropy: (1 - e) * -log p[label] + e * mean(-log p), with e = label_smoothing (Szegedy et al. 2016,
      arXiv:1512.00567, section 7, as in torch.nn.functional.cross_entropy).
      Gradient by x: p - (1 - e) * onehot(label) - e / V.
    - soft_cross_entropy: -sum(q log p), gradient p - q (Hinton et al. 2015, arXiv:1503.02531, equation 2).
    - forward_kl: KL(q || p) = sum(q (log q - log p)), gradient p - q (Kullback and Leibler 1951,
      doi:10.1214/aoms/1177729694, equation 2.4). The loss of soft_cross_entropy is larger by the entropy of q.
    - reverse_kl: KL(p || q) = sum(p (log p - log q)), gradient p * (log p - log q - KL(p || q)) (for language models
      Gu et al. 2023, arXiv:2306.08543, equation 1).

    Each has the additional term z_loss * log(sum(exp(x)))^2, with gradient 2 * z_loss * log(sum(exp(x))) * p (PaLM,
    arXiv:2204.02311, section 5). The softmax over tiles and ranks is computed online (Milakov and Gimelshein 2018,
    arXiv:1805.02867). The gradient is also scaled by logits_scale, by the reduction and by grad_scale. Scaling is in
    fp32, and the gradient is rounded once.

    Ranks exchange a few fp32 numbers per row, once. All ranks merge them in the same order, so the loss has the same
    bits on all of them. The host does not wait for the device (except as described at vocab_start), so a CUDA graph can
    capture the call. The function is no autograd operation; `tpbench.kernels.EntropyLoss` is one.

    Args:
        logits: (rows, local vocab) in bfloat16, float16 or float32, with any strides. On a GPU, or on a CPU in Triton's
            interpreter.
        target: for cross_entropy the labels, (rows,) int32 or int64, global columns, equal on all ranks. A row
            does not count if its label is ignore_index or no column of the vocabulary: its loss and gradient are zero,
            and its logits are not read. For the other losses the target logits, with the shape of the logits.
        group: process group over which the vocabulary is sharded, contiguous in rank order. None: this rank holds all
            of it.
        vocab_start: the first global column of this rank. By default it follows from the ranks' local sizes. Unless
            both vocab_start and vocab_size are given on all ranks, every call gathers the sizes, and the host waits.
        vocab_size: columns of the whole vocabulary. Columns at or past it are padding: outside the softmax, and with a
            zero gradient. By default all columns of all ranks.
        reduction: of the rows' losses: "mean" over the rows that count (0 if none does), "sum" or "none".
        logits_scale, temperature: positive. The temperature softens the target logits only.
        grad: "new" allocates a tensor like the logits. "in_place" overwrites the logits. "none" computes no gradient. A
            tensor shaped like the logits, of any supported dtype, is added to in fp32. Autograd is told of the
            overwriting: if a later backward needs the overwritten values, it raises RuntimeError.
        grad_scale: factor on the gradient (not on the loss), for example of a loss scaler or of gradient accumulation.
        block_cap: the largest column block of a kernel, a power of two. "auto" takes the fastest measured one
            (`block_caps`). Nothing is tuned in the call, and all ranks choose the same.
        exchange: the path of the statistics between ranks. On one rank nothing is exchanged: "nccl" is
            algorithm="two_reads" there, the others are "one_read" if it fits.

            - "symmetric": inside one kernel, which reads each logit once, through memory that the ranks share over
              NVLink. The ranks set it up together on a group's first use.
            - "nccl": between two kernels, by one all-gather through the group's backend (gloo on a CPU). Choose it if
              collectives of other streams may run at the same time, for example FSDP's. The symmetric kernel occupies
              the whole GPU until all ranks have answered: a collective that started on one rank only would block it.
            - "auto": symmetric if the ranks are GPUs of one machine that reach each other's memory, else nccl.

            The single kernel does not support label_smoothing, a grad to accumulate into, targets of another dtype,
            very long rows, or a rank with far more columns than its share. Then two kernels run, for any exchange. If
            vocab_start and vocab_size are given, ranks do not know each other's columns, and a rank with too many
            raises.
        algorithm: the kernels.

            - "two_reads": one kernel whose programs read their row twice, for its statistics and for its gradient. On
              one rank only.
            - "two_kernels": the first kernel stores each row's statistics, so that the second reads the logits once.
            - "one_read": one persistent kernel that reads each logit once in all. Over several ranks it needs
              exchange="symmetric".
            - "auto": the exchange decides.

    A row whose logits are all -inf has no softmax: its loss and gradient are NaN. A positive weight on a probability of
    zero makes the loss infinite, which is correct. The gradient of reverse_kl is then NaN.

    Raises:
        TypeError, ValueError: an argument is invalid, or an algorithm that was asked for by name does not support the
            call. The message names the argument and what is valid.
        RuntimeError: logits on a CPU and not in the interpreter; exchange="symmetric" if it is not available; a
            rank whose peer did not answer an earlier call (that call's loss is NaN).
    """
    _check(logits, target, loss, group, vocab_start, vocab_size, reduction, ignore_index, block_cap, exchange, grad)
    for name, value in (("logits_scale", logits_scale), ("temperature", temperature)):
        _checks.number(name, value, positive=True)
    _checks.number("label_smoothing", label_smoothing, high=1.0)
    _checks.number("z_loss", z_loss)
    _checks.number("grad_scale", grad_scale, low=-math.inf)
    if not logits_scale / temperature <= _checks.FP32_MAX:
        raise ValueError(f"temperature must leave logits_scale / temperature finite in float32, got {temperature}")
    if loss == "cross_entropy" and temperature != 1.0:
        raise ValueError(f"temperature softens target logits: it must be 1 for loss='cross_entropy', got {temperature}")
    if loss != "cross_entropy" and label_smoothing:
        raise ValueError(f"label_smoothing smooths labels: it must be 0 for loss={loss!r}, got {label_smoothing}")
    world_size, rank = (1, 0) if group is None else (group.size(), group.rank())
    _checks.algorithm(algorithm, exchange, world_size)

    logits, target = logits.detach(), target.detach()
    if loss == "cross_entropy":
        target = target.contiguous()
    rows, columns = logits.shape
    device = logits.device
    start, size, widest = _layout(columns, group, world_size, rank, vocab_start, vocab_size, device)
    share = -(-size // world_size)
    out = _output(logits, grad)
    row_loss = torch.empty(rows, dtype=torch.float32, device=device)
    two: Literal["two_reads", "two_kernels"] = (
        "two_kernels" if algorithm == "two_kernels" or world_size > 1 else "two_reads"
    )
    if rows == 0:
        nothing = row_loss if reduction == "none" else row_loss.sum()
        return EntropyLossResult(nothing, row_loss, out, How(two, block_for(columns, block_cap, loss, two, share)))

    labels_mean = loss == "cross_entropy" and reduction == "mean"
    mean = 1.0 / rows if reduction == "mean" and not labels_mean else 1.0
    valid = min(max(size - start, 0), columns)
    peers = _peers(algorithm, exchange, group, world_size, device)
    if peers is not None:
        prepared = prepare(
            form(logits), form(target), None if out is None else form(out), device.index, loss=loss, valid=valid,
            vocab_start=start, vocab_size=size, ignore_index=ignore_index, reduce=reduction != "none",
            count=labels_mean, z_loss=z_loss > 0, label_smoothing=label_smoothing > 0,
            accumulate=isinstance(grad, Tensor), block_cap=block_cap, share=share, widest=widest,
            rank=rank, world_size=world_size,
        )  # fmt: skip
        if isinstance(prepared, Prepared):
            total = None if reduction == "none" else torch.empty((), dtype=torch.float32, device=device)
            with launching(device):
                workspace = local_workspace(device) if isinstance(peers, str) else peers
                workspace.enter()
                kernel = launch(
                    prepared, logits, target, out, row_loss, total, workspace, logits_scale=logits_scale,
                    temperature=temperature, z_loss=z_loss, grad_scale=grad_scale * mean, loss_scale=mean,
                )  # fmt: skip
            how = How("one_read", prepared.tiling.block, prepared.bytes_sent, (kernel,))
            return EntropyLossResult(row_loss if total is None else total, row_loss, out, how)
        if algorithm == "one_read":
            raise ValueError(
                f"algorithm='one_read' cannot do this: {prepared}; use 'auto', 'two_kernels' or 'two_reads'"
            )

    block = block_for(columns, block_cap, loss, two, share)
    with launching(device):
        total, kernels = two_pass.launch(
            logits, target, out, row_loss, group, two, block, loss=loss, reduction=reduction, valid=valid,
            vocab_start=start, vocab_size=size, ignore_index=ignore_index, logits_scale=logits_scale,
            temperature=temperature, label_smoothing=label_smoothing, z_loss=z_loss, grad_scale=grad_scale,
            accumulate=isinstance(grad, Tensor),
        )  # fmt: skip
    sent = two_pass.bytes_exchanged(rows, world_size, loss, label_smoothing)
    return EntropyLossResult(total, row_loss, out, How(two, block, sent, kernels))


def _check(
    logits: Any, target: Any, loss: Any, group: Any, vocab_start: Any, vocab_size: Any, reduction: Any,
    ignore_index: Any, block_cap: Any, exchange: Any, grad: Any,
) -> None:  # fmt: skip
    _checks.matrix("logits", logits)
    _checks.choice("loss", loss, LOSSES)
    _checks.choice("reduction", reduction, _checks.REDUCTIONS)
    _checks.choice("exchange", exchange, _checks.EXCHANGES)
    _checks.target(target, logits, loss)
    _checks.gradient(grad, logits, target)
    _checks.group(group)
    _checks.whole("ignore_index", ignore_index)
    _checks.block_cap(block_cap)
    if vocab_start is not None:
        _checks.whole("vocab_start", vocab_start, 0, _checks.MAX_COLUMNS)
    if vocab_size is not None:
        _checks.whole("vocab_size", vocab_size, 1, _checks.MAX_COLUMNS)
    if logits.device.type not in ("cuda", "cpu"):
        raise ValueError(f"logits must be on a CUDA device, or on a CPU in Triton's interpreter; got {logits.device}")
    if not INTERPRETED and logits.device.type != "cuda":
        raise RuntimeError(
            f"logits must be on a CUDA device, got {logits.device}; on a CPU the kernels run in Triton's interpreter "
            "only: set TRITON_INTERPRET=1 before triton is imported"
        )


def _peers(
    algorithm: str, exchange: str, group: dist.ProcessGroup | None, world_size: int, device: torch.device
) -> symmetric.PeerWorkspace | str | None:
    """Return the group's workspace, "alone" if there is one rank, or None if two kernels do the work."""
    asked = "algorithm='one_read'" if algorithm == "one_read" else "exchange='symmetric'"
    if algorithm in ("two_reads", "two_kernels") or (exchange == "nccl" and algorithm == "auto"):
        return None
    named = algorithm == "one_read" or exchange == "symmetric"
    if INTERPRETED:
        if named:
            raise RuntimeError(f"{asked} needs CUDA devices, not Triton's interpreter")
        return None
    if world_size == 1 or group is None:
        return "alone"
    found = symmetric.workspace(group, device)
    if isinstance(found, str):
        if not named:
            return None
        raise RuntimeError(f"{asked} is not available: {found}; use exchange='nccl' or 'auto'")
    return found


def _output(logits: Tensor, grad: str | Tensor) -> Tensor | None:
    if isinstance(grad, str) and grad == "new":
        return torch.empty_like(logits, memory_format=torch.contiguous_format)
    out = grad.detach() if isinstance(grad, Tensor) else logits if grad == "in_place" else None
    if out is not None:
        # Else autograd would not notice that a tensor saved for an earlier operation's backward was overwritten.
        torch.autograd.graph.increment_version(out)
    return out


def _layout(
    columns: int, group: dist.ProcessGroup | None, world_size: int, rank: int, vocab_start: int | None,
    vocab_size: int | None, device: torch.device,
) -> tuple[int, int, int | None]:  # fmt: skip
    """Return this rank's first column, the columns of the vocabulary, and the most of a rank (None: unknown)."""
    if group is not None and world_size > 1:
        if vocab_start is not None and vocab_size is not None:
            return vocab_start, vocab_size, None
        # Not cached by local size: if it changed on some ranks only, those would gather alone.
        mine = torch.tensor([columns, -1 if vocab_start is None else vocab_start], device=device)
        sizes, given = all_gather(mine, group, world_size).T.tolist()
        starts = [0, *itertools.accumulate(sizes)]
        if wrong := [each for each, told in enumerate(given) if told not in (-1, starts[each])]:  # on all ranks alike
            raise ValueError(
                "vocab_start must be where the columns of the ranks before end: "
                + ", ".join(f"{starts[each]} on rank {each}, got {given[each]}" for each in wrong)
            )
        start, total, widest = starts[rank], starts[-1], max(sizes)
    else:
        start, total, widest = 0, columns, columns
        if vocab_start not in (None, 0):
            raise ValueError(
                f"vocab_start must be 0 or None without a group of ranks that hold the rest, got {vocab_start}"
            )
    if total == 0:
        raise ValueError("logits must have a column, here or on another rank of the group")
    if vocab_size is not None and vocab_size > total:
        raise ValueError(f"vocab_size must be at most the {total} columns held in all, got {vocab_size}")
    return start, (total if vocab_size is None else vocab_size), widest
