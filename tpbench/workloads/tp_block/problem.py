"""The transformer block's problem: its fields, and its columns in rows and reports."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from tpbench.settings import setting
from tpbench.workloads import Option, Pivot, Study, Workload
from tpbench.workloads.tp_block.costs import flops
from tpbench.workloads.tp_block.sharded_linear import ShardedLinear


@dataclass(frozen=True)
class TpBlock:
    """The sizes of the block, the part to measure, and the variants' options."""

    tokens: int = setting(help="length of the one causal sequence", low=1)
    hidden: int = setting(help="width of the activations between layers", low=1)
    ffn: int = setting(help="width inside the MLP", low=1)
    heads: int = setting(help="query heads", low=1)
    kv_heads: int = setting(help="key and value heads, each for heads / kv_heads queries", low=1)
    head_dim: int = setting(help="width of a head", low=1)
    part: Literal["block", "mlp", "column", "row"] = setting(
        "block", help="block (all of it), mlp, column (first linear of the MLP), row (last linear of the MLP)"
    )
    dtype: Literal["bfloat16", "float32", "float64"] = setting("bfloat16", help="dtype of activations and weights")
    seed: int = setting(0, help="seed of activations and weights", low=0, high=2**31 - 1)
    save_gathered: bool = setting(True, help="keep gathered inputs for the backward pass; false: gather them again")
    signals: Literal["stream", "kernel"] = setting(
        "stream", help="block_copy_engine: how ranks signal their copies; graph=true sets kernel"
    )
    try_graphs: bool = setting(
        False, help="block_auto: also try steps whose forward and backward passes are CUDA graphs", added=True
    )
    profile: bool = setting(False, help="keep each rank's profiler trace of one step")
    rotary: bool = setting(
        False, help="rotate queries and keys by their positions, as Llama does; layers=N sets true", added=True
    )
    layers: int = setting(
        0, help="blocks to train with AdamW; 0: one block, forward and backward only", low=0, added=True
    )
    steps: int = setting(10, help="measured training steps (layers=N)", low=1, added=True)
    warmup_steps: int = setting(3, help="training steps before the measured ones (layers=N)", low=0, added=True)
    learning_rate: float = setting(1e-4, help="AdamW's learning rate (layers=N)", low=0.0, added=True)

    def check(self, tp_size: int, dp_size: int) -> list[str]:
        """Return complaints about fields that do not fit together."""
        shared = {"tokens": self.tokens, "ffn": self.ffn}
        if self.part == "block":
            shared |= {"heads": self.heads, "kv_heads": self.kv_heads}
        complaints = [
            f"{name}={value} must be divisible by tp_size={tp_size}"
            for name, value in shared.items()
            if value % tp_size
        ]
        if self.heads % self.kv_heads:
            complaints.append(f"heads={self.heads} must be divisible by kv_heads={self.kv_heads}")
        if self.rotary and self.head_dim % 2:
            complaints.append(f"head_dim={self.head_dim} must be even: rotary embeddings rotate pairs of numbers")
        if self.layers and self.part != "block":
            complaints.append(f"layers={self.layers} needs part=block: a stack has whole blocks")
        if not self.layers:
            unused = {name: default for name, default in _TRAINING.items() if getattr(self, name) != default}
            complaints += [f"{name}={getattr(self, name)} needs layers=N: one block is not trained" for name in unused]
        if dp_size != 1:
            complaints.append(f"dp_size={dp_size} must be 1: replicas of a block do not communicate")
        return complaints

    @property
    def linears(self) -> tuple[ShardedLinear, ...]:
        """The linears of the part, in the order of the forward pass."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = (
            ShardedLinear("qkv", "column", self.hidden, (queries, keys, keys)),
            ShardedLinear("out", "row", queries, (self.hidden,)),
        )
        mlp = (
            ShardedLinear("up", "column", self.hidden, (self.ffn, self.ffn)),
            ShardedLinear("down", "row", self.ffn, (self.hidden,)),
        )
        single = ShardedLinear("up", "column", self.hidden, (self.ffn,))
        return {"block": attention + mlp, "mlp": mlp, "column": (single,), "row": mlp[1:]}[self.part]

    @property
    def norms(self) -> tuple[str, ...]:
        """The RMSNorms of the part."""
        return ("attention_norm", "mlp_norm") if self.part == "block" else ()


_TRAINING = {
    field.name: field.default for field in fields(TpBlock) if field.name in ("steps", "warmup_steps", "learning_rate")
}
"""Fields that only a stack of blocks uses, with their defaults."""


def _with_rotary(problem: TpBlock, chosen: frozenset[str]) -> TpBlock:
    """Return the problem with rotary embeddings if it is a stack, unless the user chose."""
    return replace(problem, rotary=True) if problem.layers and "rotary" not in chosen else problem


def _cpu_core_s(problem: TpBlock, tp_size: int) -> float:
    """Return the seconds on one CPU core. It took 2.9 s for a rank with 24e9 floating-point operations."""
    passes = (problem.steps + problem.warmup_steps) / 2 if problem.layers else 1
    return 2.9 * passes * flops(problem, tp_size) / 24e9


WORKLOAD = Workload(
    name="tp_block",
    moves_least=True,
    summary="transformer block under tensor and sequence parallelism, forward and backward",
    problem=TpBlock,
    headline=("hidden", "ffn", "tokens", "layers"),
    columns={
        "output_error": "largest ||row - right|| / ||right|| of the output against the float64 oracle",
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
        "timeline_start_ms": "traced step on rank 0: start of each interval, ms",
        "timeline_ms": "traced step on rank 0: length of each interval, ms",
        "timeline_kind": "traced step on rank 0: 0 product, 1 communication, 2 other",
        "timeline_lane": "traced step on rank 0: number of the stream (on a CPU: of the thread)",
    },
    cpu_core_s=_cpu_core_s,
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
            option="part",
        ),
    },
    reusable_process=True,
)
