"""Calls of `entropy_loss` that repeat an earlier one of the same form: they only queue its kernels.

Two calls have one form if the same arguments are given, options are equal, and tensors have equal shapes, strides,
dtypes, devices and alignments. All arguments of a first call are checked. A repeated call skips checks, choices and
torch's dispatcher. Calls that accumulate into a tensor, and those with tensors that decide what is launched, such as a
divisor, are not repeated this way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from tpbench.kernels import LABEL_LOSSES
from tpbench.kernels.cached_launch import Remembered, form, launching
from tpbench.kernels.checks import is_traced, overwritten
from tpbench.kernels.kernel_arguments import RowInputs, RowOutputs, TopTarget
from tpbench.kernels.row_loss import TopK

Function = TypeVar("Function", bound=Callable[..., Any])
PLAIN = {Tensor, torch.nn.Parameter}
"""Types of tensors with memory of their own. Others, such as DTensor, may have none."""
_OPTIONS = {bool, int, float, str, type(None), *([dist.ProcessGroup] if dist.is_available() else [])}
"""Types of options, beside tuples. A call with an option of another type is never repeated."""
_NO_INPUTS = RowInputs()


def repeating(function: Function) -> Function:
    """Return `entropy_loss`, of which a call repeats an earlier one of the same form."""
    remembered = RepeatedCalls()

    @functools.wraps(function)
    def call(logits: Any, target: Any, **named: Any) -> Any:
        form_of_call = form_of(logits, target, named)
        if (repeated := remembered.get(form_of_call)) is not None:
            return repeated(logits, target, named)
        result = function(logits, target, **named)
        remembered.add(form_of_call, result, target, named)
        return result

    return cast("Function", call)


def form_of(logits: Any, target: Any, named: dict[str, Any]) -> Hashable:
    """Return the form of a call. Arguments may be anything: nothing is checked. None: the call is never repeated.

    Equal options of different types, such as 1 and True, make different forms, because not all types are valid.
    """
    if forward_ad._current_level >= 0 or is_traced():
        return None
    try:
        forms = [value if type(value) in _OPTIONS else _form(value) for value in named.values()]
        return _form(logits), _form(target), *named, *forms, *map(type, forms)
    except (RuntimeError, TypeError):  # a tensor of torch.func has no memory, an option without a hash is not valid
        return None


def _form(tensor: Any) -> Hashable:
    if type(tensor) is TopK:
        return _form(tensor.values), _form(tensor.indices), tensor.tail
    if type(tensor) is tuple:
        hash(tensor)
        return tensor
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or (tensor.data_ptr() == 0 and tensor.numel()):
        raise TypeError  # also for a tensor whose memory FSDP has freed
    return type(tensor), form(tensor), tensor.device, tensor.is_neg(), tensor.requires_grad


class RepeatedCalls(Remembered):
    """Calls that later ones of the same form repeat, by their form."""

    def add(self, form_of_call: Hashable, result: Any, target: Any, named: dict[str, Any]) -> None:
        """Remember a call if it did nothing but launch kernels, which it can launch again."""
        has_labels = named.get("loss", "cross_entropy") in LABEL_LOSSES
        made_contiguous = target[:2] if isinstance(target, TopK) else [target] * has_labels
        exchanges_sizes = named.get("group") is not None and None in (named.get("vocab_start"), named.get("vocab_size"))
        if form_of_call is None or result.how.relaunch is None or exchanges_sizes:
            return
        if all(tensor.is_contiguous() for tensor in made_contiguous):
            self[form_of_call] = RepeatedCall(result, named)


def overwrite(tensor: Tensor) -> Tensor:
    """Return the tensor's memory, to be overwritten. Autograd notices it if an earlier operation saved the tensor."""
    torch.autograd.graph.increment_version(tensor)
    return tensor.detach()


class RepeatedCall:
    """Repeats a call for other tensors of the same form."""

    def __init__(self, result: Any, named: dict[str, Any]) -> None:
        """`result`: of the first call, with the launch of its kernels. `named`: its arguments by name."""
        self.result, self.how, self.relaunch = type(result), result.how, result.how.relaunch
        self.in_place = named.get("grad") == "in_place"
        self.inputs = [name for name in RowInputs._fields if name in named]
        self.device = result.row_loss.device
        total = None if result.loss is result.row_loss else result.loss
        outputs = (result.row_loss, result.entropy, result.logprobs, result.clipped, result.correct)
        self.forms = [
            tensor if tensor is None else (tuple(tensor.shape), tensor.stride(), tensor.dtype)
            for tensor in (None if self.in_place else result.grad, total, *outputs)
        ]
        # This function skips the parsing of arguments and the dispatcher, where torch.empty_strided spends most of its
        # time. Compiled code of torch calls the same function. It allocates on the current device.
        empty = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None) if self.device.type == "cuda" else None
        self.empty: Callable[..., Tensor] = empty or (
            lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=self.device)
        )

    def __call__(self, logits: Tensor, target: Any, named: dict[str, Any]) -> Any:
        """Queue the kernels on the current stream. Return the result of `entropy_loss`."""
        if self.in_place:
            overwritten("logits", logits, target)
        if type(target) is TopK:
            target = TopTarget(target.indices, target.values)
        inputs = RowInputs(**{name: named[name] for name in self.inputs}) if self.inputs else _NO_INPUTS
        with launching(self.device):
            grad, total, *rows = [form if form is None else self.empty(*form) for form in self.forms]
            if self.in_place:
                grad = overwrite(logits)
            outputs = RowOutputs(*rows)
            self.relaunch(logits, target, grad, inputs, outputs, total)
        return self.result(outputs.loss if total is None else total, *outputs, grad, self.how)
