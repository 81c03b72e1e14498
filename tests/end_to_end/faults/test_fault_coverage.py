"""No fault of the catalogue is left without a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fault_catalogue import FAULTS


def test_every_fault_has_a_test(request: pytest.FixtureRequest) -> None:
    here = set(Path(__file__).parent.glob("test_*.py"))
    if request.config.option.keyword or here - {item.path for item in request.session.items}:
        pytest.skip("this run has only a part of the faults")
    markers = [marker for item in request.session.items for marker in item.iter_markers("fault")]
    assert {fault for marker in markers for fault in marker.args} == set(FAULTS)
