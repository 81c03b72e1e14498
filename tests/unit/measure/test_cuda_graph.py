"""Captures of CUDA graphs, without a GPU: torch's streams and graphs are replaced."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tpbench.measure import cuda_graph


def test_the_current_stream_is_that_of_before_also_if_a_capture_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.graph ends the capture, which raises, before it returns to the stream of before."""
    current = ["default"]

    @contextlib.contextmanager
    def on_stream(stream: str) -> Iterator[None]:
        before, current[0] = current[0], stream
        try:
            yield
        finally:
            current[0] = before

    @contextlib.contextmanager
    def invalidated(*_: Any, **__: Any) -> Iterator[None]:
        current[0] = "capturing"
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    for name, value in {"stream": on_stream, "graph": invalidated, "CUDAGraph": lambda: None}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    with pytest.raises(RuntimeError, match="during capture"):
        cuda_graph.capture(lambda: None)
    assert current == ["default"]
