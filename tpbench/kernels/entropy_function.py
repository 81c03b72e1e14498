"""The entropy loss and its gradient over a vocabulary sharded across tensor-parallel ranks: see `entropy_loss`."""

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
    """What ran."""

    algorithm: Literal["two_reads", "two_kernels", "one_read"]
    block: int
    """Columns of the kernels' block."""
    bytes_sent: int = 0
    """By this rank to its peers."""
    kernels: tuple[Any, ...] = ()
    """Those that read the logits, as Triton compiled them (see `compiled.worst`); each None in the interpreter."""


@dataclass(frozen=True)
class EntropyLossResult:
    """What `entropy_loss` returns."""

    loss: Tensor
    """fp32 scalar; (rows,) with reduction="none". The same bits on every rank of the group."""
    row_loss: Tensor
    """(rows,) fp32: each row's loss, 0 where it does not count."""
    grad: Tensor | None
    """(rows, local vocab): of the (reduced) loss with respect to the local logits, times grad_scale."""
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
    """The loss of each row and, in the same go, the gradient with respect to the local logits.

    With x = logits_scale * logits, p = softmax(x), t = logits_scale / temperature * target and q = softmax(t), all over
    the whole vocabulary of V = vocab_size columns, a row's loss is

    - cross_entropy: (1 - e) * -log p[label] + e * mean(-log p), with e = label_smoothing (Szegedy et al. 2016,
      arXiv:1512.00567, section 7, as in torch.nn.functional.cross_entropy);
      gradient by x: p - (1 - e) * onehot(label) - e / V
    - soft_cross_entropy: -sum(q log p), gradient p - q (Hinton et al. 2015, arXiv:1503.02531, equation 2)
    - forward_kl: KL(q || p) = sum(q (log q - log p)), gradient p - q (Kullback and Leibler 1951,
      doi:10.1214/aoms/1177729694, equation 2.4; the same gradient as soft_cross_entropy, whose loss is larger by q's
      entropy)
    - reverse_kl: KL(p || q) = sum(p (log p - log q)), gradient p * (log p - log q - KL(p || q)) (for language models
      Gu et al. 2023, arXiv:2306.08543, equation 1)

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
            shaped like the logits, of any supported dtype, is added to in fp32. Autograd counts the writing: where a
            backward to come needs what was written over, it raises RuntimeError.
        grad_scale: factor on the gradient (not on the loss), as of a loss scaler or of gradient accumulation.
        block_cap: most columns in a kernel's block, a power of two; "auto" takes the one that was fastest when it was
            measured (`block_caps`): nothing is tuned here, and ranks choose alike.
        exchange: how statistics travel. "symmetric": within one kernel, which reads each logit once, through memory
            that the ranks share over NVLink; on a group's first use its ranks set that up together. "nccl": between
            two kernels, by one all-gather through the group's backend (gloo on a CPU). "auto": symmetric where the
            ranks are GPUs of one machine that reach each other's memory, else nccl. Say "nccl" where collectives of
            other streams may run at the same time, as with FSDP's: the symmetric kernel takes the whole GPU until all
            ranks have answered, and a collective that began on one rank only would keep that rank from it. Where no
            kernel of one pass fits (label_smoothing, a grad to accumulate into, targets of another dtype, very long
            rows, a rank with far more than its share) two do it, whatever is asked for; with vocab_start and vocab_size
            given ranks do not know each other's columns, and one with too many raises. On one rank nothing is
            exchanged: "nccl" is algorithm two_reads there, the others are one_read where it fits.
        algorithm: "two_reads": one kernel whose programs read their row twice, for its statistics and for its
            gradient; on one rank only. "two_kernels": the first kernel stores each row's statistics, so that the second
            reads the logits once. "one_read": one persistent kernel that reads each logit once in all; over several
            ranks it needs exchange="symmetric". "auto": the exchange decides.

    A row whose logits are -inf throughout has no softmax: its loss and gradient are NaN. A weight on a probability of
    zero makes the loss infinite, as it should, and reverse_kl's gradient then is NaN.

    Raises:
        TypeError, ValueError: naming the argument that is wrong and what would be right, also if an algorithm that
            was asked for by name cannot do it.
        RuntimeError: logits on a CPU and not in the interpreter; exchange="symmetric" where it is not available; a
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
    """The group's workspace; a word where no rank is needed; None where two kernels do the work."""
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
        # Or autograd would take what an operation before this one kept for its backward for what it was.
        torch.autograd.graph.increment_version(out)
    return out


def _layout(
    columns: int, group: dist.ProcessGroup | None, world_size: int, rank: int, vocab_start: int | None,
    vocab_size: int | None, device: torch.device,
) -> tuple[int, int, int | None]:  # fmt: skip
    """The first column here, the columns of the whole vocabulary, and the most that a rank holds, if that is known."""
    if group is not None and world_size > 1:
        if vocab_start is not None and vocab_size is not None:
            return vocab_start, vocab_size, None
        # Not remembered by local size: that may change on some ranks only, and those would gather alone.
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
