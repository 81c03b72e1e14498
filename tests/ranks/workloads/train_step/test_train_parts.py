"""The parts that a training run is made of, by themselves."""

from __future__ import annotations

import contextlib
import json
import math
import re
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.train_step import context, prepared, problem, replica
from tpbench.measure.timeline import intervals
from tpbench.workloads.train_step import sizes
from tpbench.workloads.train_step.autotp import engine_configuration
from tpbench.workloads.train_step.document import document
from tpbench.workloads.train_step.gradients import LossScale, clip, total_norm
from tpbench.workloads.train_step.phases import Stopwatch
from tpbench.workloads.train_step.speed import peak_tflops
from tpbench.workloads.train_step.trace import exposed_share
from tpbench.workloads.train_step.trainer import adamw

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kernels", "share"),
    [
        ([], 0.0),
        ([("gemm", 0, 10, 7)], 0.0),
        ([("ncclDevKernel_AllReduce", 0, 10, 7)], 1.0),
        ([("gemm", 0, 6, 7), ("ncclDevKernel_AllGather", 4, 6, 8)], 0.4),
        ([("ncclKernel", 2, 2, 8), ("gemm", 0, 10, 7)], 0.0),
        (
            [("gemm", 0, 2, 7), ("ncclKernel", 1, 4, 8), ("Memcpy PtoP (Device -> Device)", 4, 2, 9), ("add", 8, 2, 7)],
            0.4,
        ),
        # async-TP: a stream that only copies reads peers' memory, by whatever name; ranges are no work.
        ([("gemm", 0, 6, 7), ("Memcpy DtoD (Device -> Device)", 4, 6, 9)], 0.4),
        ([("gemm", 0, 6, 7), ("Memcpy DtoD (Device -> Device)", 6, 4, 7)], 0.0),
        ([("gemm", 0, 6, 7), ("void c10d::symmetric_memory::barrier_kernel(unsigned int**)", 6, 4, 7)], 0.4),
        ([("FSDP::all_gather", 0, 99, 7), ("nccl:_all_gather_base", 0, 99, 8), ("gemm", 0, 6, 7)], 0.0),
    ],
)
def test_the_share_of_communication_that_shows(kernels: list[tuple[str, int, int, int]], share: float) -> None:
    assert exposed_share(intervals(kernels, on_gpu=True)) == pytest.approx(share)


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


def test_weights_decay_all_alike() -> None:
    weights = [torch.full((3,), 2.0, requires_grad=True), torch.full((2, 2), 2.0, requires_grad=True)]
    for each in weights:
        each.grad = torch.zeros_like(each)
    adamw(weights, problem(learning_rate=0.1, weight_decay=0.5), CPU).step()
    assert all(torch.allclose(each, torch.tensor(2.0 * (1 - 0.1 * 0.5))) for each in weights)


def losses_used(here: Rank, name: str, fields: dict[str, Any]) -> int:
    """How often tpbench's loss is computed in a step."""
    from tpbench.kernels import EntropyLoss

    cell, place = problem(train_loss="tpbench", **fields), context(here, 2)
    forward = EntropyLoss.forward
    with mock.patch.object(EntropyLoss, "forward", autospec=True, side_effect=forward) as spied:
        prepared(name, cell, place).accumulate(replica(cell, place, 0))
    return spied.call_count


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
@pytest.mark.parametrize("name", ["fsdp_dtensor", "autotp"])
@pytest.mark.parametrize("fields", [{"accumulate": 2}, {"accumulate": 2, "vocab_parallel": False}], ids=str)
def test_tpbenchs_loss_is_used_where_it_is_asked_for(name: str, fields: dict[str, Any]) -> None:
    """Both losses are right: no result would tell."""
    assert run_on_ranks(2, losses_used, name, fields) == [2, 2]


