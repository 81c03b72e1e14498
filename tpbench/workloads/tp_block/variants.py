"""The variants of the transformer block."""

from __future__ import annotations

from typing import Any

from tpbench.workloads.tp_block.problem import WORKLOAD, TpBlock

_KEEPS = {"save_gathered", "profile"}


def _no_peers(problem: TpBlock, tp_size: int) -> str | None:
    return None if tp_size > 1 else "with tp_size=1 there is nobody to communicate with: block_no_tp is that"


def _not_in_pieces(problem: TpBlock, tp_size: int) -> str | None:
    if problem.tokens % tp_size**2:
        return f"tokens={problem.tokens} must divide by tp_size^2={tp_size**2} to overlap in pieces"
    return _no_peers(problem, tp_size)


@WORKLOAD.variant("the whole block on every rank, each for itself: the reference", takes={"profile"})
def block_no_tp(problem: TpBlock, place: Any) -> Any:
    from tpbench.workloads.tp_block.prepared import prepare
    from tpbench.workloads.tp_block.schedule import Alone

    return prepare(place, Alone())


@WORKLOAD.variant("all-gather, product, reduce-scatter, one after the other", takes=_KEEPS, refuses=_no_peers)
def block_tp(problem: TpBlock, place: Any) -> Any:
    from tpbench.workloads.tp_block.prepared import prepare
    from tpbench.workloads.tp_block.schedule import Sequential

    return prepare(place, Sequential(place.inputs.group))


@WORKLOAD.variant(
    "overlap by hand: ring of sends beside products, products in pieces beside reduces",
    takes=_KEEPS,
    refuses=_not_in_pieces,
)
def block_tp_overlap(problem: TpBlock, place: Any) -> Any:
    from tpbench.workloads.tp_block.prepared import prepare
    from tpbench.workloads.tp_block.ring import Ring

    return prepare(place, Ring(place.inputs.group))


@WORKLOAD.variant(
    "torch's fused_all_gather_matmul and fused_matmul_reduce_scatter",
    takes=_KEEPS,
    needs_cuda=True,
    refuses=_no_peers,
)
def block_symm_mem(problem: TpBlock, place: Any) -> Any:
    from tpbench.workloads.tp_block.fused import Fused
    from tpbench.workloads.tp_block.prepared import prepare

    schedule = Fused(place.inputs.group)
    return prepare(place, schedule, facts=schedule.facts)


@WORKLOAD.variant(
    "torch.compile with micro-pipelined tensor parallelism",
    takes={"profile"},
    needs_cuda=True,
    refuses=_no_peers,
)
def block_compile_async(problem: TpBlock, place: Any) -> Any:
    from tpbench.workloads.tp_block import compiled

    return compiled.prepare(place)


@WORKLOAD.variant(
    "copy engines move chunks through symmetric memory ahead of the products, which keep all SMs",
    takes=_KEEPS | {"signals"},
    needs_cuda=True,
    refuses=_no_peers,
)
def block_copy_engine(problem: TpBlock, place: Any) -> Any:
    from tpbench.comm.symmetric_buffers import SymmetricBuffers
    from tpbench.workloads.tp_block.copy_engine import CopyEngine
    from tpbench.workloads.tp_block.prepared import prepare

    schedule = CopyEngine(SymmetricBuffers(place.inputs.group, place.inputs.device, problem.signals))
    return prepare(place, schedule, facts=schedule.facts)


@WORKLOAD.variant(
    "for each operation the schedule that was fastest when tried, or one for all where the step is faster so",
    takes=_KEEPS | {"signals"},
    refuses=_no_peers,
)
def block_auto(problem: TpBlock, place: Any) -> Any:
    from tpbench.workloads.tp_block import auto

    return auto.prepare_fastest(place)
