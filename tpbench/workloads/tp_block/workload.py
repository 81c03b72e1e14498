"""The declaration of the transformer block: its columns, studies and variants."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpbench.columns import GEMM_TFLOPS, NCCL_ALGORITHM, Column
from tpbench.workloads import Pivot, Study, Variant, Workload
from tpbench.workloads.sizes import ITEM_BYTES
from tpbench.workloads.tp_block.problem import TpBlock, linear_weights, unsupported_by_quack

if TYPE_CHECKING:
    from tpbench.workloads.tp_block.execution.prepared import BlockContext, PreparedBlock
    from tpbench.workloads.tp_block.inputs import BlockInputs

SHARED_OPTIONS = frozenset({"compile", "save_gathered"})
"""The options of every schedule that shares the block between ranks."""


def _unsupported_by_one_rank(problem: TpBlock, tp_size: int) -> str | None:
    return None if tp_size > 1 else "with tp_size=1 there is no communication: block_no_tp is that"


def _unsupported_in_pieces(problem: TpBlock, tp_size: int) -> str | None:
    if problem.tokens % tp_size**2:
        return f"tokens={problem.tokens} must be divisible by tp_size^2={tp_size**2} to overlap in pieces"
    return _unsupported_by_one_rank(problem, tp_size)


def _no_graph(problem: TpBlock) -> str:
    if problem.layers and problem.warmup_steps < 2:
        return "the second step of its stack is captured, which must not be measured: set warmup_steps=2 or more"
    return ""


def _no_graph_of_copies(problem: TpBlock) -> str:
    if problem.signals == "kernel":
        return _no_graph(problem)
    return "its signals=stream are memory operations of the stream, which a graph cannot replay: set signals=kernel"


@dataclass(frozen=True)
class BlockVariant(Variant):
    """A variant of the block, with the traits that decide how others are compared with it."""

    no_graph_reason: str | Callable[[Any], str] = _no_graph
    unsupported_reason: Callable[[Any, int], str | None] = _unsupported_by_one_rank
    is_plain: bool = False
    """True for the one that others are compared with: products and collectives one after the other."""
    shares_block: bool = True
    """False if each rank has the whole block."""
    is_compiled: bool = False
    """True if the whole block is compiled."""


class BlockWorkload(Workload):
    """The transformer block."""

    def resolve(self, problem: TpBlock, chosen: frozenset[str]) -> TpBlock:
        """Return the problem with rotary embeddings if it is a stack, unless the user chose."""
        return problem if "rotary" in chosen else replace(problem, rotary=problem.rotary or problem.layers > 0)

    def least_gib(self, job: Any) -> float:
        """Return the memory of a rank's weights and their gradients in GiB."""
        problem: TpBlock = job.problem
        return 2 * linear_weights(problem, job.tp_size) * ITEM_BYTES[problem.dtype] / 2**30

    def unsupported_reason(self, job: Any) -> str | None:
        """Return why the options and the device don't fit together, or None if they do."""
        problem: TpBlock = job.problem
        if problem.compile and problem.part in ("column", "row"):
            return f"compile=true needs part=block or mlp: part={problem.part} is a linear alone"
        return f"nccl={problem.nccl} needs a CUDA GPU" if job.device == "cpu" and problem.nccl != "default" else None


_profiled = functools.partial(Column, studies=("profile",))

WORKLOAD = BlockWorkload(
    name="tp_block",
    summary="transformer block under tensor and sequence parallelism, forward and backward",
    problem=TpBlock,
    variant_class=BlockVariant,
    headline=("hidden", "ffn", "tokens", "layers"),
    columns=(
        _profiled("forward_ms", float, "forward pass, timed as the step is", better=-1),
        _profiled("backward_ms", float, "backward pass, timed as the step is", better=-1),
        _profiled("compute_ms", float, "the step with its communication removed: products in one piece", better=0),
        _profiled("communication_ms", float, "the step's collectives alone, one after the other", better=0),
        _profiled("exposed_ms", float, "time beyond the step without communication (median of pairs)", better=-1),
        _profiled("hidden_share", float, "1 - exposed_ms / communication_ms", better=0, percent=True),
        Column("chained_compute_ms", float, "compute_ms of steps back to back, in a loop of them alone"),
        Column("chained_exposed_ms", float, "exposed_ms of steps back to back (median of pairs of blocks)", better=-1),
        Column("forward_compute_ms", float, "compute_ms of the forward pass alone"),
        Column("forward_exposed_ms", float, "exposed_ms of the forward pass alone", better=-1),
        Column("chained_forward_compute_ms", float, "compute_ms of forward passes back to back"),
        Column("chained_forward_exposed_ms", float, "exposed_ms of forward passes back to back"),
        _profiled("tflops", float, "floating-point operations of the busiest rank over the step's time", better=1),
        _profiled("gemm_share", float, "share of gemm_tflops that the step reaches", better=0, percent=True),
        GEMM_TFLOPS,
        Column("gather_gb_per_s", float, "bandwidth of a large all-gather on this machine, bytes that a rank receives"),
        NCCL_ALGORITHM,
        _profiled("graph_gib", float, "graphs' memory between iterations; reports add it to peak_gib", by_variant=True),
        _profiled("workspace_gib", float, "memory shared with peers that is kept", better=-1, by_variant=True),
        _profiled("grad_norm", float, "norm of all weights' gradients, counting each weight once"),
        Column("losses", list, "loss of each training step, warm-up included (layers=N)"),
        Column("grad_norms", list, "norm of all gradients in each training step, warm-up included (layers=N)"),
    ),
    former_fields={"try_graphs": False, "choose_by": "wall"},
    pivot=Pivot(rows=("hidden", "ffn", "tokens", "tp_size"), sections=("dtype", "part")),
    scheduled=lambda problem: problem.layers > 0,
    studies={
        "profile": Study(
            "what is a step made of, and how much of its communication is hidden?",
            best_by=("device_ms", "time_ms"),
            columns=("time_ms", "device_ms", "chained_ms", "bound", "idle_share", "peak_gib", "loss_value"),
        ),
        "overlap": Study(
            "by how much does overlap shorten each part, and where does it stop paying?",
            module="tpbench.workloads.tp_block.overlap_study",
        ),
    },
)


