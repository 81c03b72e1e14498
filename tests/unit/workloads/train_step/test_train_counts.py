"""Counts of a problem: times of phases, throughput, and the estimated memory of a rank."""

from dataclasses import replace

import pytest
import torch

from tests.support.train_step import CPU, single_context, tiny_problem
from tpbench.workloads.train_step.bench import PhaseTimer, peak_tflops, throughput
from tpbench.workloads.train_step.estimates import Distribution, estimate_memory, parameters, step_flops

DDP, FSDP, AUTOTP = Distribution("ddp"), Distribution("fsdp"), Distribution("zero", sequence_parallel=False)
PROBLEM = tiny_problem(dtype="bfloat16", vocab=96)


def test_a_phase_timer_adds_up_phases_that_come_again() -> None:
    """On a CPU a mark has the time in seconds. A graph replays the same marks with new times."""
    timer = PhaseTimer(CPU)
    phases = ("forward", "backward", "forward", "backward", "optimizer", "end")
    for times_s in ((0.0, 1.0, 3.0, 6.0, 10.0, 15.0), (20.0, 22.0, 23.0, 25.0, 26.0, 28.0)):
        timer.marks, timer.unread = list(zip(phases, times_s, strict=True)), True
        timer.read()
        timer.read()  # without a step in between
    assert timer.times_ms == [[4000, 6000, 5000], [4000, 2000, 2000]]


def test_peaks_of_datasheets() -> None:
    names = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "Tesla T4")
    assert [peak_tflops(name, "bfloat16") for name in names] == [989, 989, 756, None]
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "float32") == 156


def test_throughput_counts_replicas_and_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    context = replace(single_context(torch.device("cuda")), dp_size=2, world_size=4)
    problem = tiny_problem(dtype="bfloat16", accumulate=3)
    columns = throughput(problem, context, {"time_ms": 500.0, "flops": step_flops(problem) // 2})
    assert columns["samples_per_s"] == 2 * 3 * 2 / 0.5
    assert columns["tokens_per_s"] == 16 * columns["samples_per_s"] == 4 * columns["tokens_per_s_per_gpu"]
    assert columns["tflops_per_gpu"] == step_flops(problem) // 2 / 0.5 / 1e12
    assert columns["mfu"] == pytest.approx(columns["tflops_per_gpu"] / 989)  # the datasheet's peak


def test_memory_of_parameters_by_distribution() -> None:
    count, embedding = parameters(PROBLEM), 96 * 32
    whole_model = estimate_memory(PROBLEM, DDP, 1, 2)
    assert (whole_model.model, whole_model.gradients, whole_model.optimizer) == (2 * count, 2 * count, 4 * count)
    assert whole_model.total == 8 * count + whole_model.activations  # DDP's gradients are views of its buckets
    sharded = estimate_memory(PROBLEM, FSDP, 2, 2)
    assert sharded.total == sharded.model + sharded.optimizer + max(sharded.gradients, sharded.activations)
    kept = estimate_memory(replace(PROBLEM, accumulate=2), FSDP, 2, 2)
    assert kept.total == kept.model + kept.gradients + kept.optimizer + kept.activations
    assert sharded.model == sharded.gradients == pytest.approx(2 * count / 4, abs=2)
    assert estimate_memory(PROBLEM, AUTOTP, 2, 1).model == pytest.approx(2 * count / 2, abs=2)
    gathered = replace(PROBLEM, vocab_parallel=False)  # AutoTP then leaves the embedding whole
    whole_embedding = 2 * (embedding + (count - embedding) / 2)
    assert estimate_memory(gathered, AUTOTP, 2, 1).model == pytest.approx(whole_embedding, abs=2)


def test_zeros_buffers_replace_the_logits_if_they_are_larger() -> None:
    """On GPUs, ZeRO allocates two buffers with the first gradient. Their size does not depend on the model."""
    buffers, logits = 2 * 500_000_000 * 2, PROBLEM.tokens * 96 // 2 * (2 * 2 + 2 * 4)
    with_buffers, without = (estimate_memory(PROBLEM, AUTOTP, 2, 1, on_gpus=on).activations for on in (True, False))
    assert with_buffers == without - logits + buffers
    assert estimate_memory(replace(PROBLEM, zero_stage=0), AUTOTP, 2, 1).activations == without
    many = replace(PROBLEM, vocab=2**20, seq_length=2**12)
    assert estimate_memory(many, AUTOTP, 2, 1) == estimate_memory(many, AUTOTP, 2, 1, on_gpus=False)
    # With two micro-batches, the buffers exist beside the second one's logits.
    assert estimate_memory(replace(PROBLEM, accumulate=2), AUTOTP, 2, 1).activations == with_buffers + logits
