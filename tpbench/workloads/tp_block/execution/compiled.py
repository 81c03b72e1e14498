"""The block through torch.compile, whose pass for micro-pipelined tensor parallelism overlaps the collectives."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpbench.comm.parallel_linears import SequentialSchedule
from tpbench.comm.symmetric_buffers import enable_symmetric_memory
from tpbench.workloads.tp_block.execution.prepared import BlockContext, PreparedBlock
from tpbench.workloads.tp_block.execution.prepared import prepare as prepare_eager


def prepare(context: BlockContext) -> PreparedBlock:
    """Prepare the block to be compiled at its first call.

    The compiler also fuses elementwise operations, in the module without communication too. No schedule of a single
    operation can be timed alone.
    """
    group: dist.ProcessGroup = context.inputs.group
    enable_symmetric_memory(group)
    config: Any = importlib.import_module("torch._inductor.config")
    config._micro_pipeline_tp = True
    prepared = dataclasses.replace(prepare_eager(context, SequentialSchedule(group), wrap=compiled), plan=None)
    fill_replacements(prepared)
    return prepared


def fill_replacements(prepared: PreparedBlock) -> None:
    """Run one eager step without communication, so that the compiled one does not contain its replacement tensors."""
    if prepared.without_communication is None:  # a stack is not compared with one without communication
        return
    prepared.without_communication(prepared.x).backward(prepared.grad)
    prepared.without_communication.zero_grad(set_to_none=True)
    prepared.x.grad = None


def compiled(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Compile a module to one graph for the forward pass and one for the backward pass."""
    return torch.compile(module, fullgraph=True, dynamic=False)
