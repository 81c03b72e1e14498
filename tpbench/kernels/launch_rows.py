"""The entropy loss of some rows of logits: choose the kernels, launch them, and repeat a call of the same form.

All arguments of a first call are checked before. Two calls have one form if their options are equal, and each tensor's
shape, strides, dtype, device and alignment. A repeated call skips checks, choices and torch's dispatcher. Only calls
that one kernel does, and that write a new gradient or none, are repeated this way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tpbench.kernels import symmetric
from tpbench.kernels.cached_launch import INTERPRETED, MOST_REMEMBERED, launching
from tpbench.kernels.checks import is_traced
from tpbench.kernels.one_pass.launch import OnePassLaunch, form, prepare
from tpbench.kernels.row_loss import How, KernelTarget, RowLoss, Rows
from tpbench.kernels.row_terms import RowInputs, RowOutputs
from tpbench.kernels.two_pass import launch as two_pass

MOST_TOP_K = 256
"""Most columns of a teacher's top k in a one-pass kernel, which holds them in registers."""

_PLAIN = {Tensor, torch.nn.Parameter}
"""Types of tensors with memory of their own. Others, such as DTensor, may have none."""


def launch_rows(loss: RowLoss, logits: Tensor, target: KernelTarget, rows: Rows) -> How:
    """Queue the kernels for at least one row of logits on the current stream.

    Raises RuntimeError or ValueError if an exchange or an algorithm that was asked for by name cannot do it.
    """
    peers = _peers(loss, logits.device)
    if peers is not None:
        how = _one_pass(loss, None if peers == "one rank" else peers, logits, target, rows)
        if not isinstance(how, str):
            return how
        if loss.algorithm == "one_read":
            raise ValueError(f"algorithm='one_read' cannot do this: {how}; use 'auto', 'two_kernels' or 'two_reads'")
    with launching(logits.device):
        return two_pass.launch(loss, logits, target, rows)


def _one_pass(
    loss: RowLoss, peers: symmetric.PeerWorkspace | None, logits: Tensor, target: KernelTarget, rows: Rows
) -> How | str:
    """Launch the kernel that reads each logit once, or return the reason why none can do it."""
    if loss.wants_entropy or rows.accumulate or loss.label_smoothing or loss.softcap or loss.target_softcap:
        return "it has no label_smoothing, no softcap, no entropy, and accumulates into no tensor"
    if loss.top[0] > MOST_TOP_K:
        return f"it has room for {MOST_TOP_K} columns of a teacher's top k"
    of_target = form(target if isinstance(target, Tensor) else target.indices)
    prepared = prepare(
        form(logits), of_target, None if rows.grad is None else form(rows.grad), logits.device.index, loss.vocabulary,
        loss=loss.formula, ignore_index=loss.ignore_index, reduce=rows.total is not None, count=rows.count,
        z_loss=loss.z_loss > 0, block_cap=loss.block_cap, top=loss.top,
    )  # fmt: skip
    if isinstance(prepared, str):
        return prepared
    launch = OnePassLaunch(prepared, peers, logits.device, loss.scales(rows, unit=math.log(2.0)))
    with launching(logits.device):
        kernel = launch(logits, target, rows.grad, rows.inputs, rows.outputs, rows.total, rows.inverse_count)
    relaunch = launch if rows.inverse_count is None else None
    return How("one_read", prepared.tiling.block, prepared.bytes_sent, (kernel,), relaunch)


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
    if not isinstance(workspace, str):
        return workspace
    if by_name:
        raise RuntimeError(f"{asked} is not available: {workspace}; use exchange='nccl' or 'auto'")
    return None


class RepeatedCall:
    """Repeats a call for other tensors of the same form. The results are those of `entropy_loss`."""

    def __init__(self, how: How, rows: Rows) -> None:
        """`how`: of the first call, with the launch of its kernel. `rows`: that call's rows, with its results."""
        self.how, self.relaunch, self.device = how, how.relaunch, rows.outputs.loss.device
        self.forms = [
            result if result is None else (tuple(result.shape), result.stride(), result.dtype)
            for result in (rows.grad, rows.total, *rows.outputs)
        ]
        # This function skips the parsing of arguments and the dispatcher, where torch.empty_strided spends most of its
        # time. Compiled code of torch calls the same function. It allocates on the current device.
        empty = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None) if self.device.type == "cuda" else None
        self.empty: Callable[..., Tensor] = empty or (
            lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=self.device)
        )

    def __call__(
        self, logits: Tensor, target: KernelTarget, inputs: RowInputs
    ) -> tuple[Tensor | None, Any, RowOutputs]:
        """Queue the kernel on the current stream. Return the gradient, the total and the results of rows."""
        with launching(self.device):
            grad, total, *rows = [form if form is None else self.empty(*form) for form in self.forms]
            outputs = RowOutputs(*rows)
            self.relaunch(logits, target, grad, inputs, outputs, total)
        return grad, total, outputs


_remembered: dict[Hashable, RepeatedCall] = {}


def find(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Hashable | None, RepeatedCall | None]:
    """Return the form of a call, and the repetition of an earlier call of this form.

    A call whose form is None is never repeated. Arguments may be anything: nothing is checked. Equal options of
    different types, such as 1 and True, make different forms, because not all types are valid.
    """
    if forward_ad._current_level >= 0 or is_traced():
        return None, None
    for tensor in tensors:
        if tensor is not None and not (type(tensor) in _PLAIN and tensor.layout is torch.strided):
            return None, None
    try:
        forms = tuple([tensor if tensor is None else _tensor_form(tensor) for tensor in tensors])
        call = (forms, options, tuple(map(type, options)))
        return call, _remembered.get(call)
    except (RuntimeError, TypeError):  # a tensor of torch.func has no memory, an option without a hash is not valid
        return None, None


def _tensor_form(tensor: Any) -> Hashable:
    return type(tensor), form(tensor), tensor.device, tensor.is_neg()


def remember(call: Hashable, repeated: RepeatedCall) -> None:
    """Repeat later calls of this form."""
    if len(_remembered) >= MOST_REMEMBERED:
        _remembered.clear()
    _remembered[call] = repeated
