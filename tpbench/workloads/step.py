"""A variant that is ready to run, and the checks of what a variant returns."""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Generic, TypeVar

from tpbench.measure.audit import Inputs
from tpbench.measure.session import Costs
from tpbench.suggestions import unknown
from tpbench.workloads import Variant


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
    """Return the value that the variant's function or step (`what`) returned, if its type is the expected one."""
    if isinstance(value, expected):
        return value
    names = [name for name in getattr(expected, "__annotations__", {}) if not name.startswith("_")]
    fields = f" ({', '.join(names)})" if names else ""
    returned = f"{what} of {variant.name} must return the type {expected.__name__}{fields}, not {type(value).__name__}"
    raise WrongReturn(variant, returned)


def count(value: Any, source: Variant | Callable[..., Any], name: str = "bytes_communicated") -> int:
    """Return the count, such as of bytes, that `source` states. Raises WrongReturn if it isn't a whole number."""
    if (number := _stored(value, int)) is not None and number >= 0:
        return int(number)
    of = source.name if isinstance(source, Variant) else source.__name__
    raise WrongReturn(source, f"{name} of {of} must be an int of at least 0, not {value!r:.40}")


def checked_columns(columns: Any, source: Variant | Callable[..., Any], valid: Mapping[str, type]) -> dict[str, Any]:
    """Return the columns of a row that a variant, or a function of its workload, sets.

    Raises WrongReturn for a column that is not among the valid ones, and for a value that is not of its type.
    """
    owner, name = ("variant", source.name) if isinstance(source, Variant) else ("workload", source.__name__)
    if not isinstance(columns, Mapping):
        raise WrongReturn(source, f"{name} must return its columns as a Mapping, not {type(columns).__name__}")
    checked = {}
    for column, value in columns.items():
        if column not in valid:
            raise WrongReturn(source, f"{name} sets {column}: {unknown(f'column of a {owner}', column, valid)}")
        checked[column] = _stored(value, valid[column])
        if checked[column] is None and value is not None:
            kind = valid[column]
            expected = "a number or a text" if kind is object else f"of the type {kind.__name__}"
            raise WrongReturn(source, f"{name} sets {column}: its value must be {expected}, not {value!r:.40}")
    return checked


_KINDS: dict[type, type] = {bool: bool, int: Integral, float: Real, str: str}


def _stored(value: Any, kind: type = object) -> Any:
    """Return a value as a column of this type stores it, or None if the column cannot hold it."""
    if isinstance(value, list) and kind in (list, object):
        numbers = [_stored(number, float) for number in value]
        return None if None in numbers else numbers
    if isinstance(value, bool) and kind not in (bool, object):
        return None
    kinds = [stored for stored in _KINDS if kind in (object, stored) and isinstance(value, _KINDS[stored])]
    stored = None
    with contextlib.suppress(OverflowError):
        stored = kinds[0](value) if kinds else None
    return stored if not isinstance(stored, int) or -(2**63) <= stored < 2**63 else None


OutputT = TypeVar("OutputT")


@dataclass(frozen=True)
class Step(Generic[OutputT]):
    """A variant ready to run: calling it is one iteration."""

    run: Callable[[], OutputT | Callable[[], OutputT]]
    """Run an iteration and return its output, or a function that returns the output if reading it takes the host."""
    bytes_communicated: int | Callable[[], int] = 0
    """Bytes that this rank sends in an iteration. A function if only an iteration shows the number."""
    columns: Callable[[], Mapping[str, Any]] = dict
    """Return further columns of the row, after an iteration. A row has those of rank 0."""
    restore: Callable[[], object] | None = None
    """Restore what an iteration changes, such as overwritten inputs. Only variants from outside are timed with it."""
    communicates_in_kernels: Callable[[], bool] = lambda: False
    """Return true if all communication happens inside kernels that also compute, after an iteration."""
    release: Callable[[], object] = lambda: None
    """Free what an iteration leaves, beside its output."""
    inputs: Inputs | None = None
    """The tensors that an iteration reads, if the workload's `step` names them. None: those of its inputs."""
    costs: Costs | None = None
    """The costs of an iteration, if the workload's `step` says so. None: those of the workload."""

    def __call__(self) -> OutputT | Callable[[], OutputT]:
        return self.run()
