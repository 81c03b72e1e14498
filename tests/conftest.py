"""Settings of all tests: Triton's interpreter, hypothesis and threads."""

import atexit
import gc
import importlib
import os
from collections.abc import Generator, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.registered import forget

# Without a GPU the kernels run in Triton's interpreter. Triton reads this variable when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    importlib.import_module("tests.support.quick_interpreter")

# CI tests every change with the same examples. A developer's runs try new ones each time. To make and to run an example
# may take long beside other work.
ci = bool(os.environ.get("CI"))
settings.register_profile("tests", derandomize=ci, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# Tests run side by side. More threads would wait for each other in busy loops, which multiplies the CPU time.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the commands that tests start, and for workers of pytest-xdist
torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def forget_workloads() -> Iterator[None]:
    """Forget the workloads of users' files of which a module's tests have read rows."""
    yield
    forget()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave torch, transformers and the collected tests out of garbage collections, of which each would visit them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # Triton's library prints what is left when the interpreter ends
