"""The entropy loss of some rows of logits: choose the kernels and launch them. All arguments are checked before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.kernels import symmetric, two_pass
from tpbench.kernels.losses import LABEL_LOSSES
from tpbench.kernels.one_pass.launch import Relaunch, launch
from tpbench.kernels.one_pass.plan import Prepared, form, prepare
from tpbench.kernels.one_pass.workspace import local_workspace
from tpbench.kernels.two_pass import INTERPRETED, block_for, launching
from tpbench.kernels.vocabulary import Vocabulary


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
    relaunch: Relaunch | None = field(default=None, repr=False, compare=False)
    """Does the same for other tensors of the same form, if one kernel computes everything."""


@dataclass(frozen=True)
class RowLoss:
    """The loss of a row, with the options of `entropy_loss` that are the same for all rows."""

    loss: str
    group: dist.ProcessGroup | None
    vocabulary: Vocabulary
    ignore_index: int
    logits_scale: float
    temperature: float
    """Softens target logits only."""
    label_smoothing: float
    z_loss: float
    softcap: float
    """0: no cap."""
    target_softcap: float
    block_cap: int | Literal["auto"]
    exchange: str
    algorithm: str

    @property
    def has_labels(self) -> bool:
        return self.loss in LABEL_LOSSES

    @property
    def target_scale(self) -> float:
        """Factor on target logits."""
        return self.logits_scale / self.temperature

    @property
    def is_logprob(self) -> bool:
        """True if the kernels store the negative of `formula`."""
        return self.loss == "logprob"

    @property
    def formula(self) -> str:
        """The loss that the kernels compute: a log-probability is the negative cross-entropy."""
        return "cross_entropy" if self.is_logprob else self.loss

    @property
    def two_pass_algorithm(self) -> Literal["two_reads", "two_kernels"]:
        return "two_kernels" if self.algorithm == "two_kernels" or self.vocabulary.world_size > 1 else "two_reads"

    def block(self, columns: int) -> int:
        """Return the column block of the two-pass kernels."""
        return block_for(columns, self.block_cap, self.formula, self.two_pass_algorithm, self.vocabulary.share)


@dataclass(frozen=True)
class Outputs:
    """Tensors that a launch fills, and the scales of their values."""

    row_loss: Tensor
    """(rows,) fp32."""
    row_entropy: Tensor | None = None
    """(rows,) fp32."""
    grad: Tensor | None = None
    """(rows, local vocab). It may be the logits."""
    total: Tensor | None = None
    """fp32 scalar: the sum of the row losses, times `mean`."""
    accumulate: bool = False
    """Add to `grad`."""
    mean: float = 1.0
    """Factor of the reduction on the total and the gradient, known to the host."""
    count: bool = False
    """Divide the total and the gradient by the number of rows that count."""
    inverse_count: Tensor | None = None
    """(1,) fp32: 1 / that number, if it is not the number of these rows."""
    grad_scale: float = 1.0
    row_grad: Tensor | None = None
    """(rows,) fp32: upstream gradient of each row's loss."""
    entropy_grad: Tensor | None = None
    """(rows,) fp32: upstream gradient of each row's entropy."""


def launch_rows(loss: RowLoss, logits: Tensor, target: Tensor, outputs: Outputs) -> How:
    """Queue the kernels for at least one row of logits on the current stream.

    Raises RuntimeError or ValueError if an exchange or an algorithm that was asked for by name cannot do it.
    """
    how = _one_pass(loss, logits, target, outputs)
    return _two_pass(loss, logits, target, outputs) if how is None else how


def _grad_scale(loss: RowLoss, outputs: Outputs) -> float:
    scale = outputs.grad_scale * outputs.mean
    return -scale if loss.is_logprob else scale


