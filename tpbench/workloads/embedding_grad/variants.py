"""The variants of the embedding gradient's exchange."""

from __future__ import annotations

from typing import Any

from tpbench.workloads.embedding_grad.problem import WORKLOAD, EmbeddingGrad

NO_GRAPH = "how many rows go to whom is the host's knowledge, anew in each iteration"


def _merges_with_triton(problem: EmbeddingGrad) -> bool:
    return problem.merge == "triton"


def _no_sparse_half(problem: EmbeddingGrad, tp_size: int) -> str | None:
    return "torch adds no sparse tensors in float16" if problem.dtype == "float16" else None


@WORKLOAD.variant("reduce_scatter_tensor of the whole table", options={"transfers"})
def dense_reduce_scatter(problem: EmbeddingGrad, place: Any) -> Any:
    from tpbench.workloads.embedding_grad.dense import DenseReduceScatter

    return DenseReduceScatter(place.inputs, place.wire)


@WORKLOAD.variant("all_reduce of the whole table, of which each rank uses its slice", options={"transfers"})
def dense_all_reduce(problem: EmbeddingGrad, place: Any) -> Any:
    from tpbench.workloads.embedding_grad.dense import DenseAllReduce

    return DenseAllReduce(place.inputs, place.wire)


@WORKLOAD.variant(
    "touched rows to their owners; row numbers known on the CPU before the forward pass",
    options={"merge", "pinned", "transfers"},
    requires=("triton",),
    no_graph_reason=NO_GRAPH,
    uses_triton=_merges_with_triton,
)
def sparse_all_to_all(problem: EmbeddingGrad, place: Any) -> Any:
    from tpbench.workloads.embedding_grad.all_to_all import SparseAllToAll
    from tpbench.workloads.embedding_grad.index import CpuIndex
    from tpbench.workloads.embedding_grad.merge import merge_for

    index = CpuIndex(place.inputs, pinned=problem.pinned)
    return SparseAllToAll(place.inputs, place.wire, index, merge_for(problem, place.inputs))


@WORKLOAD.variant(
    "touched rows to their owners; row numbers found on the GPU, for which the host waits",
    options={"merge", "transfers"},
    requires=("triton",),
    no_graph_reason=NO_GRAPH,
    uses_triton=_merges_with_triton,
)
def sparse_all_to_all_gpu(problem: EmbeddingGrad, place: Any) -> Any:
    from tpbench.workloads.embedding_grad.all_to_all import SparseAllToAll
    from tpbench.workloads.embedding_grad.index import DeviceIndex
    from tpbench.workloads.embedding_grad.merge import merge_for

    return SparseAllToAll(place.inputs, place.wire, DeviceIndex(place.inputs), merge_for(problem, place.inputs))


@WORKLOAD.variant(
    "touched rows into their owners' memory by one kernel over NVLink; one node",
    options={"pinned", "transfers"},
    requires=("triton",),
    requires_cuda=True,
    no_graph_reason=NO_GRAPH,
    uses_triton=True,
)
def sparse_symmetric(problem: EmbeddingGrad, place: Any) -> Any:
    from tpbench.comm.shared_memory_all_gather import on_one_machine
    from tpbench.comm.symmetric_buffers import Arena
    from tpbench.workloads.embedding_grad.index import CpuIndex
    from tpbench.workloads.embedding_grad.symmetric import SparseSymmetric, inboxes

    inputs = place.inputs
    if not on_one_machine(inputs.group, inputs.owners.world_size):
        raise RuntimeError("the ranks are on several machines: sparse_symmetric writes into its peers' memory")
    arena = Arena(inputs.group, inputs.device, "kernel")
    made = inboxes(arena, inputs)
    return SparseSymmetric(inputs, place.wire, CpuIndex(inputs, pinned=problem.pinned), made, arena.barrier, arena.gib)


@WORKLOAD.variant(
    "touched rows to everybody: the coalesced COO tensor all-gathered",
    options={"merge", "pinned", "transfers"},
    requires=("triton",),
    no_graph_reason=NO_GRAPH,
    uses_triton=_merges_with_triton,
)
def sparse_all_gather(problem: EmbeddingGrad, place: Any) -> Any:
    from tpbench.workloads.embedding_grad.all_gather import SparseAllGather
    from tpbench.workloads.embedding_grad.index import CpuIndex
    from tpbench.workloads.embedding_grad.merge import merge_for

    index = CpuIndex(place.inputs, pinned=problem.pinned)
    return SparseAllGather(place.inputs, place.wire, index, merge_for(problem, place.inputs))


@WORKLOAD.variant(
    "torch's all_reduce of a sparse COO tensor",
    options={"transfers"},
    no_graph_reason=NO_GRAPH,
    cpu_only_reason="NCCL has no sparse all-reduce",
    unsupported_reason=_no_sparse_half,
)
def torch_sparse_all_reduce(problem: EmbeddingGrad, place: Any) -> Any:
    from tpbench.workloads.embedding_grad.coo import TorchSparseAllReduce
    from tpbench.workloads.embedding_grad.index import CpuIndex

    return TorchSparseAllReduce(place.inputs, place.wire, CpuIndex(place.inputs, pinned=False))


@WORKLOAD.variant(
    "sparse_all_to_all below a density measured at the start, dense_reduce_scatter above it",
    options={"merge", "pinned", "transfers"},
    requires=("triton",),
    no_graph_reason=NO_GRAPH,
    uses_triton=_merges_with_triton,
)
def sparse_auto(problem: EmbeddingGrad, place: Any) -> Any:
    from tpbench.workloads.embedding_grad.all_to_all import SparseAllToAll
    from tpbench.workloads.embedding_grad.auto import SparseAuto, calibrate
    from tpbench.workloads.embedding_grad.dense import DenseReduceScatter
    from tpbench.workloads.embedding_grad.index import CpuIndex
    from tpbench.workloads.embedding_grad.merge import merge_for

    inputs, wire = place.inputs, place.wire
    dense = DenseReduceScatter(inputs, wire)
    sparse = SparseAllToAll(inputs, wire, CpuIndex(inputs, pinned=problem.pinned), merge_for(problem, inputs))
    return SparseAuto(inputs, wire, dense, sparse, calibrate(inputs, dense, sparse, place.stopwatch))
