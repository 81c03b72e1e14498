"""Triton kernels with thin torch wrappers. They need torch and triton, and no other package of tpbench.

The public names are imported on first use, so that `tpbench.kernels.losses` can be imported without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpbench.kernels.entropy_function import EntropyLossResult, entropy_loss
    from tpbench.kernels.entropy_module import EntropyLoss
    from tpbench.kernels.launch_rows import How
    from tpbench.kernels.linear_function import linear_entropy_loss
    from tpbench.kernels.linear_module import LinearEntropyLoss
    from tpbench.kernels.linear_result import LinearEntropyLossResult, LinearHow
    from tpbench.kernels.two_pass import block_for, bytes_exchanged

__all__ = [
    "EntropyLoss",
    "EntropyLossResult",
    "How",
    "LinearEntropyLoss",
    "LinearEntropyLossResult",
    "LinearHow",
    "block_for",
    "bytes_exchanged",
    "entropy_loss",
    "linear_entropy_loss",
]

_MODULES = {
    "EntropyLoss": "entropy_module",
    "EntropyLossResult": "entropy_function",
    "How": "launch_rows",
    "LinearEntropyLoss": "linear_module",
    "LinearEntropyLossResult": "linear_result",
    "LinearHow": "linear_result",
    "block_for": "two_pass",
    "bytes_exchanged": "two_pass",
    "entropy_loss": "entropy_function",
    "linear_entropy_loss": "linear_function",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
