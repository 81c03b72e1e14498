"""A cached launch reaches the driver with the same arguments as Triton's own, and only for calls of the same kind."""

from typing import Any

import pytest
import torch
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime.jit import JITFunction

from tests.support.fake_gpu import FakeGpu, fake_gpu, pointer
from tpbench.kernels.cached_launch import MOST_REMEMBERED, CachedLaunch

MEMORY = torch.zeros(64, dtype=torch.int32)
POINTERS = {
    (dtype, offset): MEMORY.view(dtype)[offset : offset + 1]
    for dtype in (torch.float32, torch.bfloat16)
    for offset in (0, 1, 8, 16)
}
"""Tensors of 4 and 2 bytes per element, at multiples of 16 bytes or not."""
X, Y = POINTERS[torch.float32, 0], POINTERS[torch.bfloat16, 0]


def _kernel(x, y, n, step, scale, late, SIZE: tl.constexpr, FLAG: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return fake_gpu(monkeypatch)


@pytest.fixture
def launch() -> CachedLaunch:
    # JITFunction in place of triton.jit, which makes a function for the interpreter.
    return CachedLaunch(JITFunction(_kernel), SIZE=4, FLAG=True)


def call(launch: CachedLaunch, **changes: Any) -> Any:
    given = {"programs": 3, "x": X, "y": Y, "n": 5, "step": 1, "scale": 0.5, "late": 16, **changes}
    x, y, n, step = (given[name] for name in ("x", "y", "n", "step"))
    return launch(given["programs"], (x, y), (n, step), (given["scale"],), (given["late"],))


@pytest.mark.parametrize(
    "changes",
    [
        {"programs": 9},
        {"scale": -2.0},
        {"scale": 1},  # Triton would compile an integer in place of a float
        {"x": POINTERS[torch.float32, 8]},
    ],
)
def test_a_call_of_the_same_kind_skips_what_triton_would_do_again(
    gpu: FakeGpu, launch: CachedLaunch, changes: dict[str, Any]
) -> None:
    first = call(launch)
    assert call(launch, **changes) is first and gpu.bound == 1 and len(gpu.compiled) == 1
    values = {"x": X, "programs": 3, "scale": 0.5, **changes}
    assert gpu.launched[1].grid == (values["programs"], 1, 1)
    assert gpu.launched[1].arguments == (pointer(values["x"]), pointer(Y), 5, 1, values["scale"], 16, 4, True)
    assert isinstance(gpu.launched[1].arguments[4], float)


def test_a_bound_launch_takes_the_pointers_alone(gpu: FakeGpu, launch: CachedLaunch) -> None:
    bound, other = launch.bound(3, (5, 1), (1,), (16,)), POINTERS[torch.float32, 8]
    assert bound(X, Y) is bound(other, Y) and gpu.bound == len(gpu.compiled) == 1
    for x, launched in zip((X, other), gpu.launched, strict=True):
        assert launched.grid == (3, 1, 1) and launched.arguments == (pointer(x), pointer(Y), 5, 1, 1.0, 16, 4, True)
        assert isinstance(launched.arguments[4], float)


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


def test_each_device_has_its_own_and_the_stream_is_the_current_one(gpu: FakeGpu, launch: CachedLaunch) -> None:
    first = call(launch)
    gpu.device, gpu.stream = 1, 9
    second = call(launch)
    assert second is not first and call(launch) is second and gpu.bound == 2
    gpu.device = 0
    assert call(launch) is first and gpu.bound == 2
    assert [launched.stream for launched in gpu.launched] == [7, 9, 9, 9]


def test_its_memory_is_bounded(gpu: FakeGpu, launch: CachedLaunch) -> None:
    for n in (*range(MOST_REMEMBERED + 1), 1):
        call(launch, n=n + 2)
    assert gpu.bound == MOST_REMEMBERED + 2  # the early ones are forgotten
