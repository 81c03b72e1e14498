"""Launch of a prepared call, and its repetition."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from tpbench.kernels.cached_launch import unobserved
from tpbench.kernels.one_pass import workspace as memory
from tpbench.kernels.one_pass.parameters import Mailbox, Scales
from tpbench.kernels.one_pass.plan import Prepared

LOG2_E = math.log2(math.e)


def launch(
    prepared: Prepared, logits: Tensor, target: Tensor, grad: Tensor | None, row_loss: Tensor, total: Tensor | None,
    workspace: memory.Workspace, *, logits_scale: float, temperature: float, z_loss: float, grad_scale: float,
    loss_scale: float, inverse_count: Tensor | None = None,
) -> Any:  # fmt: skip
    """Queue the kernel on the current stream. It stores row_loss and, where they are not None, grad and total.

    inverse_count: (1,) fp32, 1 / the rows that count. It is needed if they are counted and `total` is None.
    Returns the compiled kernel.
    """
    workspace.reserve(prepared.words)
    total = inverse_count if total is None else total
    scales = _scales(logits_scale, temperature, z_loss, grad_scale, loss_scale)
    return prepared.kernel(
        prepared.programs,
        (*_of_the_call(logits, target, grad, row_loss, total), *_mailbox(workspace)),
        prepared.integers,
        scales,
        _exchange(prepared, workspace),
        arrange=_parameters,
    )


class Relaunch:
    """Launches the kernel of a call again, for other tensors of the same form."""

    def __init__(
        self, prepared: Prepared, peers: memory.Workspace | None, device: torch.device, **factors: float
    ) -> None:
        """`peers`: the workspace of the group. None: one rank, which has a workspace for each stream. `factors`: the
        factors that `launch` gets by name."""
        self.prepared, self.peers, self.device, self.factors = prepared, peers, device, factors
        self.state: tuple[Any, ...] | None = None
        """The workspace, its size and the longest wait, for which the arguments were made."""
        self.run: Callable[..., None] | None = None
        self.arguments: tuple[Any, ...] = ()
        """The arguments after the tensors of the call."""

    def __call__(
        self, logits: Tensor, target: Tensor, grad: Tensor | None, row_loss: Tensor, total: Tensor | None
    ) -> None:
        """Queue the kernel on the current stream of the device, which must be the current one."""
        workspace = memory.local_workspace(self.device) if self.peers is None else self.peers
        workspace.enter()
        if (workspace, workspace.half, memory.WAIT_LIMIT_S) == self.state and unobserved(self.prepared.kernel.kernel):
            assert self.run is not None
            self.run(*_of_the_call(logits, target, grad, row_loss, total), *self.arguments)
            return
        compiled = launch(
            self.prepared, logits, target, grad, row_loss, total, workspace, inverse_count=None, **self.factors
        )
        if isinstance(compiled, CompiledKernel):
            self._keep(compiled, workspace)

    def _keep(self, compiled: CompiledKernel, workspace: memory.Workspace) -> None:
        """Keep everything of a launch except for the tensors of its call."""
        prepared = self.prepared
        self.run = compiled[prepared.programs, 1, 1]
        arranged = _parameters(
            (*[None] * _CALL_TENSORS, *_mailbox(workspace)), prepared.integers, _scales(**self.factors),
            _exchange(prepared, workspace),
        )  # fmt: skip
        self.arguments = (*arranged[_CALL_TENSORS:], *prepared.kernel.constants_in_place)
        self.state = workspace, workspace.half, memory.WAIT_LIMIT_S


_CALL_TENSORS = 5
"""Number of the first parameters: tensors that differ by call."""


def _of_the_call(
    logits: Tensor, target: Tensor, grad: Tensor | None, row_loss: Tensor, total: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the tensors that differ by call. Any address stands for a missing one."""
    return logits, target, logits if grad is None else grad, row_loss, row_loss if total is None else total


def _mailbox(workspace: memory.Workspace) -> tuple[Tensor, ...]:
    return workspace.words, workspace.peers, workspace.control, workspace.failed


def _scales(
    logits_scale: float, temperature: float, z_loss: float, grad_scale: float, loss_scale: float
) -> tuple[float, ...]:
    k = float(logits_scale * LOG2_E)
    return k, k / temperature, float(z_loss), float(grad_scale * logits_scale), float(loss_scale)


def _exchange(prepared: Prepared, workspace: memory.Workspace) -> tuple[int, ...]:
    """Return the rank, the capacity and the size of the workspace, and the longest wait in ns."""
    half = workspace.half
    return prepared.rank, half // prepared.row_words, half, int(memory.WAIT_LIMIT_S * 1e9)


def _parameters(pointers: Any, integers: Any, scales: Any, more_integers: Any) -> tuple[Any, ...]:
    """Arrange the arguments as the parameters of the kernels."""
    return (*pointers[:_CALL_TENSORS], Mailbox(*pointers[_CALL_TENSORS:]), *integers, Scales(*scales), *more_integers)
