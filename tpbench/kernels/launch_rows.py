"""The launch of the entropy loss of some rows of logits, and the choice of its kernels."""

from __future__ import annotations

import math

from torch import Tensor

from tpbench.kernels import symmetric
from tpbench.kernels.cached_launch import INTERPRETED, form, launching
from tpbench.kernels.one_pass.launch import OnePassLaunch, prepare
from tpbench.kernels.row_loss import KernelTarget, LaunchRecord, RowLoss, Rows
from tpbench.kernels.two_pass import launch as two_pass

MOST_TOP_K = 256
"""Most columns of a teacher's top k in a one-pass kernel, which holds them in registers."""
SOFTCAPS = 1e-30, 64.0
"""The least and the largest softcap of a one-pass kernel. Small logits under a larger cap would lose precision."""


def launch_rows(loss: RowLoss, logits: Tensor, target: KernelTarget, rows: Rows) -> LaunchRecord:
    """Queue the kernels for rows of logits on the current stream.

    Raises RuntimeError or ValueError if an exchange or an algorithm that was asked for by name cannot do it.
    """
    algorithm, exchange = loss.algorithm, loss.exchange
    if not len(logits):
        two_pass.reduced(rows, None)
        return LaunchRecord(loss.two_pass_algorithm, 0)
    if algorithm == "one_read" or (algorithm == "auto" and exchange != "nccl"):
        peers: symmetric.PeerWorkspace | str | None = None  # one rank exchanges nothing
        if INTERPRETED:
            peers = "needs CUDA devices, not Triton's interpreter"
        elif loss.group is not None and loss.vocabulary.world_size > 1:
            peers = symmetric.workspace(loss.group, logits.device)
            peers = f"is not available: {peers}; use exchange='nccl' or 'auto'" if isinstance(peers, str) else peers
        if isinstance(peers, str):
            if algorithm == "one_read" or exchange == "symmetric":
                asked = "algorithm='one_read'" if algorithm == "one_read" else "exchange='symmetric'"
                raise RuntimeError(f"{asked} {peers}")
        elif not isinstance(how := _one_pass(loss, peers, logits, target, rows), str):
            return how
        elif algorithm == "one_read":
            raise ValueError(f"algorithm='one_read' cannot do this: {how}; use 'auto', 'two_kernels' or 'two_reads'")
    with launching(logits.device):
        return two_pass.launch(loss, logits, target, rows)


def _one_pass(
    loss: RowLoss, peers: symmetric.PeerWorkspace | None, logits: Tensor, target: KernelTarget, rows: Rows
) -> LaunchRecord | str:
    """Launch the kernel that reads each logit once, or return the reason why none can do it."""
    if rows.accumulate:
        return "it accumulates into no tensor"
    if loss.softcap and not SOFTCAPS[0] <= loss.softcap <= SOFTCAPS[1]:  # also that of target logits, if they have one
        return "a softcap must be from {:g} to {:g} for the precision of its formula".format(*SOFTCAPS)
    if loss.top[0] and (loss.wants_entropy or loss.softcap):
        return "it has no softcap and no entropy against a teacher's top k"
    if rows.inputs.row_temperature is not None:
        return "it has one temperature for all rows"
    if loss.top[0] > MOST_TOP_K:
        return f"it has room for {MOST_TOP_K} columns of a teacher's top k"
    reduce = rows.total is not None and rows.inverse_count is None
    of_target = form(target if isinstance(target, Tensor) else target.indices)
    prepared = prepare(
        form(logits), of_target, None if rows.grad is None else form(rows.grad), logits.device.index, loss.vocabulary,
        ignore_index=loss.ignore_index, block_cap=loss.block_cap, reduce=reduce, count=rows.count,
        entropy_grad=loss.entropy_weight != 0.0 or rows.inputs.entropy_grad is not None,
        yields=peers is not None and (loss.exchange == "yielding" or (loss.exchange == "auto" and not peers.alone)),
        **loss.constants(rows.outputs.entropy is not None),
    )  # fmt: skip
    if isinstance(prepared, str):
        return prepared
    launch = OnePassLaunch(prepared, peers, logits.device, loss.scales(rows.mean, unit=math.log(2.0)))
    with launching(logits.device):
        total = rows.total if reduce else None
        kernel = launch(logits, target, rows.grad, rows.inputs, rows.outputs, total, rows.inverse_count)
    if not reduce:
        two_pass.reduced(rows, rows.inverse_count)
    relaunch = launch if rows.inverse_count is None else None
    return LaunchRecord("one_read", prepared.tiling.block, prepared.bytes_sent, (kernel,), relaunch)
