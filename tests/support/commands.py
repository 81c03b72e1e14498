"""Commands as users call them: a wrong request is printed, and its exit code is 2."""

from collections.abc import Sequence

from tpbench.console import information


def report(arguments: Sequence[str]) -> int | None:
    """Run `python -m tpbench report`, or `compare` or `history`, and return its exit code."""
    return information(list(arguments) if set(arguments[:1]) & {"compare", "history"} else ["report", *arguments])


def predict(arguments: Sequence[str]) -> int | None:
    """Run `python -m tpbench predict` and return its exit code."""
    return information(["predict", *arguments])
