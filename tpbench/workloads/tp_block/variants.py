"""The variants of the transformer block."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from tpbench.workloads.tp_block.problem import WHOLE, WORKLOAD, TpBlock, unsupported_by_quack


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


def _of_schedule(name: str, summary: str, options: Collection[str] = (), **traits: Any) -> None:
    """Register a variant that runs all linears under one schedule, with further options beside the usual ones."""

    def prepare_block(problem: TpBlock, context: Any) -> Any:
        from tpbench.workloads.tp_block.execution.autotune import schedule_of
        from tpbench.workloads.tp_block.execution.prepared import prepare

        return prepare(context, schedule_of(name, context.inputs))

    prepare_block.__name__ = name
    usual = {"no_graph_reason": _no_graph, "unsupported_reason": _unsupported_by_one_rank}
    options = {"profile", "compile", *([] if name == WHOLE else ["save_gathered"]), *options}
    WORKLOAD.variant(summary, options=options, **{**usual, **traits})(prepare_block)


_of_schedule(
    "block_no_tp",
    "the whole block on every rank, each for itself: the reference",
    unsupported_reason=lambda problem, tp_size: None,
)
_of_schedule("block_tp", "all-gather, product, reduce-scatter, one after the other", options={"nccl"})
_of_schedule(
    "block_tp_overlap",
    "overlap by hand: ring of sends beside products, products in pieces beside reduces",
    unsupported_reason=_unsupported_in_pieces,
)
_of_schedule(
    "block_symm_mem",
    "torch's fused_all_gather_matmul and fused_matmul_reduce_scatter",
    requires_cuda=True,
)
_of_schedule(
    "block_quack",
    "QuACK's all-gather + product (one persistent kernel that copy engines feed), plain reduce-scatter",
    requires=("quack",),
    requires_cuda=True,
    unsupported_reason=lambda problem, size: (
        _unsupported_by_one_rank(problem, size) or unsupported_by_quack(problem, size)
    ),
)
WORKLOAD.variant_of(
    "block_compile_async",
    "execution.prepared.prepare_compiled",
    "torch.compile with micro-pipelined tensor parallelism",
    options={"profile"},
    requires_cuda=True,
    no_graph_reason=_no_graph,
    unsupported_reason=_unsupported_by_one_rank,
)
_of_schedule(
    "block_copy_engine",
    "copy engines move chunks through symmetric memory ahead of the products, which keep all SMs",
    options={"signals"},
    requires_cuda=True,
    no_graph_reason=_no_graph_of_copies,
)
_of_schedule(
    "block_fused",
    "between linears one kernel through peers' memory: sum, residual, RMSNorm, gather; elsewhere copies and sums",
    options={"signals"},
    requires_cuda=True,
    uses_triton=True,
    file=Path(__file__).parent / "execution/fused_schedule.py",
    no_graph_reason=_no_graph_of_copies,
)
WORKLOAD.variant_of(
    "block_auto",
    "execution.autotune.prepare_fastest",
    "the variant whose step is fastest in a trial, maybe with its passes as CUDA graphs",
    options={"save_gathered", "profile", "signals", "try_graphs", "choose_by", "compile"},
    no_graph_reason=_no_graph_of_copies,
    unsupported_reason=_unsupported_by_one_rank,
)
