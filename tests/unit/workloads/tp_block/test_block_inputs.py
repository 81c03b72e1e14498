"""Inputs of the block that are the same at any world size, and layers without a process group."""

from __future__ import annotations

import pytest
import torch

from tests.support.tp_block import context, problem, unshard
from tpbench.workloads.tp_block.execution.layers import ColumnParallelLinear, RMSNorm
from tpbench.workloads.tp_block.inputs import BlockInputs


@pytest.mark.parametrize("size", [2, 4])
def test_hashed_inputs_are_the_same_whole_at_any_size(size: int) -> None:
    for part in ("block", "column", "row"):
        cell = problem(part=part, dtype="bfloat16")
        inputs = BlockInputs(cell, context())
        full, shards = inputs.weights_of(0, 1), [inputs.weights_of(rank, size) for rank in range(size)]
        for linear in cell.linears:
            assert torch.equal(unshard(linear, [shard[linear.name] for shard in shards]), full[linear.name])
            assert torch.equal(linear.shard(full[linear.name], 1, size), shards[1][linear.name])
            assert 0.6 < full[linear.name].float().std() * linear.in_features**0.5 < 1.6
        for made, over_rows in ((inputs.x, part != "row"), (inputs.grad, part != "column")):
            assert torch.equal(torch.cat([made(rank, size) for rank in range(size)], 0 if over_rows else 1), made(0, 1))


def test_without_a_group_layers_say_so() -> None:
    for layer in (lambda: ColumnParallelLinear(4, 4), lambda: RMSNorm(torch.ones(4))):
        with pytest.raises(ValueError, match="init_process_group first"):
            layer()
