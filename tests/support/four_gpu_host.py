"""A host with four GPUs that do not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpbench.launcher import devices


def pretend_four_gpus(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Pretend that this host has four GPUs."""
    monkeypatch.setattr(devices, "FOLDER", folder)
    monkeypatch.setattr(devices, "visible_gpus", lambda: [(f"GPU-{each}", str(each)) for each in range(4)])
