"""The variants of the transformer block."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeAlias

from tpbench.workloads.tp_block.problem import TpBlock
from tpbench.workloads.tp_block.workload import WORKLOAD

Prepare: TypeAlias = Callable[..., Any]


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


def _sharded(summary: str, options: Collection[str] = (), **traits: Any) -> Callable[[Prepare], Prepare]:
    """Declare a variant whose linears are tpbench's own sharded layers, with further options beside the usual ones."""
    usual = {"no_graph_reason": _no_graph, "unsupported_reason": _unsupported_by_one_rank}
    return WORKLOAD.variant(summary, options={"save_gathered", "profile", *options}, **{**usual, **traits})


def _prepared(context: Any, schedule: str) -> Any:
    """Prepare a block under one schedule for all linears."""
    from tpbench.workloads.tp_block.execution.autotune import schedule_named
    from tpbench.workloads.tp_block.execution.prepared import prepare

    return prepare(context, schedule_named(schedule, context.inputs))


@WORKLOAD.variant(
    "the whole block on every rank, each for itself: the reference", options={"profile"}, no_graph_reason=_no_graph
)
def block_no_tp(problem: TpBlock, context: Any) -> Any:
    return _prepared(context, "local")


@_sharded("all-gather, product, reduce-scatter, one after the other")
def block_tp(problem: TpBlock, context: Any) -> Any:
    return _prepared(context, "plain")


@_sharded(
    "overlap by hand: ring of sends beside products, products in pieces beside reduces",
    unsupported_reason=_unsupported_in_pieces,
)
def block_tp_overlap(problem: TpBlock, context: Any) -> Any:
    return _prepared(context, "ring")


@_sharded("torch's fused_all_gather_matmul and fused_matmul_reduce_scatter", requires_cuda=True)
def block_symm_mem(problem: TpBlock, context: Any) -> Any:
    return _prepared(context, "symm_mem")


@WORKLOAD.variant(
    "torch.compile with micro-pipelined tensor parallelism",
    options={"profile"},
    requires_cuda=True,
    no_graph_reason=_no_graph,
    unsupported_reason=_unsupported_by_one_rank,
)
def block_compile_async(problem: TpBlock, context: Any) -> Any:
    from tpbench.workloads.tp_block.execution.prepared import prepare_compiled

    return prepare_compiled(context)


@_sharded(
    "copy engines move chunks through symmetric memory ahead of the products, which keep all SMs",
    options={"signals"},
    requires_cuda=True,
    no_graph_reason=_no_graph_of_copies,
)
def block_copy_engine(problem: TpBlock, context: Any) -> Any:
    return _prepared(context, "copy_engine")


@_sharded(
    "for each linear the schedule that is fastest in a trial, or one for all linears if the step is then faster",
    options={"signals", "try_graphs"},
    no_graph_reason=_no_graph_of_copies,
)
def block_auto(problem: TpBlock, context: Any) -> Any:
    from tpbench.workloads.tp_block.execution.autotune import prepare_fastest

    return prepare_fastest(context)
