"""Where a sparse exchange stops to pay: predicted by the formula, and found between measured times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tpbench.workloads.embedding_grad.traffic import ID_BYTES

HBM_PASSES = 5
"""Of each touched row through memory beside the wire: gathered (read, written) and merged (read twice, written)."""
STEPS = 5
"""Of the sparse exchange, each after the other on the device: the numbers come from the host, go to their owners, rows
are gathered, sent, merged. Each costs at least about what an all-to-all of next to nothing does: together 0.06 to 0.07
ms on two H200s, where that takes 0.0105. Counts cross between hosts meanwhile."""


def predicted(
    table_rows: int,
    row_bytes: int,
    world_size: int,
    *,
    all_to_all_gb_per_s: float,
    reduce_scatter_gb_per_s: float,
    copy_gb_per_s: float,
    latency_ms: float,
    upload_gb_per_s: float | None,
) -> float:
    """The density rho at which both take equal time, at most 1 and at least 0:

    rho [(1 + 4 / (d b)) / B_a2a + 5 / B_hbm + 4 / (d b) W / (W - 1) / B_up] + 5 alpha / (N d b (W - 1) / W) = 1 / B_rs

    The upload is of the numbers of all touched rows, this rank's own too; None: they need none.
    """
    dense_bytes = table_rows * row_bytes * (world_size - 1) / world_size
    waiting = STEPS * latency_ms * 1e6 / dense_bytes  # as the bandwidths: ns a byte
    byte = (1 + ID_BYTES / row_bytes) / all_to_all_gb_per_s + HBM_PASSES / copy_gb_per_s
    if upload_gb_per_s is not None:
        byte += ID_BYTES / row_bytes * world_size / (world_size - 1) / upload_gb_per_s
    return min(1.0, max(0.0, (1 / reduce_scatter_gb_per_s - waiting) / byte))


def measured(sparse: Sequence[tuple[float, float]], dense_ms: float) -> float | None:
    """The density at which a sparse exchange takes as long as the dense one, from (density, ms) in any order.

    Linear between the two points where it happens first; beyond the outermost points, None: nothing was measured there.
    """
    points = sorted(sparse)
    for (low, fast), (high, slow) in itertools.pairwise(points):
        if fast <= dense_ms < slow:
            return low + (high - low) * (dense_ms - fast) / (slow - fast)
    return None


def from_line(first: tuple[float, float], second: tuple[float, float], dense_ms: float) -> float:
    """The same for a line through two points, at which it is not cut off: what it says of densities outside them."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    if slope <= 0:  # noise, where the latency is all: sparse is faster everywhere or nowhere
        return float("inf") if first[1] <= dense_ms else 0.0
    return max(0.0, first[0] + (dense_ms - first[1]) / slope)
