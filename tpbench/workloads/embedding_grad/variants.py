"""Variants of the embedding gradient's exchange."""

from __future__ import annotations

from typing import Any

from tpbench.workloads.embedding_grad.problem import WORKLOAD, EmbeddingGrad

NO_GRAPH = "the host decides in each iteration how many rows go to which rank"


def _host_work(problem: EmbeddingGrad) -> str:
    """Return why a graph cannot hold the step of an exchange that needs no host."""
    if problem.index in ("early", "late"):
        return f"with index={problem.index} the host computes the index"
    return ""


SEARCHED: dict[str, Any] = {
    "options": {"search"},
    "requires": ("triton",),
    "no_graph_reason": NO_GRAPH,
    "uses_triton": True,
}
"""Of exchanges that search for the touched rows on the host or on the device, and merge them."""


@WORKLOAD.variant("reduce_scatter_tensor of the whole table", no_graph_reason=_host_work)
def dense_reduce_scatter(problem: EmbeddingGrad, context: Any) -> Any:
    from tpbench.workloads.embedding_grad.exchanges import DenseReduceScatter

    return DenseReduceScatter(context.inputs, context.comm)


@WORKLOAD.variant(
    "all_reduce of the whole table, of which each rank uses its slice",
    no_graph_reason=_host_work,
)
def dense_all_reduce(problem: EmbeddingGrad, context: Any) -> Any:
    from tpbench.workloads.embedding_grad.exchanges import DenseAllReduce

    return DenseAllReduce(context.inputs, context.comm)


@WORKLOAD.variant("touched rows to their owners by all-to-alls, for whose sizes the host waits", **SEARCHED)
def sparse_all_to_all(problem: EmbeddingGrad, context: Any) -> Any:
    from tpbench.workloads.embedding_grad.exchanges.sparse import SparseAllToAll
    from tpbench.workloads.embedding_grad.row_operations.search import row_finder

    return SparseAllToAll(context.inputs, context.comm, row_finder(context.inputs))


@WORKLOAD.variant(
    "sparse_all_to_all whose touched rows are found by torch.unique on the device",
    requires=("triton",),
    no_graph_reason=NO_GRAPH,
    uses_triton=True,
)
def sparse_all_to_all_gpu(problem: EmbeddingGrad, context: Any) -> Any:
    from tpbench.workloads.embedding_grad.exchanges.sparse import SparseAllToAll
    from tpbench.workloads.embedding_grad.row_operations.search import SortingRowFinder

    return SparseAllToAll(context.inputs, context.comm, SortingRowFinder(context.inputs))


@WORKLOAD.variant(
    "touched rows into their owners' memory by one kernel over NVLink; one node",
    requires=("triton",),
    requires_cuda=True,
    no_graph_reason=_host_work,
    uses_triton=True,
)
def sparse_symmetric(problem: EmbeddingGrad, context: Any) -> Any:
    from tpbench.workloads.embedding_grad.exchanges.symmetric import SparseSymmetric, connect
    from tpbench.workloads.embedding_grad.row_operations.search import DeviceSearch

    inputs = context.inputs
    return SparseSymmetric(inputs, context.comm, DeviceSearch(inputs, by_owner=False), connect(inputs))


@WORKLOAD.variant("all-gather of every rank's touched rows, as a coalesced COO tensor", **SEARCHED)
def sparse_all_gather(problem: EmbeddingGrad, context: Any) -> Any:
    from tpbench.workloads.embedding_grad.exchanges.sparse import SparseAllGather
    from tpbench.workloads.embedding_grad.row_operations.search import row_finder

    return SparseAllGather(context.inputs, context.comm, row_finder(context.inputs))


@WORKLOAD.variant("sparse_all_to_all below a density measured at the start, dense_reduce_scatter above it", **SEARCHED)
def sparse_auto(problem: EmbeddingGrad, context: Any) -> Any:
    from tpbench.workloads.embedding_grad.exchanges.sparse import SparseAuto
    from tpbench.workloads.embedding_grad.row_operations.search import row_finder

    return SparseAuto(context.inputs, context.comm, row_finder(context.inputs), context.stopwatch)