def _one_pass(loss: RowLoss, logits: Tensor, target: Tensor, outputs: Outputs) -> How | None:
    """Launch the kernel that reads each logit once. Return None if it cannot compute this loss, or if the
    caller chose another algorithm or exchange."""
    vocabulary, out, device = loss.vocabulary, outputs.grad, logits.device
    peers = _peers(loss.algorithm, loss.exchange, loss.group, vocabulary.world_size, device)
    if peers is None:
        return None
    prepared: Prepared | str
    if outputs.row_entropy is not None or outputs.row_grad is not None or loss.softcap or loss.target_softcap:
        prepared = "it has no entropy, no gradients of rows and no softcap"
    else:
        prepared = prepare(
            form(logits), form(target), None if out is None else form(out), device.index, loss=loss.formula,
            logprob=loss.is_logprob, valid=vocabulary.valid, vocab_start=vocabulary.start, vocab_size=vocabulary.size,
            ignore_index=loss.ignore_index, reduce=outputs.total is not None, count=outputs.count,
            z_loss=loss.z_loss > 0, label_smoothing=loss.label_smoothing > 0, accumulate=outputs.accumulate,
            block_cap=loss.block_cap, share=vocabulary.share, widest=vocabulary.widest, rank=vocabulary.rank,
            world_size=vocabulary.world_size,
        )  # fmt: skip
    if isinstance(prepared, str):
        if loss.algorithm == "one_read":
            raise ValueError(
                f"algorithm='one_read' cannot do this: {prepared}; use 'auto', 'two_kernels' or 'two_reads'"
            )
        return None
    with launching(device):
        workspace = local_workspace(device) if isinstance(peers, str) else peers
        workspace.enter()
        factors = {
            "logits_scale": loss.logits_scale, "temperature": loss.temperature, "z_loss": loss.z_loss,
            "grad_scale": _grad_scale(loss, outputs), "loss_scale": outputs.mean,
        }  # fmt: skip
        kernel = launch(
            prepared, logits, target, out, outputs.row_loss, outputs.total, workspace,
            inverse_count=outputs.inverse_count, **factors,
        )  # fmt: skip
    again = Relaunch(prepared, None if isinstance(peers, str) else peers, device, **factors)
    complete = outputs.inverse_count is None
    return How("one_read", prepared.tiling.block, prepared.bytes_sent, (kernel,), again if complete else None)


def _two_pass(loss: RowLoss, logits: Tensor, target: Tensor, outputs: Outputs) -> How:
    """Launch the kernels that read a row twice."""
    rows, columns = logits.shape
    vocabulary, entropy = loss.vocabulary, outputs.row_entropy is not None
    algorithm, block = loss.two_pass_algorithm, loss.block(columns)
    inverse_count = outputs.inverse_count
    with launching(logits.device):
        if outputs.count and inverse_count is None:
            inverse_count = two_pass.inverse_count(target, vocabulary.size, loss.ignore_index)
        kernels = two_pass.launch(
            logits, target, outputs.grad, outputs.row_loss, outputs.row_entropy, loss.group, algorithm, block,
            loss=loss.formula, logprob=loss.is_logprob, valid=vocabulary.valid, vocab_start=vocabulary.start,
            vocab_size=vocabulary.size, ignore_index=loss.ignore_index, logits_scale=loss.logits_scale,
            target_scale=loss.target_scale, label_smoothing=loss.label_smoothing, z_loss=loss.z_loss,
            softcap=loss.softcap, target_softcap=loss.target_softcap, inverse_count=inverse_count,
            grad_scale=_grad_scale(loss, outputs), entropy_scale=outputs.grad_scale, row_grad=outputs.row_grad,
            entropy_grad=outputs.entropy_grad, accumulate=outputs.accumulate,
        )  # fmt: skip
        if outputs.total is not None:
            two_pass.reduce(outputs.row_loss, inverse_count, outputs.mean, outputs.total)
    sent = two_pass.bytes_exchanged(rows, vocabulary.world_size, loss.loss, loss.label_smoothing, entropy)
    return How(algorithm, block, sent, kernels)


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
