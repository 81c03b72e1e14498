"""Triton's own way from a call to the driver on a machine without a GPU: its compiler and driver are stand-ins."""

import functools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import triton.compiler
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tpbench.kernels.one_pass import launch
from tpbench.kernels.one_pass.kernels import one_pass_kernel, whole_row_kernel
from tpbench.kernels.one_pass.tiling import Machine

H200 = Machine(132, 232448)


def pointer(tensor: Tensor) -> tuple[Any, ...]:
    """As `Launched` has a tensor."""
    return tensor.dtype, tensor.data_ptr()


def _plain(argument: Any) -> Any:
    """An argument with pointers instead of tensors, also within named tuples."""
    if isinstance(argument, Tensor):
        return pointer(argument)
    if isinstance(argument, tuple):
        values = [_plain(each) for each in argument]
        return type(argument)(*values) if hasattr(argument, "_fields") else tuple(values)
    return argument


@dataclass(frozen=True)
class Launched:
    """The arguments of one launch that reach the driver."""

    kernel: CompiledKernel
    grid: tuple[int, int, int]
    stream: int
    arguments: tuple[Any, ...]


@dataclass
class FakeGpu:
    """The kernels that were compiled and launched, and the current device and stream."""

    device: int = 0
    stream: int = 7
    bound: int = 0
    """Calls that went Triton's usual way."""
    compiled: list[CompiledKernel] = field(default_factory=list)
    launched: list[Launched] = field(default_factory=list)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        assert device == self.device
        return self.stream

    def compile(self, source: Any, **options: Any) -> CompiledKernel:
        self.compiled.append(_Compiled(source, self))
        return self.compiled[-1]


class _Compiled(CompiledKernel):  # type: ignore[misc]
    """As Triton's once it is loaded, but for what it runs."""

    def __init__(self, source: Any, gpu: FakeGpu) -> None:
        self.src, self.name, self.function, self.packed_metadata = source, source.name, object(), (4, 1, 0)
        self.module, self._module_pid = object(), None
        self._run = functools.partial(self._launched, gpu)

    def __del__(self) -> None:
        """Do nothing: a fake kernel has no module to unload."""

    def _launched(
        self, gpu: FakeGpu, x: int, y: int, z: int, stream: int, function: Any, metadata: Any, launch_metadata: Any,
        enter: Any, leave: Any, *arguments: Any,
    ) -> None:  # fmt: skip
        assert (function, metadata) == (self.function, self.packed_metadata)
        enter(launch_metadata)
        gpu.launched.append(Launched(self, (x, y, z), stream, _plain(arguments)))
        leave(launch_metadata)


def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """In place of Triton's compiler and driver."""
    gpu = FakeGpu()
    monkeypatch.setattr(driver, "_active", gpu)
    monkeypatch.setattr(triton.compiler, "compile", gpu.compile)
    # Kernels in Gluon call functions that are interpreted here, from which Triton makes no key.
    monkeypatch.setattr(JITFunction, "cache_key", property(lambda self: self.__name__))
    run = JITFunction.run

    def counted(self: JITFunction, *arguments: Any, **options: Any) -> Any:
        gpu.bound += 1
        return run(self, *arguments, **options)

    monkeypatch.setattr(JITFunction, "run", counted)
    return gpu


def fake_h200(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """An H200 for the one-pass kernels, which have caches that no other test fills or uses."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **how: zeros(*size, **how))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(launch, "machine", lambda device: H200)
    for kernel in (one_pass_kernel, whole_row_kernel):
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    return fake_gpu(monkeypatch)
