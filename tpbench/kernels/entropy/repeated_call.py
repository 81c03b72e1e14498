"""Calls of `entropy_loss` of a form that was seen before: they skip checks, choices and torch's dispatcher.

Two calls have one form if their options are equal, and each tensor's shape, strides, dtype, device and alignment. Only
calls that one kernel does, and that write a new gradient or none, are repeated this way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tpbench.kernels.entropy.launch_rows import How
from tpbench.kernels.two_pass.launch import launching

MOST_REMEMBERED = 256
"""Most forms that are remembered. This bounds memory: the number of rows may differ by call."""

_PLAIN = {Tensor, torch.nn.Parameter}
"""Types of tensors with memory of their own. Others, such as DTensor, may have none."""

Strided: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a new tensor."""

# This function skips the parsing of arguments and the dispatcher, where torch.empty spends most of its time. Compiled
# code of torch calls the same function. It allocates on the current device.
_empty_strided: Callable[..., Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


class RepeatedCall:
    """Repeats a call for other tensors of the same form. The results are those of `entropy_loss`."""

    def __init__(self, how: How, loss: Tensor, row_loss: Tensor, grad: Tensor | None) -> None:
        """`how`: of the first call, with the launch of its kernel. The tensors are that call's results."""
        assert how.relaunch is not None
        self.how, self.relaunch, self.device = how, how.relaunch, row_loss.device
        self.row_loss, self.grad = _strided(row_loss), None if grad is None else _strided(grad)
        self.total = None if loss is row_loss else _strided(loss)

    def __call__(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queue the kernel on the current stream. Return the loss, the row losses and the gradient."""
        with launching(self.device):
            grad = None if self.grad is None else self._new(self.grad)
            row_loss = self._new(self.row_loss)
            total = None if self.total is None else self._new(self.total)
            self.relaunch(logits, target, grad, row_loss, total)
        return row_loss if total is None else total, row_loss, grad

    def _new(self, like: Strided) -> Tensor:
        if _empty_strided is None or self.device.type != "cuda":
            shape, strides, dtype = like
            return torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
        return _empty_strided(*like)


def _strided(tensor: Tensor) -> Strided:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


_remembered: dict[Hashable, RepeatedCall] = {}


def call_form(logits: Any, target: Any, options: tuple[Any, ...]) -> Hashable | None:
    """Return the form of a call, or None if such a call is never repeated.

    Arguments may be anything: nothing is checked. Equal options of different types, such as 1 and True, make different
    forms, because not all types are valid.
    """
    if not (type(logits) in _PLAIN and type(target) in _PLAIN):
        return None
    if logits.layout is not torch.strided or target.layout is not torch.strided:
        return None
    return (_tensor_form(logits), _tensor_form(target), options, tuple(map(type, options)))


def _tensor_form(tensor: Any) -> Hashable:
    return (
        type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16,
        tensor.is_neg(),
    )  # fmt: skip


def find(form: Hashable | None) -> RepeatedCall | None:
    """Return the repetition of a call of this form, or None if there was no such call."""
    try:
        return _remembered.get(form)
    except TypeError:  # an option that has no hash is not valid
        return None


def remember(form: Hashable | None, call: RepeatedCall) -> None:
    """Repeat later calls of this form. None: there is nothing to remember."""
    if form is None:
        return
    if len(_remembered) >= MOST_REMEMBERED:
        _remembered.clear()
    _remembered[form] = call
