"""Check of the values that a variant returns, so that a mistake in a variant gets a message that names the variant."""

from __future__ import annotations

from typing import Any

from tpbench.workloads import Variant


class WrongReturn(TypeError):
    """A variant returned a value of another type than its workload expects."""

    def __init__(self, message: str, file: str, line: int) -> None:
        super().__init__(message)
        self.file, self.line = file, line
        """The place where the variant's function is defined. No frame of the traceback lies there."""


def require(value: Any, expected: type, variant: Variant, what: str) -> Any:
    """Return the value that a variant returned. Raises WrongReturn if its type is not the expected one.

    `what` names in the message what returned the value: the variant's function, or its step.
    """
    if isinstance(value, expected):
        return value
    names = [name for name in getattr(expected, "__annotations__", {}) if not name.startswith("_")]
    fields = f" ({', '.join(names)})" if names else ""
    code = variant.prepare.__code__
    file, line = variant.place or (code.co_filename, code.co_firstlineno)
    message = f"{what} of {variant.name} must return the type {expected.__name__}{fields}, not {type(value).__name__}"
    raise WrongReturn(message, file, line)
