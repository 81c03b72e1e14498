"""tpbench: which implementation of a tensor-parallel operation is right, fastest and smallest on your machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpbench.results.read import load as load

__version__ = "0.1.0"

__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    # Late, because the launcher and every rank import this package and need no pandas.
    if name == "load":
        from tpbench.results.read import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
