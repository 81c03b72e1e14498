"""Replayed work: called directly once, captured once, and then replayed. No GPU is involved."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from tpbench.workloads.embedding_grad.row_operations.search import Replayed


def test_work_is_called_once_and_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    graph = mock.Mock()
    graph.capture_begin.side_effect = lambda **_: lines.append("capture")
    graph.capture_end.side_effect = lambda: lines.append("captured")
    graph.replay.side_effect = lambda: lines.append("replay")
    cuda: Any = torch.cuda
    monkeypatch.setattr(cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(cuda, "Stream", lambda device: mock.Mock())
    monkeypatch.setattr(cuda, "current_stream", lambda device: mock.Mock())
    monkeypatch.setattr(cuda, "stream", lambda stream: nullcontext())
    capturing = False
    monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: capturing)
    run = Replayed(lambda: lines.append("work"), torch.device("cuda", 0))
    for _ in range(3):
        run()
    assert lines == ["work", "capture", "work", "captured", "replay", "replay"]
    capturing = True  # another graph holds the launches themselves
    run()
    assert lines[-1] == "work"


def test_on_a_cpu_each_call_is_a_call_of_the_work() -> None:
    lines: list[str] = []
    run = Replayed(lambda: lines.append("work"), torch.device("cpu"))
    run()
    run()
    assert lines == ["work"] * 2
