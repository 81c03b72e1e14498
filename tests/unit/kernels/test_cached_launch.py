"""A cached launch reaches the driver with the same arguments as Triton's own, and only for calls of the same kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from triton import knobs
from triton.runtime.jit import JITFunction

from tests.support.fake_gpu import FakeGpu, fake_gpu, pointer
from tpbench.kernels import cached_launch as module
from tpbench.kernels.cached_launch import CachedLaunch, cached_launch

MEMORY = torch.zeros(64, dtype=torch.int32)
POINTERS = {
    (dtype, offset): MEMORY.view(dtype)[offset : offset + 1]
    for dtype in (torch.float32, torch.bfloat16)
    for offset in (0, 1, 8, 16)
}
"""Tensors of 4 and 2 bytes per element, at multiples of 16 bytes or not."""


def _kernel(x, y, n, step, scale, late, SIZE: tl.constexpr, FLAG: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return fake_gpu(monkeypatch)


@pytest.fixture
def kernel() -> JITFunction:
    return JITFunction(_kernel)  # in place of triton.jit, which makes one for the interpreter


X, Y = POINTERS[torch.float32, 0], POINTERS[torch.bfloat16, 0]


def call(launch: CachedLaunch, **changes: Any) -> Any:
    given = {"programs": 3, "x": X, "y": Y, "n": 5, "step": 1, "scale": 0.5, "late": 16, **changes}
    x, y, n, step = (given[name] for name in ("x", "y", "n", "step"))
    return launch(given["programs"], (x, y), (n, step), (given["scale"],), (given["late"],))


def test_the_second_call_of_a_kind_skips_what_triton_would_do_again(gpu: FakeGpu, kernel: JITFunction) -> None:
    launch = CachedLaunch(kernel, SIZE=4, FLAG=True, num_warps=8)
    first, second = call(launch), call(launch)
    assert gpu.bound == 1 and first is second and len(gpu.compiled) == 1
    assert gpu.launched[0] == gpu.launched[1]
    assert gpu.launched[1].grid == (3, 1, 1)
    assert gpu.launched[1].arguments == (pointer(X), pointer(Y), 5, 1, 0.5, 16, 4, True)


@pytest.mark.parametrize(
    "changes",
    [
        {"programs": 9},
        {"scale": -2.0},
        {"x": POINTERS[torch.float32, 8]},  # as aligned
        {"y": POINTERS[torch.bfloat16, 16]},
    ],
)
def test_what_triton_compiles_nothing_by_goes_the_short_way(
    gpu: FakeGpu, kernel: JITFunction, changes: dict[str, Any]
) -> None:
    launch = CachedLaunch(kernel, SIZE=4, FLAG=True)
    call(launch)
    call(launch, **changes)
    assert gpu.bound == 1
    short = gpu.launched.pop()
    call(CachedLaunch(kernel, SIZE=4, FLAG=True), **changes)
    assert gpu.bound == 2 and gpu.launched.pop() == short


@pytest.mark.parametrize(
    "changes",
    [
        {"x": POINTERS[torch.float32, 1]},
        {"x": POINTERS[torch.bfloat16, 0]},
        {"x": None},
        {"y": POINTERS[torch.bfloat16, 1]},
        {"n": 1},
        {"n": 16},
        {"n": 2**31},
        {"step": 2},
        {"late": 1},
    ],
)
def test_another_kind_of_call_goes_tritons_way_once(gpu: FakeGpu, kernel: JITFunction, changes: dict[str, Any]) -> None:
    launch = CachedLaunch(kernel, SIZE=4, FLAG=True)
    usual, other = call(launch), call(launch, **changes)
    assert gpu.bound == 2 and len(gpu.compiled) == 2 and other is not usual
    assert call(launch, **changes) is other and call(launch) is usual and gpu.bound == 2


def test_integers_that_the_kernel_is_not_specialised_for_make_one_kind(gpu: FakeGpu) -> None:
    launch = CachedLaunch(JITFunction(_kernel, do_not_specialize=["step", "scale", "late"]), SIZE=4, FLAG=True)
    for number in (1, 16, 7, 2**31 - 1):
        launch(3, (X, Y), (5,), varying=(number, number, 0))
    assert gpu.bound == 1 and [each.arguments[3] for each in gpu.launched] == [1, 16, 7, 2**31 - 1]
    launch(3, (X, Y), (5,), varying=(2**31, 1, 0))
    assert gpu.bound == 2 and len(gpu.compiled) == 2


ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "x": st.sampled_from([None, *POINTERS.values()]),
        "y": st.sampled_from([None, *POINTERS.values()]),
        "n": st.sampled_from([0, 1, 5, 16, 17, -16, 2**31 - 1, 2**31, 2**63]),
        "step": st.sampled_from([0, 1, 16, 4096]),
        "scale": st.sampled_from([0.0, 1.0, -3.5, 1]),
        "late": st.sampled_from([0, 1, 2**40]),
        "programs": st.sampled_from([1, 132]),
    },
)


@given(st.lists(ARGUMENTS, max_size=12))
def test_whatever_the_calls_each_launches_what_triton_would(calls: list[dict[str, Any]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu, kernel = fake_gpu(monkeypatch), JITFunction(_kernel)
        launch = CachedLaunch(kernel, SIZE=4, FLAG=False)
        for changes in calls + calls:
            call(launch, **changes)
            call(CachedLaunch(kernel, SIZE=4, FLAG=False), **changes)  # remembers nothing
            ours, tritons = gpu.launched[-2:]
            assert ours == tritons


def test_constants_and_options_are_a_launchs_own(gpu: FakeGpu, kernel: JITFunction) -> None:
    launch = cached_launch(kernel, SIZE=4, FLAG=True)
    assert cached_launch(kernel, SIZE=4, FLAG=True) is launch
    others = [{"SIZE": 8, "FLAG": True}, {"SIZE": 4, "FLAG": False}, {"SIZE": 4, "FLAG": True, "num_warps": 8}]
    assert all(cached_launch(kernel, **other) is not launch for other in others)
    kernels = {call(cached_launch(kernel, **other)) for other in others} | {call(launch)}
    assert len(kernels) == 4 and len(gpu.compiled) == 4


def test_an_integer_among_floats_is_one(gpu: FakeGpu, kernel: JITFunction) -> None:
    launch = CachedLaunch(kernel, SIZE=4, FLAG=True)
    assert call(launch, scale=1) is call(launch, scale=1.0)
    assert [type(each.arguments[4]) for each in gpu.launched] == [float, float]


def test_each_device_has_its_own(gpu: FakeGpu, kernel: JITFunction) -> None:
    launch = CachedLaunch(kernel, SIZE=4, FLAG=True)
    first = call(launch)
    gpu.device, gpu.stream = 1, 9
    second = call(launch)
    assert second is not first and call(launch) is second and gpu.bound == 2
    gpu.device = 0
    assert call(launch) is first and gpu.bound == 2


def test_it_goes_to_the_stream_that_is_current(gpu: FakeGpu, kernel: JITFunction) -> None:
    launch = CachedLaunch(kernel, SIZE=4, FLAG=True)
    for stream in (7, 8, 7):
        gpu.stream = stream
        call(launch)
    assert [each.stream for each in gpu.launched] == [7, 8, 7] and gpu.bound == 1


@pytest.mark.parametrize(
    ("knobs_of", "name", "value"),
    [
        (knobs.runtime, "debug", True),
        (knobs.compilation, "instrumentation_mode", "proton"),
        (knobs.runtime, "add_stages_inspection_hook", lambda *given: ("key", "hash")),
    ],
)
def test_who_changes_what_is_compiled_gets_tritons_way(
    gpu: FakeGpu, kernel: JITFunction, monkeypatch: pytest.MonkeyPatch, knobs_of: Any, name: str, value: Any
) -> None:
    launch = CachedLaunch(kernel, SIZE=4, FLAG=True)
    with monkeypatch.context() as changed:
        changed.setattr(knobs_of, name, value)
        call(launch)
        call(launch)
        assert gpu.bound == 2
    usual = call(launch)  # not one of those
    assert gpu.bound == 3 and call(launch) is usual and gpu.bound == 3
    monkeypatch.setattr(knobs_of, name, value)
    call(launch)
    assert gpu.bound == 4


def test_hooks_before_a_run_are_called_with_its_arguments(gpu: FakeGpu, kernel: JITFunction) -> None:
    launch = CachedLaunch(kernel, SIZE=4, FLAG=True)
    call(launch)
    seen = []
    kernel.add_pre_run_hook(lambda *arguments, **constants: seen.append((arguments, constants["SIZE"])))
    call(launch)
    assert seen == [((X, Y, 5, 1, 0.5, 16), 4)] and gpu.bound == 2


def test_hooks_of_launches_see_both_ways_alike(gpu: FakeGpu, kernel: JITFunction) -> None:
    seen: list[Any] = []

    def enter(metadata: Any) -> None:
        seen.append(metadata.get())

    knobs.runtime.launch_enter_hook.add(enter)
    try:
        launch = CachedLaunch(kernel, SIZE=4, FLAG=True)
        call(launch)
        call(launch)
    finally:
        knobs.runtime.launch_enter_hook.remove(enter)
    assert gpu.bound == 1 and len(seen) == 2 and seen[0] == seen[1] and seen[0]["stream"] == 7


def test_nothing_is_remembered_of_a_compilation_that_was_called_off(
    gpu: FakeGpu, kernel: JITFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = CachedLaunch(kernel, SIZE=4, FLAG=True)
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **given: True)
    assert call(launch) is None and call(launch) is None and gpu.bound == 2 and not gpu.launched


def test_its_memory_is_bounded(gpu: FakeGpu, kernel: JITFunction) -> None:
    launch = CachedLaunch(kernel, SIZE=4, FLAG=True)
    for n in range(2, module.MOST_REMEMBERED + 12):
        call(launch, n=n)
    assert len(launch._compiled) == 10
    assert len(gpu.launched) == gpu.bound == module.MOST_REMEMBERED + 10
