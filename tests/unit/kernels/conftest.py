"""A fake GPU for the launches of the one-pass kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch

from tests.support.fake_gpu import FakeGpu, fake_gpu
from tpbench.kernels.cached_launch import cached_launch
from tpbench.kernels.one_pass import launch
from tpbench.kernels.one_pass.kernels import one_pass_kernel, whole_row_kernel
from tpbench.kernels.one_pass.tiling import Machine


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Triton's way to the driver of an H200, with caches that no other test fills or uses."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **how: zeros(*size, **how))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(launch, "machine", lambda device: Machine(132, 232448))
    for kernel in (one_pass_kernel, whole_row_kernel):
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    for remembering in (launch.prepare, cached_launch):
        remembering.cache_clear()
    yield fake_gpu(monkeypatch)
    for remembering in (launch.prepare, cached_launch):
        remembering.cache_clear()
