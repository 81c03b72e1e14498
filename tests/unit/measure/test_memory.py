"""Limits, peaks and the end of memory, in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.support.command import ROOT
from tpbench.measure import memory


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize("allocate", ["torch.empty(n, dtype=torch.int8)", "np.zeros(n, dtype=np.int8)"])
def test_beyond_the_limit_an_allocation_raises_and_the_process_goes_on(allocate: str) -> None:
    answer = run(
        "import torch, numpy as np\n"
        "from tpbench.measure import memory\n"
        "print(memory.limit(torch.device('cpu'), 0.5, 1))\n"
        f"n = 2**28\nkept = {allocate}\n"
        f"n = 2**29\n"
        f"try:\n    {allocate}\n"
        "except (RuntimeError, MemoryError) as error:\n    print(memory.shortage(error))\n"
        "print('on')"
    )
    assert answer.split() == ["0.5", str(2**29), "on"]


def test_the_default_limit_shares_what_is_free() -> None:
    code = "import torch\nfrom tpbench.measure import memory\nprint(memory.limit(torch.device('cpu'), None, {}))"
    one, four = (float(run(code.format(ranks))) for ranks in (1, 4))
    assert one / four == pytest.approx(4, rel=0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is Linux's")
def test_extra_peak_sees_what_is_freed_again() -> None:
    answer = run(
        "import torch\n"
        "from tpbench.measure import memory\n"
        "before = torch.ones(2**28, dtype=torch.int8)\n"
        "with memory.extra_peak(torch.device('cpu')) as peak:\n"
        "    temporary = torch.ones(2**28, dtype=torch.int8)\n"
        "    del temporary\n"
        "    kept = torch.ones(2**27, dtype=torch.int8)\n"
        "print(peak.gib)"
    )
    assert float(answer) == pytest.approx(0.25, abs=0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_what_is_left_is_what_the_limit_leaves() -> None:
    answer = run(
        "import torch\n"
        "from tpbench.measure import memory\n"
        "memory.limit(torch.device('cpu'), 1.0, 1)\n"
        "kept = torch.ones(2**28, dtype=torch.int8)\n"
        "print(memory.left(torch.device('cpu')) / 2**30)"
    )
    assert float(answer) == pytest.approx(0.75, abs=0.05)


@pytest.mark.parametrize(
    ("error", "bytes_asked"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB. GPU 0 has a total"), 7 * 2**30),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), 20 * 2**20),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."), 4096),
        (RuntimeError("NCCL error: Cuda failure 2 'out of memory'"), 0),
        (MemoryError(), 0),
        (RuntimeError("shape mismatch"), None),
        (ValueError("out of memory of my cat"), None),
    ],
)
def test_shortage(error: Exception, bytes_asked: int | None) -> None:
    assert memory.shortage(error) == bytes_asked


def test_shortage_of_numpy() -> None:
    with pytest.raises(MemoryError) as caught:
        np.empty((2**40, 2**10), dtype=np.float32)
    assert memory.shortage(caught.value) == 2**52
