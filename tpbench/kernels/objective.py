"""A user's own loss: a function of log-probabilities, which autograd differentiates between two kernels.

The first kernel gives each row's log-probability and entropy. The function makes the row's loss of them, in torch
operations over (rows,). Autograd returns two factors for each row, and the second kernel carries them on to the logits.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.kernels.distributed import gather_values
from tpbench.kernels.kernel_arguments import RowInputs, RowOutputs

DIFFERENTIATED = ("logprobs", "entropy", "column_logprobs")
"""The parameters that carry gradients."""
COMPUTED = (*DIFFERENTIATED, "sequences")
"""The parameters that the kernels and the call compute."""
OF_EVERY_LOSS = ("row_weight", "temperature", "divisor", "sequence_lengths", "columns")
"""Arguments of a module's call beside its inputs, its target and the tensors of rows of its loss."""
RESERVED = ("hidden", "logits", "weight", "target", "bias", *OF_EVERY_LOSS)
"""Arguments of a call, which no parameter of a function may be called."""


@dataclass(frozen=True)
class Objective:
    """A function that returns the loss of each row, and the names of its parameters."""

    function: Callable[..., Any]
    name: str
    needed: tuple[str, ...]
    """The tensors of rows that a call must pass. `optional`: those with a default."""
    optional: tuple[str, ...]
    computed: tuple[str, ...]

    def __repr__(self) -> str:
        return self.name

    @classmethod
    def of(cls, function: Any) -> Objective:
        """Return the objective of a function. Raises TypeError or ValueError if its parameters don't fit."""
        if isinstance(function, Objective):
            return function
        name = getattr(function, "__name__", type(function).__name__)
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            raise TypeError(f"loss must be the name of a loss or a function, got {function!r}") from None
        for parameter in parameters:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(f"the loss {name} must have parameters that are passed by name, got {parameter}")
            if parameter.name in RESERVED:
                raise ValueError(f"the loss {name} has a parameter {parameter.name}, which is an argument of the call")
        computed = tuple(parameter.name for parameter in parameters if parameter.name in COMPUTED)
        if not set(DIFFERENTIATED) & set(computed):
            raise ValueError(f"the loss {name} must have one of the parameters {', '.join(DIFFERENTIATED)}")
        tensors = [parameter for parameter in parameters if parameter.name not in COMPUTED]
        needed = tuple(parameter.name for parameter in tensors if parameter.default is parameter.empty)
        optional = tuple(parameter.name for parameter in tensors if parameter.name not in needed)
        return cls(function, name, needed, optional, computed)

    def check(
        self, row_inputs: Mapping[str, Any], rows: int, lengths: Sequence[int] | None, columns: Any,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Raise unless `row_inputs` are the tensors of rows that the function needs, and `lengths` add up to `rows`."""
        takes = f"the loss {self.name} takes {', '.join((*self.needed, *self.optional)) or 'no tensors of rows'}"
        if missing := [name for name in self.needed if name not in row_inputs]:
            raise TypeError(f"{takes}: {', '.join(missing)} must be given")
        if unknown := sorted(row_inputs.keys() - {*self.needed, *self.optional}):
            raise TypeError(f"{takes}: it has no parameter {', '.join(unknown)}")
        if (columns is None) == ("column_logprobs" in self.computed):
            raise TypeError(
                f"columns, (rows, k), must be given if the loss takes column_logprobs, and only then: {takes}"
            )
        for name, values in {**row_inputs, **({} if columns is None else {"columns": columns})}.items():
            of = f"{name} must be a tensor of rows for the loss {self.name}"
            if not isinstance(values, Tensor):
                raise TypeError(f"{of}, got {type(values).__name__}")
            if values.device != device or values.shape[:1] != (rows,):
                raise ValueError(f"{of}, of shape ({rows}, ...) on {device}, got {(*values.shape,)} on {values.device}")
        if columns is not None and (columns.dim() != 2 or columns.dtype not in (torch.int32, torch.int64)):
            raise ValueError(f"columns must be ({rows}, k) in int64 or int32, got {(*columns.shape,)} {columns.dtype}")
        if lengths is None and "sequences" in self.computed:
            raise ValueError(f"sequence_lengths must be given, because the loss {self.name} takes sequences")
        fits = lengths is None or (all(isinstance(each, int) and each > 0 for each in lengths) and sum(lengths) == rows)
        if not fits:
            raise ValueError(
                f"sequence_lengths must be positive ints whose sum is {rows}, the rows; got {lengths!r:.80}"
            )

    def call(self, rows: int, given: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the function's losses, (rows,) fp32, and its metrics. Raise if it fails or returns something else."""
        versions = {name: _version(values) for name, values in given.items()}
        with self.named_errors():
            result = self.function(**given)
        if changed := [name for name, values in given.items() if _version(values) != versions[name]]:
            raise ValueError(f"the loss {self.name} must not change its arguments, but changed {', '.join(changed)}")
        losses, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        returns = f"the loss {self.name} must return"
        if not isinstance(metrics, dict):
            raise ValueError(f"{returns} metrics as a dict, got {type(metrics).__name__}")
        for name, values in {"losses": losses, **metrics}.items():
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            if shape != (rows,):
                raise ValueError(f"{returns} {name} of shape ({rows},), got {shape}")
        if not losses.is_floating_point():
            raise ValueError(f"{returns} losses in float32, got {losses.dtype}")
        return losses.float(), {name: values.detach() for name, values in metrics.items()}

    @contextlib.contextmanager
    def named_errors(self) -> Iterator[None]:
        """Name the function in errors of its own code."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise RuntimeError(f"the loss {self.name} raised {type(error).__name__}: {error}") from error


def _version(values: Tensor) -> int:
    """Return how often a tensor was changed in place."""
    return 0 if values.is_inference() else values._version


def _unchanged(saved: tuple[Tensor, int]) -> Tensor:
    values, version = saved
    if _version(values) != version:
        raise RuntimeError("a tensor that backward needs was modified by an inplace operation")
    return values


@contextlib.contextmanager
def _recording(wanted: bool) -> Iterator[None]:
    """Let autograd record operations, if wanted. Hooks on saved tensors, such as checkpointing's, don't see them."""
    # With hooks autograd no longer notices tensors that were changed.
    own = torch.autograd.graph.saved_tensors_hooks(lambda values: (values, _version(values)), _unchanged)
    with torch.set_grad_enabled(wanted), own:
        yield


_agreed: set[Any] = set()
"""The forms of calls whose tensors of rows the ranks have compared. All ranks remember the same ones of a group."""


@dataclass(frozen=True)
class RowObjective:
    """An objective with the tensors of rows of a call, or of a chunk."""

    objective: Objective
    inputs: Mapping[str, Tensor]
    ignored: Tensor
    """(rows,) bool: the rows that do not count."""
    lengths: tuple[int, ...]
    """The lengths of the sequences of the rows."""
    columns: Tensor | None = None
    """(rows, k): the columns whose log-probabilities the function takes."""
    metrics: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    """The function's metrics. `run` adds the tensor of its rows to each."""

    @classmethod
    def of_call(
        cls, objective: Objective, arguments: Mapping[str, Any], ignored: Tensor, vocab_size: int,
        group: dist.ProcessGroup | None,
    ) -> RowObjective:  # fmt: skip
        """Return an objective with a call's tensors of rows. arguments: the call's, by name.

        The first call of a function with this number of rows is collective. In it ranks try the function, and compare
        the shapes and dtypes of its tensors: one rank's error is raised on all. Later an error is raised on its own
        rank alone, as other errors of arguments are, because ranks cannot know of it without a collective in each call.
        Columns on a GPU are read in the first call only: later the host does not wait for them.
        """
        row_inputs, lengths = arguments["row_inputs"] or {}, arguments["sequence_lengths"]
        columns, rows, device = arguments["columns"], len(ignored), ignored.device
        form_of_call = objective.name, objective.needed, objective.optional, rows, group
        is_new = form_of_call not in _agreed
        peers = group if is_new and group is not None and group.size() > 1 else None
        error: Exception | None = None
        forms: dict[str, Any] = {}
        try:
            objective.check(row_inputs, rows, lengths, columns, device)
            if columns is not None and (is_new or device.type == "cpu"):
                outside = ((columns < 0) | (columns >= vocab_size)) & ~ignored[:, None]
                if outside.any():
                    raise ValueError(
                        f"columns must be from 0 to {vocab_size - 1} in rows that count, got {columns[outside][0]}"
                    )
            if peers is not None and rows:
                tensors = {**row_inputs, **({} if columns is None else {"columns": columns})}
                forms = {name: [str(values.dtype), *values.shape] for name, values in sorted(tensors.items())}
                forms["sequence_lengths"] = lengths and list(lengths)
                forms["loss"] = [objective.name, *objective.computed]
                copies = {name: values.clone() for name, values in row_inputs.items()}
                zeros = torch.zeros(rows, device=device)
                of_columns = None if columns is None else torch.zeros(columns.shape, device=device)
                trial = cls(objective, copies, ignored, tuple(lengths or ()))
                trial.run(RowOutputs(zeros.clone(), zeros, zeros), RowInputs(), 1.0, True, of_columns)
        except (RuntimeError, TypeError, ValueError) as raised:
            error = raised
        if peers is not None:
            of_ranks = gather_values(["" if error is None else str(error), forms], peers, device)
            first = of_ranks[0][1]
            for rank, (text, there) in enumerate(of_ranks):
                name = next((name for name in there | first if there.get(name) != first.get(name)), "")
                unequal = f"{name} differs between ranks: {first.get(name)} on rank 0, {there.get(name)} on rank {rank}"
                if error is None and (text or name):
                    error = ValueError(f"on rank {rank}: {text}" if text else unequal)
        if error is not None:
            raise error
        if is_new:
            _agreed.add(form_of_call)
        return cls(objective, row_inputs, ignored, tuple(lengths or ()), columns)

    def run(
        self, outputs: RowOutputs, inputs: RowInputs, factor: float | Tensor, gradient: bool,
        column_logprobs: Tensor | None,
    ) -> tuple[RowInputs, Tensor]:  # fmt: skip
        """Replace the rows' losses in `outputs` by the function's, and store its metrics.

        Return the factors of the gradient by row, if one is wanted, and by log-probability, (rows, 1 + k): those of the
        labels first. factor: of the reduction, on the gradient.
        """
        objective, ignored = self.objective, self.ignored
        given = {name: values.detach() for name, values in self.inputs.items()}
        if "sequences" in objective.computed:
            given["sequences"] = sequence_numbers(self.lengths, ignored.device)
        computed = zip(DIFFERENTIATED, (outputs.logprobs, outputs.entropy, column_logprobs), strict=True)
        leaves = {
            name: values.detach().requires_grad_(gradient) for name, values in computed if name in objective.computed
        }
        factors: dict[str, Tensor | None] = {}
        with _recording(gradient):
            losses, metrics = objective.call(len(ignored), {**leaves, **given})
            if gradient:
                upstream = (~ignored).float() * factor
                for of_row in (inputs.row_weight, inputs.row_grad):
                    upstream = upstream if of_row is None else upstream * of_row
                if losses.requires_grad:
                    with objective.named_errors():
                        grads = torch.autograd.grad(losses, [*leaves.values()], upstream, allow_unused=True)
                    factors = dict(zip(leaves, grads, strict=True))
                if all(grad is None for grad in factors.values()):
                    raise ValueError(f"the loss {objective} must return losses that depend on {' or '.join(leaves)}")
        if self.metrics and self.metrics.keys() != metrics.keys():
            got = " and ".join(f"({', '.join(names)})" for names in (self.metrics, metrics))
            raise ValueError(f"the loss {objective} must return the same metrics for all rows, got {got}")
        losses = losses.detach() if inputs.row_weight is None else losses.detach() * inputs.row_weight
        outputs.loss.copy_(losses.masked_fill(ignored, 0.0))
        for name, values in metrics.items():
            self.metrics[name].append(values.masked_fill(ignored, 0))
        of_logprobs, of_entropy, of_columns = (factors.get(name) for name in DIFFERENTIATED)
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(outputs.loss)
        of_all = of_logprobs[:, None] if of_columns is None else torch.cat((of_logprobs[:, None], of_columns), 1)
        if inputs.entropy_grad is not None:
            of_entropy = inputs.entropy_grad if of_entropy is None else of_entropy + inputs.entropy_grad
        of_entropy = None if of_entropy is None else of_entropy.contiguous()
        return RowInputs(of_all.sum(1), of_entropy, row_temperature=inputs.row_temperature), of_all


@functools.lru_cache(maxsize=16)
def sequence_numbers(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the number of each row's sequence, (rows,) int64. It is remembered, as a CUDA graph cannot copy lists."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device)
