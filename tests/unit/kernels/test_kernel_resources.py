"""Occupancy compared with CUDA's calculator, and block caps compared with their file."""

from __future__ import annotations

import json
from importlib import resources
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tpbench.kernels import block_for
from tpbench.kernels.block_caps import FILE, measured_cap, winners
from tpbench.kernels.cached_launch import Multiprocessor, occupancy, worst_resources

H200 = Multiprocessor(registers=65536, threads=2048, shared_bytes=228 * 1024)
A10 = Multiprocessor(registers=65536, threads=1536, shared_bytes=100 * 1024)


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "warps", "on", "share"),
    [
        (32, 0, 8, H200, 1.0),  # nothing in the way
        (33, 0, 8, H200, 0.75),  # 40 registers a thread: 48 warps
        (64, 0, 32, H200, 0.5),
        (65, 0, 32, H200, 0.0),  # 1024 threads of 72 registers do not fit
        (128, 0, 16, H200, 0.25),
        (128, 0, 4, H200, 0.25),
        (168, 0, 4, H200, 12 / 64),
        (255, 0, 8, H200, 8 / 64),
        (32, 100 * 1024, 8, H200, 16 / 64),  # two programs' shared memory
        (32, 114 * 1024, 8, H200, 8 / 64),  # and the reserved kilobyte of each
        (32, 227 * 1024, 8, H200, 8 / 64),
        (32, 0, 32, A10, 32 / 48),  # a second program of 32 warps has no room
    ],
)
def test_occupancy(registers: int, shared_bytes: int, warps: int, on: Multiprocessor, share: float) -> None:
    assert occupancy(registers, shared_bytes, warps, on) == pytest.approx(share)


def test_the_worst_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(registers: int, spilled_words: int, shared: int, warps: int) -> Any:
        metadata = SimpleNamespace(shared=shared, num_warps=warps)
        return SimpleNamespace(n_regs=registers, n_spills=spilled_words, metadata=metadata)

    limits = SimpleNamespace(
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        shared_memory_per_multiprocessor=228 * 1024,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: limits)
    device = torch.device("cuda", 0)
    worst = worst_resources([kernel(40, 0, 512, 16), kernel(64, 3, 128, 32), None], device)
    assert worst is not None
    assert (worst.registers, worst.spilled_bytes, worst.shared_bytes, worst.occupancy) == (64, 12, 512, 0.5)
    assert worst_resources([None, None], device) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_kernel_says_what_it_was_compiled_to() -> None:
    from tpbench.kernels import entropy_loss

    logits = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    labels = torch.zeros(64, dtype=torch.int64, device="cuda")
    for algorithm, kernels in (("two_reads", 1), ("two_kernels", 2), ("one_read", 1)):
        how = entropy_loss(logits, labels, algorithm=algorithm).how
        found = worst_resources(how.kernels, logits.device)
        assert len(how.kernels) == kernels and found is not None
        assert 16 <= found.registers <= 255 and 0 < found.occupancy <= 1


def test_a_block_is_a_power_of_two_up_to_the_cap() -> None:
    assert [block_for(columns, 4096) for columns in (1, 100, 4096, 5000)] == [16, 128, 4096, 4096]


def test_the_file_says_where_it_was_measured() -> None:
    content = json.loads((resources.files("tpbench.kernels") / FILE).read_text())
    assert set(content["measured_on"]) == {"gpu_name", "torch_version", "triton_version", "tokens", "dtype"}
    assert all(winner.block_cap in winner.tried and winner.device_ms > 0 for winner in winners())


@pytest.mark.parametrize("loss", ["cross_entropy", "soft_cross_entropy", "reverse_kl", "forward_kl"])
@pytest.mark.parametrize("algorithm", ["two_reads", "two_kernels", "one_read"])
def test_auto_is_the_narrowest_measured_width_that_fits(algorithm: str, loss: str) -> None:
    measured = sorted((e for e in winners() if (e.algorithm, e.loss) == (algorithm, loss)), key=lambda e: e.columns)
    for winner in measured:
        assert measured_cap(algorithm, loss, winner.columns) == winner.block_cap
        assert measured_cap(algorithm, loss, winner.columns - 1) == winner.block_cap
    assert measured_cap(algorithm, loss, 1) == measured[0].block_cap
    assert measured_cap(algorithm, loss, 10**7) == measured[-1].block_cap


def test_a_loss_that_was_not_measured_uses_the_caps_of_one_with_as_many_logits() -> None:
    caps = {winner.block_cap for winner in winners() if winner.loss != "cross_entropy"}
    assert measured_cap("two_kernels", "another_kl", 65536) in caps
