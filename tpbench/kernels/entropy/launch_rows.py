"""The entropy loss of some rows of logits: choose the kernels and launch them. All arguments are checked before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from tpbench.kernels import symmetric
from tpbench.kernels.one_pass.launch import Relaunch, launch
from tpbench.kernels.one_pass.plan import Prepared, form, prepare
from tpbench.kernels.one_pass.workspace import local_workspace
from tpbench.kernels.row_loss import Outputs, RowLoss, Scaling
from tpbench.kernels.two_pass import launch as two_pass
from tpbench.kernels.two_pass.launch import INTERPRETED, launching


@dataclass(frozen=True)
class How:
    """This record says which algorithm and kernels computed a loss, and how many bytes they sent to other ranks."""

    algorithm: Literal["two_reads", "two_kernels", "one_read"]
    block: int
    """Columns of the kernels' block."""
    bytes_sent: int = 0
    """Bytes that this rank sent to its peers."""
    kernels: tuple[Any, ...] = ()
    """The compiled kernels that read the logits (see `kernel_resources`). Each is None in the interpreter."""
    relaunch: Relaunch | None = field(default=None, repr=False, compare=False)
    """Does the same for other tensors of the same form, if one kernel computes everything."""


def launch_rows(loss: RowLoss, logits: Tensor, target: Tensor, outputs: Outputs, scaling: Scaling) -> How:
    """Queue the kernels for at least one row of logits on the current stream.

    Raises RuntimeError or ValueError if an exchange or an algorithm that was asked for by name cannot do it.
    """
    one_pass = _one_pass(loss, logits, target, outputs, scaling)
    return _two_pass(loss, logits, target, outputs, scaling) if one_pass is None else one_pass


def _one_pass(loss: RowLoss, logits: Tensor, target: Tensor, outputs: Outputs, scaling: Scaling) -> How | None:
    """Launch the kernel that reads each logit once.

    Return None if that kernel cannot compute this loss, or if the caller chose another algorithm or exchange.
    """
    device, total = logits.device, outputs.total
    peers = _peers(loss, device)
    if peers is None:
        return None
    prepared = _prepared(loss, logits, target, outputs, scaling)
    if isinstance(prepared, str):
        if loss.algorithm == "one_read":
            raise ValueError(
                f"algorithm='one_read' cannot do this: {prepared}; use 'auto', 'two_kernels' or 'two_reads'"
            )
        return None
    group_workspace = None if peers == "one rank" else peers
    factors = {
        "logits_scale": loss.logits_scale, "temperature": loss.temperature, "z_loss": loss.z_loss,
        "grad_scale": loss.grad_scale(scaling), "loss_scale": scaling.mean,
    }  # fmt: skip
    with launching(device):
        workspace = local_workspace(device) if group_workspace is None else group_workspace
        workspace.enter()
        kernel = launch(
            prepared, logits, target, outputs.grad, outputs.row_loss, total, workspace,
            inverse_count=scaling.inverse_count, **factors,
        )  # fmt: skip
    complete = scaling.inverse_count is None
    relaunch = Relaunch(prepared, group_workspace, device, **factors) if complete else None
    return How("one_read", prepared.tiling.block, prepared.bytes_sent, (kernel,), relaunch)


def _prepared(loss: RowLoss, logits: Tensor, target: Tensor, outputs: Outputs, scaling: Scaling) -> Prepared | str:
    """Return the launch of a one-pass kernel without addresses and factors, or the reason why none can do it."""
    if outputs.row_entropy is not None or scaling.row_grad is not None or loss.softcap or loss.target_softcap:
        return "it has no entropy, no gradients of rows and no softcap"
    vocabulary, grad = loss.vocabulary, outputs.grad
    return prepare(
        form(logits), form(target), None if grad is None else form(grad), logits.device.index, loss=loss.formula,
        logprob=loss.is_logprob, valid=vocabulary.valid, vocab_start=vocabulary.start, vocab_size=vocabulary.size,
        ignore_index=loss.ignore_index, reduce=outputs.total is not None, count=scaling.count, z_loss=loss.z_loss > 0,
        label_smoothing=loss.label_smoothing > 0, accumulate=outputs.accumulate, block_cap=loss.block_cap,
        share=vocabulary.share, widest=vocabulary.widest, rank=vocabulary.rank, world_size=vocabulary.world_size,
    )  # fmt: skip


def _two_pass(loss: RowLoss, logits: Tensor, target: Tensor, outputs: Outputs, scaling: Scaling) -> How:
    """Launch the kernels that go over a row twice."""
    rows, columns = logits.shape
    with launching(logits.device):
        kernels = two_pass.launch(loss, logits, target, outputs, scaling)
    sent = two_pass.bytes_exchanged(
        rows, loss.vocabulary.world_size, loss.loss, loss.label_smoothing, outputs.row_entropy is not None
    )
    return How(loss.two_pass_algorithm, two_pass.column_block(loss, columns), sent, kernels)


def _peers(loss: RowLoss, device: torch.device) -> symmetric.PeerWorkspace | Literal["one rank"] | None:
    """Return the workspace through which ranks exchange inside a one-pass kernel.

    "one rank": ranks exchange nothing. None: the two-pass kernels compute the loss.
    """
    algorithm, exchange = loss.algorithm, loss.exchange
    if algorithm in ("two_reads", "two_kernels") or (exchange == "nccl" and algorithm == "auto"):
        return None
    by_name = algorithm == "one_read" or exchange == "symmetric"
    asked = "algorithm='one_read'" if algorithm == "one_read" else "exchange='symmetric'"
    if INTERPRETED:
        if by_name:
            raise RuntimeError(f"{asked} needs CUDA devices, not Triton's interpreter")
        return None
    if loss.group is None or loss.vocabulary.world_size == 1:
        return "one rank"
    workspace = symmetric.workspace(loss.group, device)
    if isinstance(workspace, str):
        if not by_name:
            return None
        raise RuntimeError(f"{asked} is not available: {workspace}; use exchange='nccl' or 'auto'")
    return workspace
