"""tpbench compares implementations of tensor-parallel operations: which one is correct, fastest and smallest?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpbench.results.read import load as load
    from tpbench.results.read import load_table as load_table

__version__ = "0.2.0"

__all__ = ["__version__", "load", "load_table"]


def __getattr__(name: str) -> Any:
    # Late: the launcher and every rank import this package, and they need no pandas.
    if name in ("load", "load_table"):
        from tpbench.results import read

        return getattr(read, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
