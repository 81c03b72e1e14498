"""Sliding-window attention in a configuration of the transformers package.

Transformers would make the mask for a window itself, from the length of a rank's tokens, which under sequence
parallelism are a share of the micro-batch. `inputs.model_inputs` makes it from the sequence's length instead.
"""

from __future__ import annotations

from typing import Any


def window(configuration: Any) -> int | None:
    """Return the number of latest tokens, including the current one, that some trained layer attends to; None if all
    layers attend to all tokens.

    A model type ignores settings that its configuration class does not declare, even if config.json has them.
    """

    def declared(name: str, default: Any = None) -> Any:
        return getattr(configuration, name, default) if hasattr(type(configuration), name) else default

    layer_types = declared("layer_types")
    if not declared("use_sliding_window", True) or (layer_types and "sliding_attention" not in layer_types):
        return None
    width: int | None = declared("sliding_window")
    return width


def windowed_layers(configuration: Any) -> int:
    """Return the number of layers with the window that `window` returns."""
    if window(configuration) is None:
        return 0
    layer_types = getattr(configuration, "layer_types", None)
    return int(layer_types.count("sliding_attention") if layer_types else configuration.num_hidden_layers)


def disable(configuration: Any, tokens: int) -> None:
    """Widen the window, if there is one, so that it hides none of a micro-batch's `tokens`.

    Transformers takes a rank's tokens, up to a whole micro-batch, for one sequence. For a window of at most that
    length it makes a mask, and a mask disables attention's fast kernels. The window cannot be removed: model types
    with different kinds of layers need one.
    """
    if (width := getattr(configuration, "sliding_window", None)) is not None:
        configuration.sliding_window = max(width, tokens + 1)
