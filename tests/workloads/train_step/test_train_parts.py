"""The parts that a training run is made of, by themselves."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from tests.ranks import Rank, enough_gpus, run_on_ranks
from tests.workloads.train_step.cells import context, prepared, problem, replica
from tpbench.workloads.train_step import sizes
from tpbench.workloads.train_step.document import document
from tpbench.workloads.train_step.gradients import LossScale, clip, total_norm
from tpbench.workloads.train_step.phases import Stopwatch
from tpbench.workloads.train_step.speed import peak_tflops
from tpbench.workloads.train_step.trace import exposed_share

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kernels", "share"),
    [
        ([], 0.0),
        ([("gemm", 0, 10)], 0.0),
        ([("ncclDevKernel_AllReduce", 0, 10)], 1.0),
        ([("gemm", 0, 6), ("ncclDevKernel_AllGather", 4, 10)], 0.4),
        ([("ncclKernel", 2, 4), ("gemm", 0, 10)], 0.0),
        ([("gemm", 0, 2), ("ncclKernel", 1, 5), ("Memcpy PtoP (Device -> Device)", 4, 6), ("add", 8, 10)], 0.4),
    ],
)
def test_the_share_of_communication_that_shows(kernels: list[tuple[str, float, float]], share: float) -> None:
    assert exposed_share(kernels) == pytest.approx(share)


def test_the_norm_and_clipping_of_plain_gradients() -> None:
    parameters = [torch.zeros(3, requires_grad=True), torch.zeros(2, 2, requires_grad=True)]
    for each in parameters:
        each.grad = torch.full_like(each, 2.0)
    assert float(total_norm(parameters, CPU)) == pytest.approx(2 * math.sqrt(7))
    clip(parameters, total_norm(parameters, CPU), 1.0)
    assert float(total_norm(parameters, CPU)) == pytest.approx(1.0, rel=1e-5)
    clip(parameters, total_norm(parameters, CPU), 5.0)  # below: stays
    assert float(total_norm(parameters, CPU)) == pytest.approx(1.0, rel=1e-5)
    clip(parameters, total_norm(parameters, CPU) / 4, None, scale=4.0)
    assert float(total_norm(parameters, CPU)) == pytest.approx(0.25, rel=1e-5)


def test_the_loss_scale_halves_on_overflow_and_doubles_when_calm() -> None:
    scale = LossScale(factor=8.0, patience=2)
    assert not scale.finite(torch.tensor(float("inf"))) and (scale.used, scale.factor) == (8.0, 4.0)
    assert scale.finite(torch.tensor(1.0)) and scale.factor == 4.0
    assert scale.finite(torch.tensor(1.0)) and (scale.used, scale.factor) == (4.0, 8.0)
    assert not scale.finite(torch.tensor(float("nan"))) and scale.factor == 4.0


def test_a_stopwatch_adds_up_phases_that_come_again() -> None:
    watch = Stopwatch(CPU)
    for phase in ("forward", "backward", "forward", "backward", "optimizer"):
        watch.mark(phase)
    found = watch.ms()
    assert set(found) == {"forward", "backward", "optimizer"} and all(ms >= 0 for ms in found.values())
    assert watch.marks == []


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989),
        ("NVIDIA H100 80GB HBM3", "float16", 989),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA A100-SXM4-80GB", "float32", 156),
        ("NVIDIA H20", "bfloat16", 148),
        ("Tesla T4", "bfloat16", None),
    ],
)
def test_datasheet_peaks(name: str, dtype: str, peak: float | None) -> None:
    assert peak_tflops(name, dtype) == peak


def test_bytes_on_the_wire_by_hand() -> None:
    """Two ranks, two layers: each of 2 x 2 sums forward and as many backward sends one activation; so do the embedding
    and the head together, once each way."""
    cell = problem()
    activation = 2 * 16 * 32 * 4
    assert sizes.bytes_communicated(cell, "fsdp_dtensor", 2, 1) == activation * (2 * 2 * 2 + 2)
    weights = sizes.parameters(cell) * 4
    assert sizes.bytes_communicated(cell, "ddp", 1, 2) == 2 * weights // 2
    assert sizes.bytes_communicated(cell, "fsdp", 1, 2) == 3 * weights // 2


def collectives(here: Rank) -> dict[str, int]:
    """Of one step, by name."""
    cell, place = problem(), context(here, 2)
    trainer = prepared("fsdp_dtensor", cell, place)
    with CommDebugMode() as mode:
        trainer.accumulate(replica(cell, place, 0))
        trainer.update()
    return {str(each): count for each, count in mode.get_comm_counts().items()}


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
def test_the_collectives_of_a_step_are_those_that_are_counted() -> None:
    """A gather and a scatter for each of those sums; besides, numbers a row for the loss, one sum of the gradients that
    every rank has a share of, and the norm."""
    counts = run_on_ranks(2, collectives)[0]
    assert counts.pop("c10d._allgather_base_") == counts.pop("c10d._reduce_scatter_base_") == 2 * 2 * 2 + 2
    assert sum(counts.values()) < 10


def test_only_measured_rows_make_documents() -> None:
    row = {
        "status": "ok", "job": json.dumps({"batch_size": 2, "seq_length": 8, "accumulate": 3}), "variant": "autotp",
        "tp_size": 2, "dp_size": 2, "world_size": 4, "samples_ms": [50.0, 150.0], "device_samples_ms": None,
        "losses": [9.0, 8.0, 7.0], "grad_norms": [1.0, 2.0, 3.0], "peak_gib": 1.5, "forward_ms": 1.0,
        "backward_ms": 2.0, "optimizer_ms": None,
    }  # fmt: skip
    made = document(row)
    assert made is not None
    name, content = made
    assert name == "results_autotp_tp2_dp2"
    assert [step["loss"] for step in content["steps"]] == [8.0, 7.0]  # warm-up is not among them
    assert content["summary"]["tokens_per_second"] == 2 * 8 * 3 * 2 / 0.1
    assert "forward_pct" not in content["summary"]
    assert document({**row, "status": "oom"}) is None
