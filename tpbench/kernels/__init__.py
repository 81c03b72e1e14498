"""Triton kernels with thin torch wrappers. They need torch and triton, and nothing of tpbench outside this package."""

from tpbench.kernels.entropy_loss import EntropyLossResult, How, entropy_loss
from tpbench.kernels.entropy_module import EntropyLoss
from tpbench.kernels.two_pass import block_for, bytes_exchanged

__all__ = ["EntropyLoss", "EntropyLossResult", "How", "block_for", "bytes_exchanged", "entropy_loss"]
