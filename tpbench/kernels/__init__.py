"""Triton kernels with thin torch wrappers. They need torch and triton, and no other package of tpbench.

The public names are imported on first use, so that `tpbench.kernels.losses` can be imported without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpbench.kernels.entropy.function import EntropyLossResult, entropy_loss
    from tpbench.kernels.entropy.launch_rows import How
    from tpbench.kernels.linear.call import LinearEntropyLossResult, LinearHow
    from tpbench.kernels.linear.function import linear_entropy_loss
    from tpbench.kernels.modules import EntropyLoss, LinearEntropyLoss
    from tpbench.kernels.two_pass.kernels import block_for, bytes_exchanged

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
    "EntropyLoss": "modules",
    "EntropyLossResult": "entropy.function",
    "How": "entropy.launch_rows",
    "LinearEntropyLoss": "modules",
    "LinearEntropyLossResult": "linear.call",
    "LinearHow": "linear.call",
    "block_for": "two_pass.kernels",
    "bytes_exchanged": "two_pass.kernels",
    "entropy_loss": "entropy.function",
    "linear_entropy_loss": "linear.function",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
