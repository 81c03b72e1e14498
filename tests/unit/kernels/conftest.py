"""A fake GPU for the launches of the one-pass kernels."""

from collections.abc import Iterator

import pytest

from tests.support.fake_gpu import FakeGpu, fake_h200
from tpbench.kernels.cached_launch import cached_launch
from tpbench.kernels.one_pass import launch


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    for remembering in (launch.prepare, cached_launch):
        remembering.cache_clear()
    yield fake_h200(monkeypatch)
    for remembering in (launch.prepare, cached_launch):
        remembering.cache_clear()
