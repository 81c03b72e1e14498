"""Attention within a sliding window, in a configuration of the transformers package.

No variant is given a mask of one: transformers makes it, of the length of what a rank holds, which under sequence
parallelism is a share of the micro-batch's tokens. And fewer operations are needed than are counted.
"""

from __future__ import annotations

from typing import Any


def window(configuration: Any) -> int | None:
    """The latest tokens, its own included, to which attention is limited in some layer that is trained; None: nowhere.

    What a type of model does not declare it does not use, whatever its file says.
    """

    def declared(name: str, default: Any = None) -> Any:
        return getattr(configuration, name, default) if hasattr(type(configuration), name) else default

    kinds = declared("layer_types")
    if not declared("use_sliding_window", True) or (kinds and "sliding_attention" not in kinds):
        return None
    width: int | None = declared("sliding_window")
    return width


def widen(configuration: Any, tokens: int) -> None:
    """A window that blocks nothing, if there is one: of one as long as what it takes for the sequence, which is up to
    all `tokens` of a micro-batch, transformers makes a mask, which keeps attention from its fast kernels; types whose
    layers differ cannot do without any."""
    if (width := getattr(configuration, "sliding_window", None)) is not None:
        configuration.sliding_window = max(width, tokens + 1)
