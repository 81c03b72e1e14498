"""The oracle of the transformer block on one rank, and a rank's part of a whole result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.lone_rank import lone_rank
from tests.support.tp_block import PARTS, context, one_process, problem
from tpbench.workloads.tp_block import TpBlock
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.oracle import expected_result, own_part

CASES: list[dict[str, Any]] = [*({"part": part} for part in PARTS), {"part": "block", "rotary": True}]


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_the_oracle_is_one_process(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    lone_rank(monkeypatch, 1)
    cell = problem(**fields)
    found, expected = expected_result(BlockInputs(cell, context())), one_process(cell)
    torch.testing.assert_close(found.output, expected.output, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.grad_input, expected.grad_input, rtol=1e-10, atol=1e-16)
    assert set(found.grads) == set(expected.grads)
    for name, grad in expected.grads.items():
        torch.testing.assert_close(found.grads[name], grad, rtol=1e-10, atol=1e-16)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_is_the_rows_or_columns_of_its_rank(part: str, rank: int) -> None:
    cell: TpBlock = problem(part=part)
    here = replace(context(), tp_rank=rank, tp_size=2)
    inputs = BlockInputs(cell, here)
    whole = one_process(cell)
    mine = own_part(whole, inputs)

    def half(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        length = tensor.shape[dim] // 2
        return tensor.narrow(dim, rank * length, length)

    assert torch.equal(mine.output, half(whole.output, 1 if part == "column" else 0))
    assert torch.equal(mine.grad_input, half(whole.grad_input, 1 if part == "row" else 0))
    assert {name: each.shape for name, each in mine.grads.items()} == {
        name: each.shape for name, each in inputs.weights.items()
    }
    for name, norm in mine.grads.items():
        if name.endswith("norm"):
            assert torch.equal(norm, whole.grads[name])
