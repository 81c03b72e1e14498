"""`EntropyLoss`, the loss as a torch module with autograd, and what it shares with `LinearEntropyLoss`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from tpbench.kernels import checks, compiled
from tpbench.kernels.derivatives import GradientsInBackward, GradientsInForward, outside_of_graphs
from tpbench.kernels.entropy import EntropyLossResult, entropy_loss
from tpbench.kernels.objective import OF_EVERY_LOSS
from tpbench.kernels.repeated_call import PLAIN, RepeatedCalls, form_of
from tpbench.kernels.row_loss import LossResult, Options, TopK, Vocabulary

Result = TypeVar("Result", bound=LossResult)


class LossModule(torch.nn.Module):
    """A module for a function. `settings`: the function's keyword arguments, except those that the module makes.

    The losses have first derivatives in reverse mode only, and none by a target: backward under create_graph=True,
    tensors with a tangent and targets that require a gradient raise NotImplementedError.

    The first call checks that the columns of the ranks fit together (collective). Logits, weight and bias may be
    DTensors that the group shards along the vocabulary, and hidden states one that it replicates or shards along rows.
    """

    def __init__(self, function: Callable[..., Any], made: set[str], settings: dict[str, Any]) -> None:
        super().__init__()
        parameters = inspect.signature(function).parameters.values()
        defaults = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
        made |= {"row_grad", "entropy_grad", "row_inputs", *OF_EVERY_LOSS, *checks.POLICY_TENSORS} - {"temperature"}
        known = defaults.keys() - made
        if unknown := sorted(settings.keys() - known):
            name = type(self).__name__
            raise TypeError(f"{name} has no setting {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        self.settings = settings
        self.options = Options.of_arguments(defaults | settings)
        checks.options(self.options)
        if self.options.objective is not None:
            self.settings = {**settings, "loss": self.options.objective}
        self.text: str | None = None
        """The settings for graphs of torch.compile. None: they leave the module out."""
        self.columns: int | None = None
        """This rank's columns, once it is known that they fit to those of the other ranks."""
        self.metrics: dict[str, Tensor] | None = None
        """The metrics that a function as the loss returned in the last call, (rows,) each."""
        self.correct: Tensor | None = None
        """With correct=True: whether each row's label had the largest logit in the last call, (rows,) bool."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LossModule:
        """Return the module itself: it has no state, and a process group cannot be copied."""
        return self

    def kept(self, result: Result) -> Result:
        """Keep what a call returns beside its loss. torch takes long to set an attribute, so None isn't set again."""
        if result.metrics is not self.metrics or result.correct is not self.correct:
            self.metrics, self.correct = result.metrics, result.correct
        return result

    def arguments(self, target: Any, rows: dict[str, Any], **inputs: Any) -> dict[str, Any]:
        """Return the settings and what a call got beside its target, as arguments of the module's function.

        Raise if a tensor has no memory, if a target needs a gradient, or if the call has an unknown argument. Masks and
        other tensors of rows that the kernels read in fp32 become that.
        """
        takes = (*OF_EVERY_LOSS, *(() if self.options.objective else checks.POLICY_TENSORS))
        others = {name: rows[name] for name in sorted(rows.keys() - takes)}
        if others and self.options.objective is None:
            raise TypeError(
                f"a call has no argument {', '.join(others)}: {type(self).__name__}() takes settings, and a call "
                f"{', '.join(takes)}"
            )
        targets = _tensors_of(target) | {name: value for name, value in rows.items() if isinstance(value, Tensor)}
        for name, tensor in (inputs | targets).items():
            checks.memory(name, tensor)  # torch.func would raise another error before the function's checks
        _refuse_learning(targets)
        named = self.settings | {name: value for name, value in rows.items() if name not in others}
        for name in ("row_weight", "temperature", *checks.POLICY_TENSORS):
            if isinstance(named.get(name), Tensor):
                named[name] = named[name].float()
        return named if self.options.objective is None else {**named, "row_inputs": others}

    def local(self, name: str, value: Any, dimension: int, or_replicated: bool = False) -> Any:
        """Return this rank's tensor of a DTensor that the module's group shards along a dimension.

        A module without a group takes the group, the first column and the size of the vocabulary from its first one.
        """
        if not hasattr(value, "to_local"):
            return value
        mesh, placement = value.device_mesh, value.placements[0]
        is_sharded = mesh.ndim == 1 and placement.is_shard(dimension)
        if is_sharded and not or_replicated and self.options.group is None:
            group, columns = mesh.get_group(), value.shape[dimension]
            start = min(group.rank() * -(-columns // group.size()), columns)
            place = {"group": group, "vocab_start": start, "vocab_size": self.options.vocab_size or columns}
            self.settings, self.options = {**self.settings, **place}, replace(self.options, **place)
            self.text = None if self.text is None else compiled.text_of(self.settings)
        own = self.options.group
        fits = is_sharded or (or_replicated and mesh.ndim == 1 and placement.is_replicate())
        if not fits or own is None or mesh.get_group().group_name != own.group_name:
            raise TypeError(
                f"{name} must be this rank's tensor, or {'replicated or ' * or_replicated}sharded by the loss's group "
                f"alone along dimension {dimension} and not {value.placements}, got a DTensor: pass {name}.to_local() "
                f"if that is this rank's tensor. If FSDP shards the {name}, call the loss in the forward of the FSDP "
                "unit that holds it"
            )
        value = value.to_local()
        # A collective of this tensor may not have ended. A copy waits for it, and has the gradient that wait() loses.
        return value.clone() if hasattr(value, "trigger_wait") else value

    def check_columns(self, name: str, columns: int, device: torch.device) -> None:
        """In a first call, raise ValueError on all ranks if their columns don't fit together. Collective then.

        Without vocab_start and vocab_size the function checks this in each call.
        """
        options = self.options
        if options.group is None or options.vocab_start is None or options.vocab_size is None:
            return
        if self.columns is None and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            Vocabulary.of_shard(options, columns, device, name, check=True)
            self.columns = columns
        elif self.columns not in (None, columns):
            raise ValueError(
                f"{name} must have {self.columns} columns, as in the first call, got {columns}: with vocab_start and "
                "vocab_size a module takes one size"
            )

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())


class EntropyLoss(LossModule):
    """The autograd version of `entropy_loss`: forward computes loss and gradient, backward scales the gradient.

    `settings` are the keyword arguments of `entropy_loss` except grad, row_grad, entropy_grad and entropy. The tensors
    of loss="policy" are arguments of `forward`. The gradient gets new memory. With in_place=True it overwrites the
    logits during forward, and nothing else may read them afterwards. An operation that saved them for its own backward,
    such as tanh, then raises RuntimeError.

    torch.compile takes the module into its graphs, where in_place=True has no effect. It leaves out a module with a
    function as the loss or with correct=True, and calls with a DTensor or with a divisor that is a number.

    Backward multiplies by the upstream gradient in fp32. The gradient was already rounded to the logits' dtype, so an
    upstream gradient that isn't a power of two causes a second rounding. grad_scale does not: pass known factors there.
    If the upstream gradient is 1, which is tested on the device, backward changes nothing. It works in place, so a
    second backward through the same forward raises RuntimeError.

    For fp16 logits and reduction="mean", the gradient is stored times a power of two near the number of rows, and
    backward divides by it. A loss scaler moves small gradients into fp16's range by the upstream gradient. That is too
    late for gradients that the division by the rows rounded to zero.
    """

    def __init__(self, *, in_place: bool = False, **settings: Any) -> None:
        super().__init__(entropy_loss, {"grad", "entropy"}, settings)
        checks.choice("in_place", in_place, False, True)
        self.in_place = in_place
        self.text = None if self.options.objective or self.options.correct else compiled.text_of(self.settings)
        self.remembered = RepeatedCalls()

    def extra_repr(self) -> str:
        return ", ".join(filter(None, [super().extra_repr(), "in_place=True" if self.in_place else ""]))

    def forward(self, logits: Tensor, target: Tensor | TopK, **rows: Any) -> Tensor:
        """Return the loss, an fp32 scalar, or (rows,) with reduction="none".

        logits: (rows, local vocab). target: as for `entropy_loss`. rows: row_weight, temperature, divisor, for
        loss="policy" its tensors, old_logprobs, advantages, and perhaps ref_logprobs, and for a function the tensors
        that it takes, and perhaps sequence_lengths and columns. They get no gradient.
        """
        rows = {name: value for name, value in rows.items() if value is not None}
        in_graph = torch.compiler.is_compiling() and all(type(each) in PLAIN for each in (logits, *rows.values()))
        if in_graph and self.text is not None:
            _refuse_learning(_tensors_of(target) | rows)
            return compiled.loss_in_graph(self.text, logits, target, rows, learns_from(logits))
        return self._outside_of_graphs(logits, target, rows)

    @outside_of_graphs
    def _outside_of_graphs(self, logits: Tensor, target: Tensor | TopK, rows: dict[str, Any]) -> Tensor:
        logits = self.local("logits", logits, 1)
        learns = learns_from(logits)
        if learns and self.options.objective is not None and self.options.reduction == "none":
            # The loss of a row may depend on other rows, so that each upstream gradient needs derivatives of its own.
            named = self._checked(logits, target, rows)

            def computed(inputs: Any, target: Any, named: Any, wanted: Sequence[bool]) -> tuple[Any, tuple[Any]]:
                grad: Any = ("none", "in_place" if self.in_place else "new")[wanted[0]]
                result = entropy_loss(inputs[0], target, grad=grad, **named)
                return result, (result.grad,)

            return GradientsInBackward.apply(computed, self.kept, (target, named), logits)
        call = self.call_of(logits, target, rows, learns)

        def compute() -> tuple[Tensor, tuple[Tensor | None], float]:
            result = self.kept(call(logits, target, rows))
            return result.loss, (result.grad,), self.options.stored_scale(logits.shape[0], logits.dtype)

        if not learns:
            return compute()[0]
        return GradientsInForward.apply(compute, logits)

    def _checked(self, logits: Tensor, target: Any, rows: dict[str, Any]) -> dict[str, Any]:
        """Return `arguments`, once it is known that the ranks' columns fit together. Collective in a first call."""
        named = self.arguments(target, rows, logits=logits)
        self.check_columns("logits", logits.shape[-1] if logits.dim() else 0, logits.device)
        return named

    def call_of(
        self, logits: Tensor, target: Tensor | TopK, rows: dict[str, Any], learns: bool
    ) -> Callable[..., EntropyLossResult]:
        """Return a function of logits, target and rows that repeats a call of this form, or else checks the call."""
        form_of_call = form_of(logits, target, {**rows, "learns": learns, "may_learn": torch.is_grad_enabled()})
        if (repeated := self.remembered.get(form_of_call)) is not None:
            return repeated
        arguments = self._checked(logits, target, rows)

        def first_call(logits: Tensor, target: Any, rows: dict[str, Any]) -> EntropyLossResult:
            arguments["grad"] = "none" if not learns else "in_place" if self.in_place else "new"
            if learns:
                scale = self.options.stored_scale(len(logits), logits.dtype)
                arguments["grad_scale"] = self.options.grad_scale * scale
            result = entropy_loss(logits, target, **arguments)
            if all(arguments.get(name) is value for name, value in rows.items()):  # the kernels read these tensors
                self.remembered.add(form_of_call, result, target, arguments)
            return result

        return first_call


def _tensors_of(target: Any) -> dict[str, Any]:
    """Return the tensors of a target by name."""
    if not isinstance(target, (tuple, list)):
        return {"target": target}
    names = ("target.values", "target.indices") if isinstance(target, TopK) else ("teacher_hidden", "teacher_weight")
    return dict(zip(names, target, strict=False))


def learns_from(tensor: Any) -> bool:
    """Return whether a tensor needs a gradient."""
    return torch.is_grad_enabled() and getattr(tensor, "requires_grad", False)


def _refuse_learning(targets: dict[str, Any]) -> None:
    for name, tensor in targets.items():
        if learns_from(tensor):
            raise NotImplementedError(f"{name} requires a gradient, which the losses don't have: detach() it")
