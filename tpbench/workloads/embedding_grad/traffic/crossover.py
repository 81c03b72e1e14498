"""Crossover density: where the dense reduce-scatter becomes faster than a sparse exchange, predicted and measured."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tpbench.workloads.embedding_grad.traffic.formulas import ID_BYTES

HBM_PASSES = 5
"""Passes of each touched row through memory besides the transfer: gather (read, write) and merge (2 reads, write)."""
STEPS = 5
"""Successive steps of the sparse exchange on the device: upload and exchange row numbers, gather, exchange rows, merge.

Each step costs at least about as much as an all-to-all of almost nothing: on two H200s together 0.06 to 0.07 ms, where
such an all-to-all takes 0.0105 ms. Counts travel between hosts in the meantime.
"""


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
    """Return the density rho, in [0, 1], at which both exchanges take equal time by this formula:

    rho [(1 + 4 / (d b)) / B_a2a + 5 / B_hbm + 4 / (d b) W / (W - 1) / B_up] + 5 alpha / (N d b (W - 1) / W) = 1 / B_rs

    The numbers of all touched rows are uploaded, also of those that this rank owns. With upload_gb_per_s=None row
    numbers need no upload.
    """
    dense_bytes = table_rows * row_bytes * (world_size - 1) / world_size
    waiting = STEPS * latency_ms * 1e6 / dense_bytes  # ns a byte, as the inverse bandwidths are
    byte = (1 + ID_BYTES / row_bytes) / all_to_all_gb_per_s + HBM_PASSES / copy_gb_per_s
    if upload_gb_per_s is not None:
        byte += ID_BYTES / row_bytes * world_size / (world_size - 1) / upload_gb_per_s
    return min(1.0, max(0.0, (1 / reduce_scatter_gb_per_s - waiting) / byte))


def measured(sparse: Sequence[tuple[float, float]], dense_ms: float) -> float | None:
    """Return the density at which a sparse exchange takes `dense_ms`, from (density, ms) points in any order.

    Interpolates between the first two points that enclose it. Returns None if no measured points enclose it.
    """
    points = sorted(sparse)
    for (low, fast), (high, slow) in itertools.pairwise(points):
        if fast <= dense_ms < slow:
            return low + (high - low) * (dense_ms - fast) / (slow - fast)
    return None


def from_line(first: tuple[float, float], second: tuple[float, float], dense_ms: float) -> float:
    """Return the density at which a line through two (density, ms) points reaches `dense_ms`, also outside them."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    if slope <= 0:  # noise, if latency is the whole time: sparse is faster at every density or at none
        return float("inf") if first[1] <= dense_ms else 0.0
    return max(0.0, first[0] + (dense_ms - first[1]) / slope)
