"""Triton kernels with thin torch wrappers. They need torch and triton, and nothing of tpbench outside this package."""

from tpbench.kernels.entropy_loss import EntropyLossResult, block_for, bytes_exchanged, entropy_loss
from tpbench.kernels.entropy_module import EntropyLoss

__all__ = ["EntropyLoss", "EntropyLossResult", "block_for", "bytes_exchanged", "entropy_loss"]
