"""The installed Triton kernels of other projects, in Triton's interpreter. Tests of missing packages are skipped.

On GPUs the tests of all variants run these kernels.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.entropy_loss import context, problem
from tests.support.ranks import Rank, run_on_ranks
from tpbench.workloads.entropy_loss import WORKLOAD, EntropyLoss

# The interpreter cannot multiply a bfloat16 number by a scale, as the kernel of flash-attention does.
CELLS = {
    "flash_attn": [
        problem(vocab=996, dtype="float32", logits_scale=0.7, ignored=0.4),
        problem(vocab=996, dtype="float16"),
    ],
    "transformer_engine": [
        problem(vocab=996, dtype="bfloat16", ignored=0.4),
        problem(vocab=996, dtype="float32"),
    ],
}


gather = dist.all_gather_into_tensor


def gather_flat(output: Tensor, numbers: Tensor, group: Any) -> None:
    gather(output.flatten(0, 1), numbers, group)


def complaints(here: Rank | None, name: str) -> list[str | None]:
    return [_complaint(here, name, cell) for cell in CELLS[name]]


def _complaint(here: Rank | None, name: str, cell: EntropyLoss) -> str | None:
    session: Any = WORKLOAD.set_up(cell, WORKLOAD.variants[name], context(here))
    with contextlib.ExitStack() as patches:
        if name == "flash_attn":
            # This function enters the CUDA device of the logits, and gathers into a shape that gloo does not support.
            patches.enter_context(mock.patch.object(torch.cuda, "device", lambda index: contextlib.nullcontext()))
            patches.enter_context(mock.patch.object(dist, "all_gather_into_tensor", gather_flat))
        else:
            # Transformer Engine's function rejects logits of a CPU.
            module = sys.modules["transformer_engine.pytorch.cross_entropy"]
            patches.enter_context(mock.patch.object(module, "_validate_inputs"))
        session.step()
    complaint: str | None = session.check().wrong
    return complaint


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests of all variants run on GPUs")
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", sorted(CELLS))
def test_an_installed_kernel_agrees_with_the_oracle(name: str, tp_size: int) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}")
    ranks = [complaints(None, name)] if tp_size == 1 else run_on_ranks(tp_size, complaints, name)
    assert ranks == [[None] * len(CELLS[name])] * tp_size
