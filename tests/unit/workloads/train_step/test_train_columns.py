"""Columns that follow from a measured run."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.train_step import CPU, single_context, tiny_problem
from tpbench.workloads.train_step import bench
from tpbench.workloads.train_step.bench import PhaseTimer, peak_tflops, throughput
from tpbench.workloads.train_step.estimates import step_flops


def test_a_phase_timer_adds_up_phases_that_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of this test moves by 1, 2, 3... seconds from mark to mark."""
    readings = iter(number * (number + 1) / 2 for number in range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: next(readings))
    timer = PhaseTimer(CPU)
    for _ in range(2):
        timer.marks = []
        for phase in ("forward", "backward", "forward", "backward", "optimizer", "end"):
            timer.mark(phase)
        timer.unread = True
        timer.read()
    first, second = [1e3 * (1 + 3), 1e3 * (2 + 4), 1e3 * 5], [1e3 * (7 + 9), 1e3 * (8 + 10), 1e3 * 11]
    assert timer.times_ms == [first, second]


def test_a_replay_gives_its_graphs_marks_new_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph records the same events at each replay, so their times are read between replays."""
    recorded_ms = {}
    monkeypatch.setattr(bench, "ms_between", lambda begin, end: recorded_ms[end] - recorded_ms[begin])
    marks: Any = [("forward", "event 0"), ("backward", "event 1"), ("optimizer", "event 2"), ("end", "event 3")]
    timer = PhaseTimer(CPU)
    for lengths in ((1, 2, 3), (4, 5, 6)):
        recorded_ms.update({event: sum(lengths[:at]) for at, (_, event) in enumerate(marks)})
        timer.marks, timer.unread = marks, True
        timer.read()
        timer.read()
    assert timer.times_ms == [[1, 2, 3], [4, 5, 6]]


def test_peaks_of_datasheets() -> None:
    names = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "Tesla T4")
    assert [peak_tflops(name, "bfloat16") for name in names] == [989, 989, 756, None]
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "float32") == 156


def test_throughput_counts_replicas_and_accumulation() -> None:
    context = replace(single_context(), dp_size=2, world_size=4)
    found = throughput(tiny_problem(accumulate=3), context, {"time_ms": 500.0, "flops": 10**12})
    assert found["samples_per_s"] == 2 * 3 * 2 / 0.5
    assert found["tokens_per_s"] == 16 * found["samples_per_s"]
    assert found["tokens_per_s_per_gpu"] == found["tokens_per_s"] / 4
    assert found["tflops_per_gpu"] == 2.0


def test_model_flops_utilisation_is_of_the_datasheet_s_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    context = replace(single_context(torch.device("cuda")), tp_size=2, world_size=2)
    problem = tiny_problem(dtype="bfloat16")
    found = throughput(problem, context, {"time_ms": 1.0, "flops": step_flops(problem) // 2})
    assert found["mfu"] == pytest.approx(found["tflops_per_gpu"] / 989)
