"""The variants of the transformer block."""

from __future__ import annotations

from typing import Any

from tpbench.workloads.tp_block.problem import TpBlock
from tpbench.workloads.tp_block.workload import WORKLOAD

_SHARDED = {"save_gathered", "profile"}
"""Options of each variant whose linears are sharded by tpbench's own layers."""


def _unsupported_by_one_rank(problem: TpBlock, tp_size: int) -> str | None:
    return None if tp_size > 1 else "with tp_size=1 there is no communication: block_no_tp is that"


def _unsupported_in_pieces(problem: TpBlock, tp_size: int) -> str | None:
    """Return why products cannot be cut into tp_size^2 pieces of rows, or None if they can."""
    if problem.tokens % tp_size**2:
        return f"tokens={problem.tokens} must be divisible by tp_size^2={tp_size**2} to overlap in pieces"
    return _unsupported_by_one_rank(problem, tp_size)


def _no_graph(problem: TpBlock) -> str:
    """Return why a step cannot be captured in a CUDA graph, or an empty string if it can."""
    if problem.layers and problem.warmup_steps < 2:
        return "the second step of its stack is captured, which must not be measured: set warmup_steps=2 or more"
    return ""


def _no_graph_of_copies(problem: TpBlock) -> str:
    """Return the same for a step with copies between ranks."""
    if problem.signals == "kernel":
        return _no_graph(problem)
    return "its signals=stream are memory operations of the stream, which a graph cannot replay: set signals=kernel"


@WORKLOAD.variant(
    "the whole block on every rank, each for itself: the reference", options={"profile"}, no_graph_reason=_no_graph
)
def block_no_tp(problem: TpBlock, context: Any) -> Any:
    from tpbench.comm.parallel_linears import LocalSchedule
    from tpbench.workloads.tp_block.execution.prepared import prepare

    return prepare(context, LocalSchedule())


@WORKLOAD.variant(
    "all-gather, product, reduce-scatter, one after the other",
    options=_SHARDED,
    no_graph_reason=_no_graph,
    unsupported_reason=_unsupported_by_one_rank,
)
def block_tp(problem: TpBlock, context: Any) -> Any:
    from tpbench.comm.parallel_linears import SequentialSchedule
    from tpbench.workloads.tp_block.execution.prepared import prepare

    return prepare(context, SequentialSchedule(context.inputs.group))


@WORKLOAD.variant(
    "overlap by hand: ring of sends beside products, products in pieces beside reduces",
    options=_SHARDED,
    no_graph_reason=_no_graph,
    unsupported_reason=_unsupported_in_pieces,
)
def block_tp_overlap(problem: TpBlock, context: Any) -> Any:
    from tpbench.workloads.tp_block.execution.prepared import prepare
    from tpbench.workloads.tp_block.execution.ring import RingSchedule

    return prepare(context, RingSchedule(context.inputs.group))


@WORKLOAD.variant(
    "torch's fused_all_gather_matmul and fused_matmul_reduce_scatter",
    options=_SHARDED,
    requires_cuda=True,
    no_graph_reason=_no_graph,
    unsupported_reason=_unsupported_by_one_rank,
)
def block_symm_mem(problem: TpBlock, context: Any) -> Any:
    from tpbench.workloads.tp_block.execution.prepared import prepare
    from tpbench.workloads.tp_block.execution.symm_mem import SymmMemSchedule

    schedule = SymmMemSchedule(context.inputs.group)
    return prepare(context, schedule)


@WORKLOAD.variant(
    "torch.compile with micro-pipelined tensor parallelism",
    options={"profile"},
    requires_cuda=True,
    no_graph_reason=_no_graph,
    unsupported_reason=_unsupported_by_one_rank,
)
def block_compile_async(problem: TpBlock, context: Any) -> Any:
    from tpbench.comm.symmetric_buffers import enable_symmetric_memory
    from tpbench.workloads.tp_block.execution.prepared import prepare_compiled

    enable_symmetric_memory(context.inputs.group)
    return prepare_compiled(context)


@WORKLOAD.variant(
    "copy engines move chunks through symmetric memory ahead of the products, which keep all SMs",
    options=_SHARDED | {"signals"},
    requires_cuda=True,
    no_graph_reason=_no_graph_of_copies,
    unsupported_reason=_unsupported_by_one_rank,
)
def block_copy_engine(problem: TpBlock, context: Any) -> Any:
    from tpbench.comm.symmetric_buffers import SymmetricBuffers
    from tpbench.workloads.tp_block.execution.copy_engine import CopyEngineSchedule
    from tpbench.workloads.tp_block.execution.prepared import prepare

    schedule = CopyEngineSchedule(SymmetricBuffers(context.inputs.group, context.inputs.device, problem.signals))
    return prepare(context, schedule)


@WORKLOAD.variant(
    "for each linear the schedule that is fastest in a trial, or one for all linears if the step is then faster",
    options=_SHARDED | {"signals", "try_graphs"},
    no_graph_reason=_no_graph_of_copies,
    unsupported_reason=_unsupported_by_one_rank,
)
def block_auto(problem: TpBlock, context: Any) -> Any:
    from tpbench.workloads.tp_block.execution import autotune

    return autotune.prepare_fastest(context)
