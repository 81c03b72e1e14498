"""Occupancy compared with CUDA's calculator, and what a kernel was compiled to."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tpbench.measure.kernel_resources import occupancy, worst_resources


def gpu(threads: int, shared_kib: int) -> Any:
    """The properties of a GPU's multiprocessor."""
    return SimpleNamespace(
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=threads,
        shared_memory_per_multiprocessor=shared_kib * 1024,
    )


H200, A10 = gpu(2048, 228), gpu(1536, 100)


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "warps", "on", "share"),
    [
        (32, 0, 8, H200, 1.0),  # nothing in the way
        (33, 0, 8, H200, 0.75),  # 40 registers a thread: 48 warps
        (65, 0, 32, H200, 0.0),  # 1024 threads of 72 registers do not fit
        (128, 0, 16, H200, 0.25),
        (32, 100 * 1024, 8, H200, 16 / 64),  # two programs' shared memory
        (32, 114 * 1024, 8, H200, 8 / 64),  # and the reserved kilobyte of each
        (32, 0, 32, A10, 32 / 48),  # a second program of 32 warps has no room
    ],
)
def test_occupancy(registers: int, shared_bytes: int, warps: int, on: Any, share: float) -> None:
    assert occupancy(registers, shared_bytes, warps, on) == pytest.approx(share)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_kernel_says_what_it_was_compiled_to() -> None:
    from tpbench.kernels import entropy_loss

    logits = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    labels = torch.zeros(64, dtype=torch.int64, device="cuda")
    for algorithm, kernels in (("two_reads", 1), ("two_kernels", 2), ("one_read", 1)):
        how = entropy_loss(logits, labels, algorithm=algorithm).how
        found = worst_resources(how.kernels, logits.device)
        assert len(how.kernels) == kernels
        assert 16 <= found["registers"] <= 255 and 0 < found["occupancy"] <= 1
