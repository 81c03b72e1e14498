"""Triton kernels with thin torch wrappers. They need torch and triton, and no other package of tpbench.

Modules: `EntropyLoss`, `LinearEntropyLoss`. Functions: `entropy_loss`, `linear_entropy_loss`. A target: `TopK`. All are
imported on first use, so that the names of the losses can be imported without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from tpbench.kernels.entropy import EntropyLossResult as EntropyLossResult
    from tpbench.kernels.entropy import entropy_loss as entropy_loss
    from tpbench.kernels.linear.function import LinearEntropyLossResult as LinearEntropyLossResult
    from tpbench.kernels.linear.function import LinearLaunchRecord as LinearLaunchRecord
    from tpbench.kernels.linear.function import linear_entropy_loss as linear_entropy_loss
    from tpbench.kernels.linear_module import LinearEntropyLoss as LinearEntropyLoss
    from tpbench.kernels.modules import EntropyLoss as EntropyLoss
    from tpbench.kernels.row_loss import LaunchRecord as LaunchRecord
    from tpbench.kernels.row_loss import TopK as TopK

    How = LaunchRecord
    LinearHow = LinearLaunchRecord

_MODULES = {
    "EntropyLoss": "modules",
    "EntropyLossResult": "entropy",
    "LaunchRecord": "row_loss",
    "LinearEntropyLoss": "linear_module",
    "LinearEntropyLossResult": "linear.function",
    "LinearLaunchRecord": "linear.function",
    "TopK": "row_loss",
    "entropy_loss": "entropy",
    "linear_entropy_loss": "linear.function",
}
_EARLIER_NAMES = {"How": "LaunchRecord", "LinearHow": "LinearLaunchRecord"}

Loss = Literal["cross_entropy", "soft_cross_entropy", "reverse_kl", "forward_kl", "jsd", "total_variation", "policy"]
"""The losses that training minimises, and that the workload `entropy_loss` measures."""
LOSSES: tuple[str, ...] = get_args(Loss)
KernelLoss = Literal[Loss, "logprob"]
"""These losses, and the label's log-probability, which policy optimisation uses."""
KERNEL_LOSSES: tuple[str, ...] = get_args(KernelLoss)
LABEL_LOSSES = ("cross_entropy", "logprob", "policy")
"""The losses whose target is a label of each row."""
COMPARING_LOSSES = ("jsd", "total_variation")
"""The losses that compare p with q in each column. They need both softmaxes first, so ranks exchange numbers twice."""


def __getattr__(name: str) -> Any:
    name = _EARLIER_NAMES.get(name, name)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
