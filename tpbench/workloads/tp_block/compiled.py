"""The same modules through torch.compile, whose pass for micro-pipelined tensor parallelism fuses the collectives."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

from tpbench.comm.symmetric_buffers import enable_symmetric_memory
from tpbench.workloads.tp_block.prepared import Place, Prepared
from tpbench.workloads.tp_block.prepared import prepare as prepare_plain
from tpbench.workloads.tp_block.schedule import Pending, Sequential


class Functional(Sequential):
    """The plain schedule in collectives that the compiler sees: it finds them beside their products."""

    def gather(self, shard: Tensor) -> Pending:
        whole = functional.all_gather_tensor(shard, 0, self.group)
        return lambda: whole

    def scatter(self, parts: Tensor) -> Tensor:
        return functional.reduce_scatter_tensor(parts, "sum", 0, self.group)


def prepare(place: Place) -> Prepared:
    """Compiled when first called. Its elementwise operations are fused too, and so are those of the module without
    communication; there is no schedule of one operation that could be timed alone."""
    group: dist.ProcessGroup = place.inputs.group
    enable_symmetric_memory(group)
    config: Any = importlib.import_module("torch._inductor.config")
    config._micro_pipeline_tp = True
    prepared = dataclasses.replace(prepare_plain(place, Functional(group), through=compiled), plan=None)
    fill(prepared)
    return prepared


def fill(prepared: Prepared) -> None:
    """One step of the module without communication as it is: what it makes up is no work of the compiled one."""
    assert prepared.bare is not None
    prepared.bare(prepared.x).backward(prepared.grad)
    prepared.bare.zero_grad(set_to_none=True)
    prepared.x.grad = None


def compiled(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """As one graph each for the forward and the backward pass."""
    return torch.compile(module, fullgraph=True, dynamic=False)