def _of_schedule(
    name: str,
    schedule: str,
    summary: str,
    options: Collection[str] = SHARED_OPTIONS,
    made_from: Callable[[BlockInputs], tuple[Any, ...]] = lambda inputs: (inputs.group,),
    **traits: Any,
) -> None:
    """Register a variant whose linears run under a schedule, `MODULE.CLASS`. `made_from` returns its arguments."""

    def prepare_block(problem: TpBlock, context: BlockContext) -> PreparedBlock:
        from tpbench.workloads.tp_block.execution.prepared import prepare

        module, _, attribute = f"tpbench.{schedule}".rpartition(".")
        made = getattr(importlib.import_module(module), attribute)(*made_from(context.inputs))
        return prepare(context, made)

    prepare_block.__name__ = name
    WORKLOAD.variant(summary, options=options, **traits)(prepare_block)


_EXECUTION = "workloads.tp_block.execution"
_of_schedule(
    "block_no_tp",
    "comm.parallel_linears.LocalSchedule",
    "the whole block on every rank, each for itself: the reference",
    {"compile"},
    lambda inputs: (),
    unsupported_reason=lambda problem, tp_size: None,
    shares_block=False,
)
_of_schedule(
    "block_tp",
    "comm.parallel_linears.SequentialSchedule",
    "all-gather, product, reduce-scatter, one after the other",
    SHARED_OPTIONS | {"nccl"},
    is_plain=True,
)
_of_schedule(
    "block_tp_overlap",
    f"{_EXECUTION}.torch_schedules.RingSchedule",
    "overlap by hand: ring of sends beside products, products in pieces beside reduces",
    unsupported_reason=_unsupported_in_pieces,
)
_of_schedule(
    "block_symm_mem",
    f"{_EXECUTION}.torch_schedules.SymmMemSchedule",
    "torch's fused_all_gather_matmul and fused_matmul_reduce_scatter",
    requires_cuda=True,
)
_of_schedule(
    "block_quack",
    f"{_EXECUTION}.quack_schedule.QuackSchedule",
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
    requires_cuda=True,
    is_compiled=True,
)
_of_schedule(
    "block_copy_engine",
    f"{_EXECUTION}.copy_engine.CopyEngineSchedule",
    "copy engines move chunks through symmetric memory ahead of the products, which keep all SMs",
    SHARED_OPTIONS | {"signals"},
    lambda inputs: (inputs.symmetric_buffers(),),
    requires_cuda=True,
    no_graph_reason=_no_graph_of_copies,
)
_of_schedule(
    "block_fused",
    f"{_EXECUTION}.fused_schedule.FusedSchedule",
    "between linears one kernel through peers' memory: sum, residual, RMSNorm, gather; elsewhere copies and sums",
    SHARED_OPTIONS | {"signals"},
    lambda inputs: (inputs.symmetric_buffers(),),
    requires_cuda=True,
    uses_triton=True,
    file=Path(__file__).parent / "execution/fused_schedule.py",
    no_graph_reason=_no_graph_of_copies,
)


def traits_of(name: str) -> BlockVariant:
    """Return the variant of that name. One that this package doesn't have, as from a user's file, has no traits."""
    variant = WORKLOAD.variants.get(name)
    return variant if isinstance(variant, BlockVariant) else BlockVariant(name, "", prepare=lambda: None)


PLAIN = next(name for name in WORKLOAD.variants if traits_of(name).is_plain)
"""Name of the variant that others are compared with."""
