"""The problem of the linear loss: its fields, its columns in a row, and its layout in a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tpbench.kernels import LABEL_LOSSES, KernelLoss
from tpbench.settings import setting
from tpbench.workloads import Option, Pivot, Study, Workload


@dataclass(frozen=True)
class LinearLoss:
    """Sizes, loss, dtype and seed, then the options that only some variants support."""

    tokens: int = setting(help="rows of hidden states", low=1)
    hidden: int = setting(help="width of the hidden states", low=1)
    vocab: int = setting(help="rows of the head's weight over all tensor-parallel ranks", low=1)
    loss: KernelLoss = setting(
        "cross_entropy",
        help="cross-entropy from labels, a loss against a teacher's logits, or the labels' log-probabilities",
    )
    mode: Literal["train", "forward"] = setting("train", help="train: loss and both gradients; forward: the loss only")
    dtype: Literal["bfloat16", "float16", "float32"] = setting("bfloat16", help="dtype of hidden states and weight")
    seed: int = setting(0, help="seed of the inputs", low=0, high=2**31 - 1)
    temperature: float = setting(1.0, help="divisor of the teacher's logits, or for logprob of the logits", low=1e-6)
    ignored: float = setting(
        0.0, help="share of rows whose label is ignored (cross_entropy, logprob)", low=0.0, high=1.0
    )
    entropy: bool = setting(False, help="compute each row's entropy too")
    sequence_parallel: bool = setting(False, help="each rank holds tokens / tp_size rows of the hidden states")
    main_grad: bool = setting(False, help="add the weight's gradient to fp32 memory, as Megatron's main_grad")
    logits_gib: float | None = setting(
        None, help="linear_tp: memory for the logits of a chunk, GiB; null: its own choice", low=1e-6
    )
    exchange: Literal["auto", "nccl", "symmetric"] = setting(
        "auto", help="linear_tp, linear_unfused: path of the rows' statistics, as exchange of entropy_loss"
    )

    @property
    def from_labels(self) -> bool:
        """True if the targets are labels, false if they are a teacher's logits."""
        return self.loss in LABEL_LOSSES

    @property
    def trains(self) -> bool:
        """True if gradients are computed."""
        return self.mode == "train"

    @property
    def products(self) -> int:
        """Matrix products of tokens x hidden x vocab that no implementation can avoid."""
        return (3 if self.trains else 1) + (0 if self.from_labels else 1)

    def check(self, tp_size: int, dp_size: int) -> list[str]:
        """Return a complaint for each combination of fields that is invalid."""
        complaints = []
        if self.vocab < tp_size:
            complaints.append(
                f"vocab={self.vocab} cannot be sharded over tp_size={tp_size}: some rank would hold nothing"
            )
        if dp_size != 1:
            complaints.append(f"dp_size={dp_size} must be 1: replicas of a head do not communicate")
        if self.loss == "cross_entropy" and self.temperature != 1.0:
            complaints.append(
                f"temperature={self.temperature} divides a teacher's logits, or those of logprob: not of cross_entropy"
            )
        if not self.from_labels and self.ignored:
            complaints.append(f"ignored={self.ignored} needs labels: only {' and '.join(LABEL_LOSSES)} have them")
        if self.sequence_parallel and self.tokens % tp_size:
            complaints.append(f"sequence_parallel=true needs tokens={self.tokens} to divide by tp_size={tp_size}")
        if self.main_grad and not self.trains:
            complaints.append("main_grad=true needs mode=train: mode=forward has no gradient")
        return complaints


_PROFILE = (
    "time_ms",
    "device_ms",
    "products_ms",
    "over_products",
    "over_products_alone",
    "tflops",
    "fraction_of_floor",
    "peak_gib",
    "above_outputs_gib",
    "chunks",
    "chunk_rows",
    "loss_value",
    "loss_error",
    "hidden_grad_error",
    "weight_grad_error",
)

WORKLOAD = Workload(
    name="linear_loss",
    summary="head and entropy loss over a sharded vocabulary, forward and backward",
    problem=LinearLoss,
    headline=("loss", "tokens", "hidden", "vocab"),
    columns={
        "loss_identical": "true if all ranks had the same bits in every loss",
        "entropy_error": "largest error of a row's entropy against the float64 oracle",
        "hidden_grad_error": "largest ||row - right|| / ||right|| of the hidden states' gradient",
        "weight_grad_error": "the same of the weight's gradient, ||right|| at least the root mean square of the rows",
        "chunks": "chunks of rows (linear_tp)",
        "chunk_rows": "rows of a chunk (linear_tp)",
        "products_ms": "the problem's matrix products alone, timed alternately with the step, ms",
        "over_products": "the step's time over products_ms, both timed alternately, so at equal clocks",
        "over_products_alone": "the same, each timed in iterations of its own: at a GPU's power limit the one that "
        "draws less power has a higher clock",
        "above_outputs_gib": "peak memory beyond the gradients that the step returns, maximum over ranks, GiB",
        "workspace_gib": "memory shared with peers that the variant keeps between iterations, GiB",
        "gemm_tflops": "rate of a large square product in this dtype on this machine, TFLOP/s",
        "tflops": "floating-point operations of the busiest rank over the step's time, TFLOP/s",
    },
    variant_columns=("chunks", "chunk_rows", "workspace_gib"),
    options=(
        Option("entropy"),
        Option("sequence_parallel"),
        Option("main_grad"),
        Option("logits_gib", ignorable=True),
        Option("exchange", ignorable=True),
    ),
    pivot=Pivot(rows=("hidden", "vocab", "tp_size", "tokens"), sections=("loss", "mode", "dtype")),
    metrics={
        "over_products": -1,
        "over_products_alone": -1,
        "above_outputs_gib": -1,
        "workspace_gib": -1,
        "products_ms": 0,
        "tflops": 1,
    },
    studies={
        "linear": Study(
            "how far is the loss from its matrix products, and how much memory does it need?",
            best_by=("device_ms", "time_ms"),
            columns=_PROFILE,
            axes=("above_outputs_gib", "time_ms"),
        )
    },
    reusable_process=True,
)
