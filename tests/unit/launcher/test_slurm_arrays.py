"""Placement of ranks on nodes, as jobs ask for it."""

from __future__ import annotations

from typing import Any

import pytest

from tpbench.job import Job, parse_job
from tpbench.launcher.slurm.cluster import Layout, layout


def job(**values: Any) -> Job:
    return parse_job({"variant": "triton_tp", "tokens": 64, "vocab": 1000, "device": "cuda", **values})


@pytest.mark.parametrize(
    ("tp_size", "dp_size", "per_node", "nodes", "ranks"),
    [
        (8, 1, 8, 1, 8),
        (2, 1, 8, 1, 2),
        (2, 4, 8, 1, 8),
        (8, 2, 8, 2, 8),
        (2, 6, 8, 2, 6),  # three replicas a node, not four and two
        (4, 5, 8, 5, 4),
        (2, 2, 2, 2, 2),
        (3, 4, 8, 2, 6),
    ],
)
def test_tensor_parallel_ranks_share_a_node_and_replicas_spread(
    tp_size: int, dp_size: int, per_node: int, nodes: int, ranks: int
) -> None:
    assert layout(job(tp_size=tp_size, dp_size=dp_size), per_node) == Layout(nodes, ranks, "cuda")