def engine(here: Rank, fields: dict[str, Any]) -> dict[str, Any]:
    return engine_configuration(problem(**fields), context(here, 2))


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
def test_deepspeed_is_told_of_the_overlap() -> None:
    for overlap in (False, True):
        (made, _) = run_on_ranks(2, engine, {"overlap": overlap})
        assert made["tensor_parallel"]["tp_overlap_comm"] is overlap


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


class Wire(TorchDispatchMode):
    """Adds up the bytes that a rank sends in collectives, each as a ring."""

    KINDS: ClassVar = {"all_?reduce": 2.0, "all_?gather": 1.0, "reduce_scatter": 1.0}
    """Names of operations, and how often they send what they have (a gather: what it makes)."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            ranks = next((each for each in map(ranks_of, args) if each), 1)
            whole = max(
                (each.nbytes for each in tree_leaves((args, made)) if isinstance(each, torch.Tensor)), default=0
            )
            times = sum(many for kind, many in self.KINDS.items() if re.match(f"_?{kind}", func._opname))
            self.sent += times * whole * (ranks - 1) / ranks
        return made


def ranks_of(argument: Any) -> int:
    """Of the process group that it is, by name or as the dispatcher has it; 0: it is none."""
    if isinstance(argument, str) and argument.isdigit():
        return _resolve_process_group(argument).size()
    with contextlib.suppress(RuntimeError):
        return dist.ProcessGroup.unbox(argument).size() if isinstance(argument, torch.ScriptObject) else 0
    return 0  # an operator on what is summed


def sent(here: Rank, name: str, tp_size: int, fields: dict[str, Any]) -> tuple[float, int]:
    cell, place = problem(hidden_size=128, **fields), context(here, tp_size)
    trainer = prepared(name, cell, place)
    with Wire() as wire:
        trainer.accumulate(replica(cell, place, 0))
        trainer.update()
    return wire.sent, sizes.bytes_communicated(cell, name, tp_size, here.world_size // tp_size)


AGAIN = {"activation_checkpointing": True, "accumulate": 2}
AUTOCAST = {"dtype": "bfloat16", "autocast": True}
SENT: list[tuple[int, str, int, dict[str, Any]]] = [
    *((2, name, 2, each) for name in ("autotp", "fsdp_dtensor") for each in (
        {}, {"tied": True}, AGAIN, {"vocab_parallel": False}, {"vocab_parallel": False, "tied": True}, AUTOCAST,
    )),
    *((2, name, 1, each) for name in ("ddp", "fsdp") for each in ({}, {"tied": True, "accumulate": 2}, AUTOCAST)),
    *((2, "autotp", 1, {"zero_stage": stage, "accumulate": 2}) for stage in (0, 1, 2)),
    *((2, "autotp", 1, {"zero_stage": stage, **AUTOCAST}) for stage in (0, 1)),
    (4, "autotp", 2, {"tied": True}), (4, "fsdp_dtensor", 2, {}),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "name", "tp_size", "fields"), SENT, ids=str)
def test_what_is_sent_is_what_is_counted(ranks: int, name: str, tp_size: int, fields: dict[str, Any]) -> None:
    """But for a few numbers a row or a parameter: statistics of the loss, norms and their gradients, and the check of
    DeepSpeed's first batch."""
    if not enough_gpus(ranks):
        pytest.skip(f"needs {ranks} GPUs, or none")
    for found, counted in run_on_ranks(ranks, sent, name, tp_size, fields):
        assert counted * 0.99 < found < counted * 1.03


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
    summary = content["summary"]
    assert summary["tokens_per_second"] == 2 * 8 * 3 * 2 / 0.1 == 8 * summary["samples_per_second"]
    assert (summary["avg_step_ms"], summary["avg_loss"], summary["final_loss"]) == (100.0, 7.5, 7.0)
    assert summary["std_step_ms"] == pytest.approx(50 * math.sqrt(2)) and summary["peak_memory_gib"] == 1.5
    assert "forward_pct" not in content["summary"]
    assert document({**row, "status": "oom"}) is None
