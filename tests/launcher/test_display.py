"""What a person is told of the time left."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launcher.rows import cell
from tpbench.launcher import display


@pytest.mark.parametrize(
    ("done", "running", "total", "said"),
    [
        ([], [5.0], 4, ""),
        ([10.0, 20.0], [5.0], 4, "about 25 s left"),
        ([10.0, 20.0], [400.0], 4, "more than 15 s left"),
        ([10.0, 20.0], [400.0], 3, ""),  # the last one takes long: nobody knows how long
        ([10.0, 20.0], [400.0, 5.0], 4, "more than 5 s left"),
        ([100.0], [40.0], 11, "about 16 min left"),
    ],
)
def test_time_left_is_never_said_to_be_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, done: list[float], running: list[float], total: int, said: str
) -> None:
    monkeypatch.setattr(display.time, "monotonic", lambda: 1000.0)
    shown = display.Display(total, tmp_path)
    ended: Any = SimpleNamespace(status="ok")
    shown.done = [(ended, seconds) for seconds in done]
    shown.running = {at: (cell(at, tmp_path), "running", 1000.0 - seconds) for at, seconds in enumerate(running)}
    assert shown._time_left() == said
