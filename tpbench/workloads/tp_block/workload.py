"""The declaration of the transformer block: its columns, and the layout of its rows in a report."""

from __future__ import annotations

from dataclasses import replace

from tpbench.workloads import Option, Pivot, Study, Workload
from tpbench.workloads.sizes import ITEM_BYTES
from tpbench.workloads.tp_block.problem import TpBlock, linear_weights


def _with_rotary(problem: TpBlock, chosen: frozenset[str]) -> TpBlock:
    """Return the problem with rotary embeddings if it is a stack, unless the user chose."""
    return replace(problem, rotary=True) if problem.layers and "rotary" not in chosen else problem


WORKLOAD = Workload(
    name="tp_block",
    summary="transformer block under tensor and sequence parallelism, forward and backward",
    problem=TpBlock,
    least_gib=lambda job: 2 * linear_weights(job.problem, job.tp_size) * ITEM_BYTES[job.problem.dtype] / 2**30,
    headline=("hidden", "ffn", "tokens", "layers"),
    columns={
        "grad_norm": "norm of all weights' gradients, counting each weight once",
        "workspace_gib": "memory shared with peers that the variant keeps between iterations, GiB",
        "losses": "loss of each training step, warm-up included (layers=N)",
        "grad_norms": "norm of all gradients in each training step, warm-up included (layers=N)",
        "chosen": "the schedule of each operation, and whether the passes are graphs (block_auto)",
        "graph_gib": "memory that graphs of block_auto or of a stack hold between iterations; at most a part of it is "
        "in peak_gib, and reports add both, GiB",
        "forward_ms": "forward pass, timed as the step is, ms",
        "backward_ms": "backward pass, timed as the step is, ms",
        "compute_ms": "the step with its communication removed: products in one piece, ms",
        "communication_ms": "the step's collectives alone, one after the other, ms",
        "exposed_ms": "the step's time beyond the same step without communication, the median of pairs, ms",
        "hidden_share": "share of the communication that is hidden: 1 - exposed_ms / communication_ms",
        "gather_hidden": "the same for the forward pass's all-gathers and their products alone",
        "scatter_hidden": "the same for the forward pass's products and their reduce-scatters alone",
        "gemm_tflops": "rate of a large square product in this dtype on this machine, TFLOP/s",
        "tflops": "floating-point operations of the busiest rank over the step's time, TFLOP/s",
        "gemm_share": "share of gemm_tflops that the step reaches",
        "gather_gb_per_s": "bandwidth of a large all-gather on this machine, bytes that a rank receives",
        "overlap_fraction": "share of the communication time of a traced step during which a product runs (GPUs)",
    },
    variant_columns=("chosen", "graph_gib", "workspace_gib"),
    options=(
        Option("save_gathered", ignorable=True),
        Option("signals", ignorable=True),
        Option("try_graphs", ignorable=True),
        Option("profile"),
    ),
    graph_options={"signals": "kernel"},
    pivot=Pivot(
        rows=("hidden", "ffn", "tokens", "tp_size"),
        sections=("dtype", "part"),
        trajectories={"losses": 1.0, "grad_norms": 1.0},
    ),
    resolve=_with_rotary,
    scheduled=lambda problem: problem.layers > 0,
    metrics={
        "forward_ms": -1,
        "backward_ms": -1,
        "compute_ms": 0,
        "communication_ms": 0,
        "exposed_ms": -1,
        "hidden_share": 0,
        "gather_hidden": 0,
        "scatter_hidden": 0,
        "overlap_fraction": 0,
        "tflops": 1,
        "gemm_share": 0,
        "workspace_gib": -1,
    },
    percentages=("hidden_share", "gather_hidden", "scatter_hidden", "overlap_fraction", "gemm_share"),
    studies={
        "profile": Study(
            "what is a step made of, and how much of its communication is hidden?",
            best_by=("device_ms", "time_ms"),
            columns=(
                "time_ms",
                "device_ms",
                "chained_ms",
                "forward_ms",
                "backward_ms",
                "compute_ms",
                "communication_ms",
                "exposed_ms",
                "hidden_share",
                "gather_hidden",
                "scatter_hidden",
                "overlap_fraction",
                "bound",
                "idle_share",
                "tflops",
                "gemm_share",
                "peak_gib",
                "graph_gib",
                "workspace_gib",
                "loss_value",
                "grad_norm",
                "chosen",
            ),
        ),
        "overlap": Study(
            "by how much does overlap shorten each part, and where does it stop paying?",
            module="tpbench.workloads.tp_block.overlap_study",
        ),
    },
    reusable_process=True,
)
