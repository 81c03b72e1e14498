"""Prepare a variant on one rank: a module that runs eagerly, compiled or as CUDA graphs, and one to compare it with."""

from __future__ import annotations

import dataclasses
import gc
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tpbench.comm.parallel_linears import Pending, Schedule, SequentialSchedule
from tpbench.comm.symmetric_buffers import enable_symmetric_memory
from tpbench.measure import cuda_graph
from tpbench.measure.rates import compute_ms
from tpbench.measure.session import Costs
from tpbench.measure.timers import Stopwatch
from tpbench.workloads.tp_block.execution.layers import Stack, build
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.problem import TpBlock, bytes_moved, bytes_sent, flops

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class BlockContext:
    """This rank's inputs, and a stopwatch to choose between schedules."""

    inputs: BlockInputs
    stopwatch: Stopwatch
    graph: bool = False
    """True if whole iterations are captured in a CUDA graph later."""
    rates: Mapping[str, Any] = field(default_factory=dict)
    """The rates of this machine, as columns: `gemm_tflops` of a large matrix product in the problem's dtype while all
    ranks compute, and `gather_gb_per_s` that a rank receives in a large all-gather, 0 for one rank."""

    def costs(self, size: int) -> Costs:
        """Return the costs of an iteration on one of `size` ranks at these rates."""
        problem = self.inputs.problem
        operations, received = flops(problem, size), bytes_sent(problem, size, least=True)
        return Costs(
            bytes_moved=bytes_moved(problem, size),
            bytes_communicated=bytes_sent(problem, size),
            flops=operations,
            compute_ms=compute_ms(operations, self.rates["gemm_tflops"]),
            wire_ms=received / self.rates["gather_gb_per_s"] / 1e6 if received else 0.0,
        )


@dataclass(frozen=True)
class PreparedBlock:
    """A variant on one rank, ready to run."""

    module: nn.Module
    x: Tensor
    """The input of the module, a leaf that requires its gradient."""
    grad: Tensor
    """The upstream gradient: of the loss by the module's output."""
    size: int
    """The number of ranks that share the block: 1 if each rank has the whole block."""
    run: Callable[[Tensor], Tensor]
    """Calls the module, possibly compiled."""
    schedule: Schedule | None = None
    """The schedule of the linears, or None if the ranks do not communicate or torch.compile schedules."""
    without_communication: PreparedBlock | None = None
    """The same on the same weights and tensors with its communication removed. None if it has none, and for a stack."""
    columns: Callable[[], dict[str, Any]] = field(default=dict)
    """Returns further columns of the variant, after a step."""

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that get gradients."""
        return self.x, *self.module.parameters()

    def forward(self) -> Tensor:
        return self.run(self.x)

    def backward(self, output: Tensor) -> None:
        output.backward(self.grad)

    def step(self) -> Tensor:
        """Run one forward and backward pass after freeing the gradients of the last one, and return the output."""
        self.free()
        output = self.forward()
        self.backward(output)
        return output.detach()

    def free(self) -> None:
        self.x.grad = None
        self.module.zero_grad(set_to_none=True)


class NoCommunicationSchedule(Schedule):
    """Products alone, to be timed. A gathered tensor is wrong: it has copies of the first shard of its shape."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.replacements: dict[torch.Size, Tensor] = {}

    def gather(self, shard: Tensor) -> Pending:
        if shard.shape not in self.replacements:
            self.replacements[shard.shape] = shard.detach().repeat(self.size, 1)
        whole = self.replacements[shard.shape]
        return lambda: whole

    def scatter(self, partial: Tensor) -> Tensor:
        return partial.view(self.size, -1, partial.shape[1])[self.rank]


def prepare(context: BlockContext, schedule: Schedule) -> PreparedBlock:
    """Prepare this rank's part of the block under a schedule, or the whole block under that of one process.

    With `layers` the module is a stack of blocks, each with weights of its own. A schedule's attribute `gib`, if it has
    one, is the memory that it shares with peers.
    """
    inputs, problem = context.inputs, context.inputs.problem
    rank, size = schedule.rank, schedule.size
    x, grad = inputs.x(rank, size).requires_grad_(), inputs.grad(rank, size)
    without = None
    if problem.layers:
        layers = (inputs.weights_of(rank, size, layer) for layer in range(problem.layers))
        module: nn.Module = Stack(*(build(problem, weights, schedule) for weights in layers))
    else:
        weights = inputs.weights if size == inputs.size else inputs.weights_of(rank, size)
        module = build(problem, weights, schedule)
        if size > 1:
            silent = build(problem, weights, NoCommunicationSchedule(rank, size))
            without = PreparedBlock(silent, x, grad, size, silent)

    def columns() -> dict[str, Any]:
        gib = getattr(schedule, "gib", 0.0)
        return {"workspace_gib": gib} if gib else {}

    return PreparedBlock(module, x, grad, size, module, schedule if size > 1 else None, without, columns)


def prepare_compiled(problem: TpBlock, context: BlockContext) -> PreparedBlock:
    """Prepare the block for torch.compile, whose pass for micro-pipelined tensor parallelism overlaps collectives."""
    enable_symmetric_memory(context.inputs.group)
    config: Any = importlib.import_module("torch._inductor.config")
    config._micro_pipeline_tp = True
    # One graph for the forward pass, and one for the backward pass.
    compiler = partial(torch.compile, fullgraph=True, dynamic=False)
    return compiled(prepare(context, SequentialSchedule(context.inputs.group)), compiler)


def compiled(prepared: PreparedBlock, compiler: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> PreparedBlock:
    """Return the block with its modules compiled."""
    if (silent := prepared.without_communication) is not None:  # a stack has none
        silent.step()  # eagerly, so that the compiled module does not contain its replacement tensors
        silent.free()
        silent = dataclasses.replace(silent, run=compiler(silent.module))
    return dataclasses.replace(prepared, run=compiler(prepared.module), schedule=None, without_communication=silent)


@dataclass(frozen=True, kw_only=True)
class GraphedBlock(PreparedBlock):
    """A block whose passes are two CUDA graphs. The next pass overwrites its gradients: use and free them before."""

    forward_graph: cuda_graph.CapturedWork[Tensor]
    backward_graph: cuda_graph.CapturedWork[tuple[Tensor, ...]]

    def forward(self) -> Tensor:
        self.forward_graph.replay()
        return self.forward_graph.result.detach()

    def backward(self, output: Tensor) -> None:
        self.backward_graph.replay()
        for tensor, gradient in zip(self.leaves, self.backward_graph.result, strict=True):
            tensor.grad = gradient


def graphed(prepared: PreparedBlock) -> GraphedBlock:
    """Return the block with its passes captured. Collective."""

    def gradients(output: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, prepared.leaves, prepared.grad)

    cuda_graph.warm_up(lambda: gradients(prepared.forward()))
    pool = torch.cuda.graph_pool_handle()
    forward = cuda_graph.capture(prepared.forward, pool=pool)
    backward = cuda_graph.capture(lambda: gradients(forward.result), pool=pool)
    return GraphedBlock(**vars(prepared), forward_graph=forward, backward_graph=backward)


def with_gib(capture: Callable[[], ResultT]) -> tuple[ResultT, float]:
    """Return the result of a capture, and the GiB that its graphs hold, not all of which torch counts as allocated."""
    gc.collect()  # earlier graphs that only refer to each other would otherwise be freed within the capture
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    result = capture()
    torch.cuda.empty_cache()
    return result, (torch.cuda.memory_reserved() - before) / 2**30
