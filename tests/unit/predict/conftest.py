"""Predictions of tests are for the GPU of the rows, not for that of the machine."""

import pytest

from tests.support import synthetic
from tpbench.predict import target


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(target, "this_gpu", lambda: None)


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    return str(synthetic.write(synthetic.cells(), tmp_path_factory.mktemp("rows")))
