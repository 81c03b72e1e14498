"""A graph pass that runs before torch.compile's async-TP pass and removes pairs of inverse reshapes."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

RESHAPES = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


class RemoveInverseReshapes(CustomGraphPass):
    """Remove two reshapes in a row if the second restores the original shape and strides.

    Gathered tokens are (tokens, width) for the collective, (batch, sequence, width) for the model, and (tokens, width)
    again for each product. Inductor removes such a pair itself only if a single product follows. If several products
    follow, its async-TP pass would not see that they multiply the gathered tokens, and would not fuse the all-gather.
    """

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            middle = _reshape_input(node)
            origin = None if middle is None else _reshape_input(middle)
            if middle is not None and origin is not None and _layout(origin) == _layout(node):
                node.replace_all_uses_with(origin)
                graph.erase_node(node)
                if not middle.users:
                    graph.erase_node(middle)

    def uuid(self) -> Any:
        """Return the key of this pass in inductor's cache."""
        return get_hash_for_files((__file__,))


def _reshape_input(node: Node) -> Node | None:
    """Return the node that `node` reshapes, or None if `node` is no reshape."""
    source = node.args[0] if node.target in RESHAPES else None
    return source if isinstance(source, Node) else None


def _layout(node: Node) -> tuple[Any, Any]:
    value = node.meta["val"]
    return value.shape, value.stride()
