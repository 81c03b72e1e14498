"""A variant that is ready to run, the part of a session that runs it, and the check of what the variant returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from numbers import Integral, Real
from typing import Any, Generic, TypeVar

from torch import Tensor

from tpbench.measure.audit import Inputs, tensors_of
from tpbench.suggestions import unknown
from tpbench.workloads import Variant, Workload


class WrongReturn(TypeError):
    """A variant, or a function of a workload, returned a value that is not expected."""

    def __init__(self, source: Variant | Callable[..., Any], message: str) -> None:
        """`source`: the variant, or a function of its workload, that returned the value."""
        super().__init__(message)
        place, function = (source.place, source.prepare) if isinstance(source, Variant) else (None, source)
        code = inspect.unwrap(function).__code__
        defined: tuple[str, int] = place or (code.co_filename, code.co_firstlineno)
        self.file, self.line = defined
        """The place where the function is defined. No frame of the traceback lies there."""


def require(value: Any, expected: type, variant: Variant, what: str) -> Any:
    """Return the value that a variant returned. Raises WrongReturn if its type is not the expected one.

    `what` names in the message what returned the value: the variant's function, or its step.
    """
    if isinstance(value, expected):
        return value
    names = [name for name in getattr(expected, "__annotations__", {}) if not name.startswith("_")]
    fields = f" ({', '.join(names)})" if names else ""
    returned = f"{what} of {variant.name} must return the type {expected.__name__}{fields}, not {type(value).__name__}"
    raise WrongReturn(variant, returned)


def bytes_sent(value: Any, variant: Variant) -> int:
    """Return the bytes that a variant says its rank sends. Raises WrongReturn if it is no number of bytes."""
    if isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < 2**63:
        return int(value)
    raise WrongReturn(variant, f"bytes_communicated of {variant.name} must be an int of at least 0, not {value!r:.40}")


def checked_columns(columns: Any, variant: Variant, workload: Workload) -> dict[str, Any]:
    """Return the columns of a row that a variant sets.

    Raises WrongReturn for a column that the workload doesn't leave to its variants, and for a value that is neither a
    number nor a text.
    """
    for name, value in require(columns, Mapping, variant, "columns").items():
        if name not in workload.variant_columns:
            complaint = unknown("column of a variant", name, workload.variant_columns)
            raise WrongReturn(variant, f"{variant.name} sets {name}: {complaint}")
        if not (value is None or isinstance(value, (Real, str))):
            kind = type(value).__name__
            raise WrongReturn(variant, f"{variant.name} sets {name}: its value must be a number or a text, not {kind}")
    return dict(columns)


OutputT = TypeVar("OutputT")
"""The workload's result of an iteration on one rank."""


@dataclass(frozen=True)
class Step(Generic[OutputT]):
    """A variant ready to run: calling it is one iteration."""

    run: Callable[[], OutputT]
    bytes_communicated: int | Callable[[], int] = 0
    """Bytes that this rank sends in an iteration. A function if only an iteration shows the number."""
    columns: Callable[[], Mapping[str, Any]] = dict
    """Return further columns of the row, after an iteration. They are equal on every rank."""
    restore: Callable[[], None] | None = None
    """Restore what an iteration changes, such as overwritten inputs. Its time counts as a part of the step only for a
    variant from outside this package."""

    communicates_in_kernels: Callable[[], bool] = lambda: False
    """Return true if all communication happens inside kernels that also compute, after an iteration."""

    def __call__(self) -> OutputT:
        return self.run()


class StepSession(Generic[OutputT]):
    """Runs the step of a variant and keeps its output until the check.

    `restore` is not timed. A variant from outside this package restores within its step, because its `restore` could
    compute the result of the next step.
    """

    def __init__(self, variant: Variant, step: Any, output: type[OutputT], inputs: Inputs | None = None) -> None:
        """`step`: what the variant's function returned. `output`: the type that the step must return. `inputs`: those
        that the step reads."""
        self.variant, self.output_type = variant, output
        self.audited_inputs = inputs or Inputs([])
        self.audited = inputs is not None
        self.fresh = self.keeps_output = False
        self.run: Step[OutputT] = require(step, Step, variant, "the function")
        for name, function in (("run", self.run.run), ("columns", self.run.columns), ("restore", self.run.restore)):
            if not (callable(function) or (name == "restore" and function is None)):
                kind = type(function).__name__
                raise WrongReturn(variant, f"{name} of the step of {variant.name} must be a function, not {kind}")
        self.trusted = variant.place is None
        self.output: OutputT | None = None

    @property
    def bytes_communicated(self) -> int:
        """Bytes that this rank sends in an iteration. They may be known only after a step."""
        sent = self.run.bytes_communicated
        return bytes_sent(sent() if callable(sent) else sent, self.variant)

    def columns_of_variant(self, workload: Workload) -> dict[str, Any]:
        """Return the columns of a row that the variant sets, after an iteration."""
        return checked_columns(self.run.columns(), self.variant, workload)

    def step(self) -> None:
        """Run one iteration. The last output is freed first, so that two never exist at once."""
        self.release()
        if not self.trusted:
            self._restore()
        self.output = self.run()

    @staticmethod
    def inputs_of(shard: Any) -> Inputs:
        """Return the inputs in a shard. Collective."""
        return Inputs(tensors_of(shard))

    def outputs(self) -> list[Tensor]:
        """Return the tensors of the last step's output, without those that a step does not need to compute."""
        if not isinstance(self.output, self.output_type):
            return []
        values: list[Any] = list(self.output.values()) if isinstance(self.output, dict) else []
        if is_dataclass(self.output):
            found = [each.name for each in fields(self.output) if not each.metadata.get("constant")]
            values = [getattr(self.output, name) for name in found]
        return [value for value in values if isinstance(value, Tensor)]

    def release(self) -> None:
        """Free the output of the last step."""
        if not self.keeps_output:
            self.output = None

    def restore(self) -> None:
        """Restore what a step changes, after changing the inputs if every iteration gets fresh ones."""
        if self.fresh:
            self.audited_inputs.change()
        if self.trusted:
            self._restore()

    def _restore(self) -> None:
        if self.run.restore is not None:
            self.run.restore()

    def take_output(self) -> OutputT:
        """Return the output of the last step and keep it no longer. Raises WrongReturn if it is of another type."""
        output: OutputT = require(self.output, self.output_type, self.variant, "the step")
        self.release()
        return output
