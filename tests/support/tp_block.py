"""Problems, contexts and the result of one process for the tests of the transformer block."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import Rank
from tpbench import packages
from tpbench.comm.parallel_linears import LocalSchedule
from tpbench.measure.session import Context
from tpbench.workloads.tp_block import WORKLOAD, TpBlock
from tpbench.workloads.tp_block.execution.layers import gradients
from tpbench.workloads.tp_block.execution.prepared import BlockContext, PreparedBlock, prepare
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.oracle import BlockResult, own_part
from tpbench.workloads.tp_block.problem import ShardedLinear

PARTS = ("block", "mlp", "column", "row")
HERE = sorted(
    name
    for name, each in WORKLOAD.variants.items()
    if (torch.cuda.is_available() or not each.requires_cuda) and not packages.missing(each.requires)
)
"""The variants that this machine can run."""
QUACK = {"tokens": 512, "ffn": 64, "head_dim": 8, "dtype": "bfloat16"}
"""Sizes that QuACK's tiles fit, on up to four ranks."""


def problem(**fields: Any) -> TpBlock:
    """A small problem that four ranks share."""
    sizes = {"tokens": 32, "hidden": 24, "ffn": 40, "heads": 8, "kv_heads": 4, "head_dim": 6}
    return TpBlock(**{**sizes, "dtype": "float64", **fields})


def context(here: Rank | None = None, *, group: dist.ProcessGroup | None = None) -> Context:
    """A rank of a real group, or a lone process."""
    if here is None:
        nobody: Any = None
        return Context(0, 1, 0, 1, 0, 1, nobody, nobody, torch.device("cpu"))
    group = group or here.group
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return Context(here.rank, here.world_size, rank, size, 0, 1, group, group, here.device)


class FixedStopwatch:
    """A stopwatch for which every step takes 1 ms, so that preparations do not depend on time."""

    def ms(self, run: Any, restore: Any = None, *, on_host: bool = False) -> float:
        run()
        return 1.0

    def interleaved_ms(self, *timed: Any, iterations: int | None = None, on_host: bool = False) -> list[list[float]]:
        return [[self.ms(*each)] for each in timed]

    chained_ms = interleaved_ms


def block_context(here: Rank, cell: TpBlock, group: dist.ProcessGroup | None = None) -> BlockContext:
    """The arguments of a variant's preparation."""
    stopwatch: Any = FixedStopwatch()
    return BlockContext(BlockInputs(cell, context(here, group=group)), stopwatch)


def unshard(linear: ShardedLinear, shards: Sequence[Tensor]) -> Tensor:
    """Return the full weight from every rank's part, in rank order."""
    if linear.kind == "row":
        return torch.cat(list(shards), dim=1)
    parts = [shard.split([features // len(shards) for features in linear.out_features]) for shard in shards]
    return torch.cat([torch.cat(part) for part in zip(*parts, strict=True)])


@functools.cache
def one_process(cell: TpBlock) -> BlockResult:
    """Run the problem on full weights in its dtype, without communication, in one process and without a compiler."""
    stopwatch: Any = FixedStopwatch()
    alone = replace(cell, compile=False)
    return run_once(alone, prepare(BlockContext(BlockInputs(alone, context()), stopwatch), LocalSchedule()))


def run_once(cell: TpBlock, prepared: PreparedBlock) -> BlockResult:
    """Run one forward and backward pass, and free its gradients."""
    output = prepared.step()
    assert prepared.x.grad is not None
    result = BlockResult(output, prepared.x.grad, gradients(cell, prepared.module))
    prepared.free()
    return result


def errors_against_one_process(result: BlockResult, cell: TpBlock, inputs: BlockInputs, size: int) -> dict[str, float]:
    """Return the largest relative error of a row, by tensor, of a result that `size` ranks share."""
    if size != inputs.size:
        result = own_part(result, inputs)
    expected = own_part(one_process(cell), inputs)
    assert set(result.grads) == set(expected.grads)
    pairs = {"output": (result.output, expected.output), "input": (result.grad_input, expected.grad_input)}
    pairs |= {name: (result.grads[name], grad) for name, grad in expected.grads.items()}
    return {name: row_error(got.cpu().double(), right.double()) for name, (got, right) in pairs.items()}


def row_error(got: Tensor, right: Tensor) -> float:
    """Return the largest ||row - right|| / ||right|| of a row. A vector is one row. A NaN counts as inf."""
    error, norm = (torch.linalg.vector_norm(torch.atleast_2d(rows), dim=-1) for rows in (got - right, right))
    return float((error / norm.clamp_min(1e-300)).nan_to_num(nan=math.inf).max())


def largest_error(cell: TpBlock, context: BlockContext, prepared: PreparedBlock) -> float:
    """Run once and return the largest relative error of a row."""
    result = run_once(cell, prepared)
    return max(errors_against_one_process(result, cell, context.inputs, prepared.size).values())
