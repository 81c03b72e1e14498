"""Capture work on a GPU as a CUDA graph: the host then launches one graph in place of many kernels."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from tpbench.measure.audit import AuditedSession

WARMUP_PASSES = 3
"""Passes before a capture: they allocate shared memory and choose kernels."""

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class CapturedWork(Generic[ResultT]):
    """A captured call. A capture runs no kernel, and each replay fills the tensors of its result."""

    result: ResultT
    replay: Callable[[], None]
    """Launch the graph on the current stream."""


def warm_up(work: Callable[[], object], passes: int = WARMUP_PASSES) -> None:
    """Run the work on a side stream before it is captured, as torch asks."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(passes):
            work()
    current.wait_stream(side)


def capture(
    work: Callable[[], ResultT], *, stream: torch.cuda.Stream | None = None, pool: Any = None
) -> CapturedWork[ResultT]:
    """Capture a call of the work, which queues kernels and collectives over NCCL, and does not wait for the device.

    stream: that of the capture, if the work refers to streams. pool: memory of `torch.cuda.graph_pool_handle()`, which
    graphs may share that do not run at the same time.
    """
    graph = torch.cuda.CUDAGraph()
    collects_garbage = gc.isenabled()  # which may free symmetric memory, and so wait for the device
    gc.collect()
    gc.disable()
    # torch keeps one workspace of cuBLAS for each stream, and frees it with any graph that was captured on the stream,
    # though other graphs still use it (pytorch issue 193402). So each graph gets one in its own memory.
    torch._C._cuda_clearCublasWorkspaces()
    try:
        # NCCL's watchdog queries events in a thread of its own, which a global capture would forbid.
        captured = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        # A failed capture leaves its stream as the current one, from which the first context returns.
        with torch.cuda.stream(torch.cuda.current_stream()), captured:
            result = work()
    finally:
        torch._C._cuda_clearCublasWorkspaces()
        if collects_garbage:
            gc.enable()
    return CapturedWork(result, graph.replay)


def captured_step(session: AuditedSession, pool: Any = None) -> Callable[[], None]:
    """Return the session's step as the replay of a graph, which fills the output that the capture left."""

    def one_pass() -> None:
        session.restore()
        session.step()

    session.release()
    warm_up(one_pass)
    session.release()
    replay = capture(session.step, pool=pool).replay
    session.keeps_output = True
    return replay
