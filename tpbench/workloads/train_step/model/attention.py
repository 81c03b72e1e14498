"""Names of attention in the transformers package, for training without masks."""

from __future__ import annotations

from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

MASKLESS_SDPA = "sdpa_without_masks"
"""Scaled dot-product attention for which transformers makes no mask.

For its own "sdpa", transformers searches the positions of each step for packed sequences. It reads the result on the
host, which waits for the device, and which a CUDA graph cannot hold. Batches of this workload have no packed sequences.
"""

AttentionInterface.register(MASKLESS_SDPA, sdpa_attention_forward)


def implementation(attention: str) -> str:
    """Return the name by which transformers knows an `attention` of the problem."""
    return MASKLESS_SDPA if attention == "sdpa" else attention
