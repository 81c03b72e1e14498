"""The exact figures of a row, computed from preset times."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.tp_block import context, problem
from tests.support.tp_block_preset_times import PresetStopwatch
from tpbench.measure.rates import SIDE
from tpbench.workloads.tp_block import WORKLOAD, bench
from tpbench.workloads.tp_block.execution import measurements
from tpbench.workloads.tp_block.inputs import BlockInputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

PRODUCT_MS, LARGE_GATHER_MS = 0.5, 0.25
"""Preset times of the product and the all-gather that the machine's rates are measured with."""

FORWARD = "2 gather, 4 product, 2 scatter, 1 silu"
BACKWARD = "4 gather, 8 product, 2 scatter, 1 silu_backward, 2 sum"
STEP = "6 gather, 12 product, 4 scatter, 1 silu, 1 silu_backward, 2 sum"
WITHOUT_COMMUNICATION = "12 product, 1 silu, 1 silu_backward"
COLLECTIVES = "6 gather, 4 scatter, 2 sum"
ALONE = {FORWARD: 3.0, BACKWARD: 5.0, COLLECTIVES: 4.0, "gather 3072": 2.0, "scatter 6144": 3.0}
# The median of the differences is never the difference of the medians.
INTERLEAVED = {
    STEP: [10.0, 12.0, 14.0],
    WITHOUT_COMMUNICATION: [7.0, 8.0, 13.0],
    "gather 3072, product 32x24x48": [5.0, 6.0, 7.0],  # q, k and v
    "product 32x24x48": [4.75, 5.5, 7.0],
    "gather 3072, product 32x24x40": [6.0, 7.0, 9.0],  # gate and up
    "product 32x24x40": [5.25, 6.5, 6.0],
    "product 32x24x24, scatter 6144": [3.0, 4.0, 5.0],  # out
    "product 32x24x24": [2.5, 3.0, 5.0],
    "product 32x20x24, scatter 6144": [4.0, 5.0, 7.0],  # down
    "product 32x20x24": [3.75, 4.0, 7.0],
}
FLOPS = 3 * (2 * 32 * (24 * 48 + 24 * 24 + 24 * 40 + 20 * 24) + 2 * 32**2 * 24)
"""A rank's FLOPs: weights of q, k and v; of out; of gate and up; of down; and half of attention's square."""


def stopwatch() -> Any:
    product, gather = "x".join([str(SIDE[DEVICE])] * 3), measurements.SHARD_BYTES[DEVICE]
    return PresetStopwatch(
        {**ALONE, f"product {product}": PRODUCT_MS, f"gather {gather}": LARGE_GATHER_MS}, INTERLEAVED
    )


def figures(here: Rank) -> dict[str, float]:
    """Return the figures of a block that gathers its inputs again."""
    with mock.patch.object(bench, "Stopwatch", lambda _: stopwatch()):
        session = bench.setup(problem(save_gathered=False), WORKLOAD.variants["block_tp"], context(here))
    session.step()
    costs = {"bytes_moved": session.costs.bytes_moved, "copy_gb_per_s": 1.0}
    found = {**session.check().columns, **session.details({"time_ms": 6.0, "device_ms": 4.0, **costs})}
    on_wall = session.details({"time_ms": 6.0, "device_ms": None})
    found |= {f"{name} on the wall": on_wall[name] for name in ("tflops", "gemm_share")}
    return found | {"floor's compute_ms": session.costs.compute_ms, "wire_ms": session.costs.wire_ms}


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
def test_every_figure_has_the_right_value() -> None:
    gemm = 2 * SIDE[DEVICE] ** 3 / PRODUCT_MS / 1e9
    bandwidth = measurements.SHARD_BYTES[DEVICE] / LARGE_GATHER_MS / 1e6
    expected = {
        "forward_ms": 3.0,
        "backward_ms": 5.0,
        "compute_ms": 8.0,
        "communication_ms": 4.0,
        "exposed_ms": 3.0,
        "hidden_share": 1 - 3.0 / 4.0,
        "gather_hidden": 1 - (0.25 + 0.75) / (2 * 2.0),
        "scatter_hidden": 1 - (0.5 + 0.25) / (2 * 3.0),
        "compute_share": 1.0 / 6.0,
        "communication_share": 3.0 / 6.0,
        "idle_share": 2.0 / 6.0,
        "gemm_tflops": gemm,
        "tflops": FLOPS / 4.0 / 1e9,
        "gemm_share": FLOPS / 4.0 / 1e9 / gemm,
        "tflops on the wall": FLOPS / 6.0 / 1e9,
        "gemm_share on the wall": FLOPS / 6.0 / 1e9 / gemm,
        "gather_gb_per_s": bandwidth,
        "floor's compute_ms": FLOPS / gemm / 1e9,
        # A rank sends half of 8 matrices and of the sums of 2 norms. Gathering again is avoidable and does not count.
        "wire_ms": (8 * 32 + 2 * 2) * 24 * 8 // 2 / bandwidth / 1e6,
    }
    for found in run_on_ranks(2, figures):
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def measured(here: Rank) -> measurements.MachineRates:
    return measurements.machine_rates(BlockInputs(problem(), context(here)), stopwatch())


@pytest.mark.skipif(not enough_gpus(4), reason="needs 4 GPUs, or none")
def test_the_bandwidth_counts_the_bytes_received_from_peers() -> None:
    received = 3 * measurements.SHARD_BYTES[DEVICE]
    for found in run_on_ranks(4, measured):
        assert found.gather_gb_per_s == pytest.approx(received / LARGE_GATHER_MS / 1e6)
