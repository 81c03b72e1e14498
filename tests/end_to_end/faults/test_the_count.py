"""Runs last of its folder: no fault of the catalogue was left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fault_catalogue import Tried


def test_every_fault_was_tried(request: pytest.FixtureRequest, tried: Tried) -> None:
    here = set(Path(__file__).parent.glob("test_*.py"))
    if request.config.option.keyword or here - {each.path for each in request.session.items}:
        pytest.skip("only a part of the faults is tried in this run")
    assert tried.missing() == []
