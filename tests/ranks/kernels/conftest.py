"""The device and the algorithms that the tests of kernels on one rank run with."""

from typing import Any

import pytest
import torch

from tests.support.kernel_reference import ALGORITHMS, DEVICE


@pytest.fixture(params=ALGORITHMS)
def algorithm(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the options of `entropy_loss` that choose an algorithm."""
    return dict(ALGORITHMS[request.param])


@pytest.fixture
def device() -> torch.device:
    return DEVICE
