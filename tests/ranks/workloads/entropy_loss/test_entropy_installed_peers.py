"""flash-attention's Triton kernel, if it is installed, in Triton's interpreter.

On GPUs the tests of all variants run this kernel.
"""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.entropy_loss import context, problem
from tests.support.ranks import Rank, run_on_ranks
from tpbench.workloads.entropy_loss import WORKLOAD, EntropyLoss

# The interpreter cannot multiply a bfloat16 number by a scale, as the kernel does.
CELLS = [
    problem(vocab=996, dtype="float32", logits_scale=0.7, ignored=0.4),
    problem(vocab=996, dtype="float16"),
]


gather = dist.all_gather_into_tensor


def gather_flat(output: Tensor, numbers: Tensor, group: Any) -> None:
    gather(output.flatten(0, 1), numbers, group)


def complaints(here: Rank | None) -> list[str | None]:
    return [_complaint(here, cell) for cell in CELLS]


def _complaint(here: Rank | None, cell: EntropyLoss) -> str | None:
    session: Any = WORKLOAD.set_up(cell, WORKLOAD.variants["flash_attn"], context(here))
    # This function enters the CUDA device of the logits, and gathers into a shape that gloo does not support.
    device = mock.patch.object(torch.cuda, "device", lambda index: contextlib.nullcontext())
    with device, mock.patch.object(dist, "all_gather_into_tensor", gather_flat):
        session.step()
    complaint: str | None = session.check().wrong
    return complaint


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests of all variants run on GPUs")
@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs flash_attn")
@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_installed_kernel_agrees_with_the_oracle(tp_size: int) -> None:
    ranks = [complaints(None)] if tp_size == 1 else run_on_ranks(tp_size, complaints)
    assert ranks == [[None] * len(CELLS)] * tp_size
