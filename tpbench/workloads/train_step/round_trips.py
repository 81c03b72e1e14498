"""A pass of torch.compile ahead of async-TP's: reshapes that lead back to the shape they came from are left out."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

RESHAPES = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


class WithoutRoundTrips(CustomGraphPass):
    """Gathered tokens are (tokens, width) to the collective, (batch, sequence, width) to the model and (tokens, width)
    again to each product. Inductor drops such a pair of reshapes for a single product alone; behind several its
    async-TP would not see that they multiply what was gathered, and would leave the all-gather by itself."""

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            between = _reshaped(node)
            origin = None if between is None else _reshaped(between)
            if between is not None and origin is not None and _layout(origin) == _layout(node):
                node.replace_all_uses_with(origin)
                graph.erase_node(node)
                if not between.users:
                    graph.erase_node(between)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _reshaped(node: Node) -> Node | None:
    """What the node reshapes, if that is what it does."""
    found = node.args[0] if node.target in RESHAPES else None
    return found if isinstance(found, Node) else None


def _layout(node: Node) -> tuple[Any, Any]:
    value = node.meta["val"]
    return value.shape, value.stride()
