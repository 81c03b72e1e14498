"""The problem of the entropy loss: its fields, its columns in a row, and its layout in a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tpbench.kernels import Loss
from tpbench.settings import setting
from tpbench.workloads import Option, Pivot, Study, Workload
from tpbench.workloads.cost_model import CostModel


@dataclass(frozen=True)
class EntropyLoss:
    """Sizes, loss, dtype and seed, then the options that only some variants support."""

    tokens: int = setting(help="rows of logits per data-parallel replica", low=1)
    vocab: int = setting(help="columns of logits over all tensor-parallel ranks", low=1)
    loss: Loss = setting("cross_entropy", help="cross-entropy from labels, or a loss against target logits")
    dtype: Literal["bfloat16", "float16", "float32"] = setting("bfloat16", help="dtype of logits, targets and gradient")
    seed: int = setting(0, help="seed of the inputs", low=0, high=2**31 - 1)
    logits_scale: float = setting(1.0, help="factor on logits and target logits", low=1e-6)
    temperature: float = setting(
        1.0, help="softens the target distribution only (losses against target logits)", low=1e-6
    )
    ignored: float = setting(0.0, help="share of rows whose label is ignored (cross_entropy)", low=0.0, high=1.0)
    block_cap: Literal["auto", 4096, 8192, 16384, 32768] = setting("auto", help="largest column block of a kernel")
    exchange: Literal["auto", "nccl", "symmetric"] = setting(
        "auto",
        help="triton_tp's exchange of statistics: nccl (all-gather), symmetric (memory shared over NVLink), auto",
    )
    algorithm: Literal["auto", "two_reads", "two_kernels", "one_read"] = setting(
        "auto",
        help="triton_tp: two_reads or one_read of a row in one kernel, two_kernels with statistics between, auto",
    )
    compile: bool = setting(False, help="use torch.compile (pytorch_tp_manual, pytorch_gather)")
    compute_dtype: Literal["float32", "logits"] = setting(
        "float32", help="dtype in which torch's losses use the logits: float32, or the logits' own"
    )

    @property
    def from_labels(self) -> bool:
        """True if the targets are labels, false if they are target logits."""
        return self.loss == "cross_entropy"

    def check(self, tp_size: int, dp_size: int) -> list[str]:
        """Return a complaint for each combination of fields that is invalid."""
        complaints = []
        if self.vocab < tp_size:
            complaints.append(
                f"vocab={self.vocab} cannot be sharded over tp_size={tp_size}: some rank would hold nothing"
            )
        if self.from_labels and self.temperature != 1.0:
            complaints.append(f"temperature={self.temperature} softens target logits: loss=cross_entropy has none")
        if not self.from_labels and self.ignored:
            complaints.append(f"ignored={self.ignored} needs labels: only loss=cross_entropy has them")
        return complaints


def _cost_model() -> CostModel:
    from tpbench.workloads.entropy_loss.cost_model import COST_MODEL

    return COST_MODEL


WORKLOAD = Workload(
    name="entropy_loss",
    summary="entropy loss over a sharded vocabulary, forward and backward",
    problem=EntropyLoss,
    headline=("loss", "tokens", "vocab"),
    columns={
        "loss_identical": "true if all ranks had the same bits in every loss",
        "algorithm_used": "algorithm of the kernels that ran: two_reads, two_kernels or one_read (triton_tp)",
        "block_used": "columns of the kernels' block (triton_tp)",
        "registers": "registers per thread as compiled: maximum over the kernels that read the logits (triton_tp)",
        "spilled_bytes": "spilled registers, bytes per thread: maximum over those kernels (triton_tp)",
        "shared_kib": "shared memory per program: maximum over those kernels, KiB (triton_tp)",
        "occupancy": "share of a multiprocessor's warps that can be resident: minimum over those kernels (triton_tp)",
    },
    variant_columns=("algorithm_used", "block_used", "registers", "spilled_bytes", "shared_kib", "occupancy"),
    options=(
        Option("block_cap", ignorable=True),
        Option("exchange", ignorable=True),
        Option("algorithm", ignorable=True),
        Option("compile"),
        Option("compute_dtype"),
    ),
    pivot=Pivot(
        rows=("vocab", "tp_size", "shard"),
        sections=("loss", "dtype"),
        derived={"shard": lambda row: -(-row["vocab"] // row["tp_size"])},
    ),
    percentages=("occupancy",),
    studies={
        "block_cap": Study(
            "why is one block cap slow?",
            best_by=("device_ms", "time_ms"),
            columns=(
                "time_ms",
                "device_ms",
                "gb_per_s",
                "fraction_of_floor",
                "peak_gib",
                "algorithm_used",
                "block_used",
                "registers",
                "spilled_bytes",
                "shared_kib",
                "occupancy",
            ),
        )
    },
    cost_model=_cost_model,
    reusable_process=True,
)
