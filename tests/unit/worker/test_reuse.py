"""Which processes may run another task, and why the others end."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo
import torch._dynamo.utils
import torch._inductor.config as inductor

from tests.support.launcher_rows import cell
from tpbench.launcher.host.warm import reusable
from tpbench.measure import gpu_profiler
from tpbench.worker.reuse import ReusableProcess, changed, settings


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has compiled and profiled nothing, whatever the tests did that ran in it before."""
    monkeypatch.setitem(torch._dynamo.utils.counters, "frames", collections.Counter())
    monkeypatch.setattr(gpu_profiler, "_has_run", False)


@contextlib.contextmanager
def setting(owner: object, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


@contextlib.contextmanager
def calling(function: Callable[[Any], object], value: object, before: object) -> Iterator[None]:
    function(value)
    yield
    function(before)


CUDA, CUDNN = torch.backends.cuda, torch.backends.cudnn
CHANGES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "torch.backends.cudnn.deterministic": lambda: setting(CUDNN, "deterministic", True),
    "torch.backends.cudnn.benchmark": lambda: setting(CUDNN, "benchmark", True),
    "torch.backends.cudnn.allow_tf32": lambda: setting(CUDNN, "allow_tf32", False),
    "torch.backends.cuda.matmul.allow_tf32": lambda: setting(CUDA.matmul, "allow_tf32", True),
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": lambda: setting(
        CUDA.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": lambda: setting(
        CUDA.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
    "torch.get_float32_matmul_precision": lambda: calling(torch.set_float32_matmul_precision, "high", "highest"),
    "torch.backends.cuda.flash_sdp_enabled": lambda: calling(CUDA.enable_flash_sdp, False, True),
    "torch.backends.cuda.mem_efficient_sdp_enabled": lambda: calling(CUDA.enable_mem_efficient_sdp, False, True),
    "torch.backends.cuda.math_sdp_enabled": lambda: calling(CUDA.enable_math_sdp, False, True),
    "torch.backends.cuda.cudnn_sdp_enabled": lambda: calling(CUDA.enable_cudnn_sdp, False, True),
    "torch.get_default_dtype": lambda: calling(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "torch.get_default_device": lambda: calling(torch.set_default_device, "meta", None),
    "torch.is_grad_enabled": torch.no_grad,
    "torch.is_inference_mode_enabled": torch.inference_mode,
    "torch.are_deterministic_algorithms_enabled": lambda: calling(torch.use_deterministic_algorithms, True, False),
    "torch.get_num_threads": lambda: calling(torch.set_num_threads, 3, torch.get_num_threads()),
    "autocast on GPUs": lambda: calling(lambda on: torch.set_autocast_enabled("cuda", on), True, False),
    "autocast on CPUs": lambda: torch.autocast("cpu"),
    "denormal numbers": lambda: calling(torch.set_flush_denormal, True, False),
    "the working directory": lambda: contextlib.chdir("/"),
    "umask": lambda: calling(os.umask, 0o077, 0o022),
    "sys.path": lambda: setting(sys, "path", [*sys.path, "/elsewhere"]),
    "gc.isenabled": lambda: calling(lambda on: gc.enable() if on else gc.disable(), False, True),
    "torch._inductor.config": lambda: setting(inductor.triton, "cudagraphs", not inductor.triton.cudagraphs),
    "torch._dynamo.config": lambda: setting(dynamo, "recompile_limit", dynamo.recompile_limit + 1),
    "$NCCL_ALGO": lambda: calling(
        lambda value: os.environ.update(NCCL_ALGO="Ring") if value else os.environ.pop("NCCL_ALGO"), True, False
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_settings_are_named(name: str) -> None:
    before = settings()
    assert changed(before, settings()) == []
    with CHANGES[name]():
        assert name in changed(before, settings())


def test_defaults_that_torch_sets_are_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/where-torch-puts-it")
    assert changed(before, settings()) == []


def test_every_setting_can_be_read() -> None:
    assert [name for name, value in settings().items() if "Error" in str(value) and not name.startswith("$")] == []


def test_why_a_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    process, here = ReusableProcess(), torch.device("cpu")
    process.remember_settings()
    assert process.reason_to_exit(here) == "each job has a process of its own"
    process.reusable = True
    assert process.reason_to_exit(here) == ""
    monkeypatch.delenv(next(iter(os.environ)))
    assert process.reason_to_exit(here).startswith("the job changed ")
    assert process.tasks_done == 3


def test_a_process_that_compiled_ends() -> None:
    process, here = ReusableProcess(), torch.device("cpu")
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(torch.ones(1))  # the first use of torch.compile changes settings, too
    torch._dynamo.reset()
    torch._dynamo.utils.counters["frames"].clear()
    process.remember_settings()
    process.reusable = True
    assert process.reason_to_exit(here) == ""
    compiled(torch.ones(1))
    assert process.reason_to_exit(here) == "torch.compile has compiled something"


def test_a_process_that_profiled_a_gpu_ends() -> None:
    process, here = ReusableProcess(), torch.device("cpu")
    process.remember_settings()
    process.reusable = True
    assert process.reason_to_exit(here) == ""
    gpu_profiler.gpu_profile()
    assert process.reason_to_exit(here) == "a profiler has run on its GPU, which slows later launches down"


class Gpu:
    """A fake GPU. `free`: MiB that are free at each call; the last value stays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *free: int) -> None:
        self.free = list(free)
        monkeypatch.setattr(torch.cuda, "mem_get_info", self.info)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *device: None)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)

    def info(self, device: object) -> tuple[int, int]:
        return (self.free.pop(0) if len(self.free) > 1 else self.free[0]) * 2**20, 80_000 * 2**20


@pytest.mark.parametrize(
    ("ranks", "free", "why"),
    [
        (1, [9000, 8500], ""),
        (1, [9000, 8400], "its jobs took 600 MiB of the GPU that they did not give back"),
        (4, [9000, 8100], ""),  # NCCL has channels to three peers
        (4, [9000, 7600], "its jobs took 1400 MiB of the GPU that they did not give back"),
        (4, [9000, 7600, 7600, 8900], ""),  # peers had it mapped a moment longer
    ],
)
def test_how_much_of_a_gpu_jobs_may_keep(
    ranks: int, free: list[int], why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tpbench.worker.reuse.UNMAP_TIMEOUT_S", 0.05)
    process, here = ReusableProcess(), torch.device("cuda:0")
    Gpu(monkeypatch, *free)
    process.reusable = True
    process.begin_task(dataclasses.replace(cell(0, tmp_path).job, tp_size=ranks))
    process.remember_settings()
    assert process.reason_to_exit(here) == ""
    assert process.reason_to_exit(here) == why


@pytest.mark.parametrize(
    ("variant", "stays"),
    [("triton_tp", True), ("pytorch_gather", True), ("sparse_symmetric", True), ("liger", False), ("autotp", False)],
)
def test_jobs_whose_processes_are_reusable_on_gpus(variant: str, stays: bool, tmp_path: Path) -> None:
    job = cell(0, tmp_path).job
    assert reusable(dataclasses.replace(job, variant=variant)) is stays
    assert not reusable(dataclasses.replace(job, variant=variant, device="cpu"))
    assert not reusable(dataclasses.replace(job, variant=variant, memory_limit_gib=1.0))
