"""Predictions of tests are for the GPU of the rows, not for that of the machine."""

import pytest

from tpbench.predict import memory as target


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(target, "this_gpu", lambda: None)
