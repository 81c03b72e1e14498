"""The problem of the linear loss: its fields, its columns in a row, its layout in a report, and its variants."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from tpbench.columns import GEMM_TFLOPS, Column
from tpbench.measure import machine
from tpbench.settings import setting
from tpbench.workloads import Pivot, Study, Workload, losses
from tpbench.workloads.losses import first_of, labels_on_one_rank
from tpbench.workloads.sizes import ITEM_BYTES


@dataclass(frozen=True, kw_only=True)
class LinearLoss(losses.LossProblem):
    """Sizes, loss, dtype and seed, then the options that only some variants support."""

    # A gradient's row of fewer columns can cancel in a sum over ranks: its rounding then makes a right variant wrong.
    hidden: int = setting(help="width of the hidden states", low=8)
    mode: Literal["train", "forward"] = setting("train", help="train: loss and both gradients; forward: the loss only")
    sequence_parallel: bool = setting(
        False, help="each rank holds tokens / tp_size rows of the hidden states", option="skipped"
    )
    main_grad: bool = setting(
        False, help="add the weight's gradient to fp32 memory, as Megatron's main_grad", option="skipped"
    )
    label_logit: float = setting(
        0.0,
        help="logit of each row's label, above others near 0, as in a trained model; 0: all are random",
        low=0.0,
        high=12.0,  # from 16 on, rounding to bfloat16 moves a loss by more than its tolerance
    )
    logits_gib: float | None = setting(
        None, help="linear_tp: memory for the logits of a chunk, GiB; null: its own choice", low=1e-6, option="ignored"
    )
    logits_dtype: Literal["float32"] | None = setting(
        None, help="float32: linear_tp keeps logits as sums in fp32; null: in dtype", option="skipped"
    )
    objective: str | None = setting(
        None, help="a function as the loss, with the hash of its file: write loss=FILE.py:FUNCTION", option="skipped"
    )
    exchange: Literal["auto", "nccl", "symmetric", "yielding"] = setting(
        "auto",
        help="linear_tp, linear_unfused: path of the rows' statistics, as exchange of entropy_loss",
        option="ignored",
    )

    @property
    def rounded_to(self) -> str:
        """The dtype to which a right variant may round the logits that it computes with."""
        return self.logits_dtype or self.dtype

    def check(self, tp_size: int, dp_size: int) -> list[str]:
        """Return a complaint for each combination of fields that is invalid."""
        complaints = super().check(tp_size, dp_size)
        if dp_size != 1:
            complaints.append(f"dp_size={dp_size} must be 1: replicas of a head do not communicate")
        if self.sequence_parallel and self.tokens % tp_size:
            complaints.append(f"sequence_parallel=true needs tokens={self.tokens} to be a multiple of {tp_size=}")
        if self.label_logit and not self.from_labels:
            complaints.append(f"label_logit={self.label_logit} needs labels, which loss={self.loss} doesn't have")
        if self.main_grad and not self.trains:
            complaints.append("main_grad=true needs mode=train: mode=forward has no gradient")
        return complaints


class LinearLossWorkload(Workload):
    """The linear loss, whose weight and hidden states must be in memory."""

    def resolve(self, problem: Any, chosen: frozenset[str]) -> Any:
        """Return the problem whose loss is of log-probabilities if a function is its objective."""
        return replace(problem, loss="logprob") if problem.objective else problem

    def least_gib(self, job: Any) -> float:
        """Return the memory of a rank's part of the weight and of the hidden states, with their gradients, in GiB."""
        problem: LinearLoss = job.problem
        ranks = int(job.tp_size)
        rows = problem.tokens / (ranks if problem.sequence_parallel else 1) + problem.vocab / ranks
        return (1 + problem.trains) * rows * problem.hidden * ITEM_BYTES[problem.dtype] / 2**30


_STUDIED: Any = {"studies": ("linear",)}

WORKLOAD = LinearLossWorkload(
    name="linear_loss",
    summary="head and entropy loss over a sharded vocabulary, forward and backward",
    problem=LinearLoss,
    headline=("loss", "tokens", "hidden", "vocab"),
    columns=(
        *losses.LOSS_COLUMNS,
        Column("hidden_grad_error", float, "of the hidden states' gradient the largest ||row - right|| / ||right||"),
        Column("weight_grad_error", float, "the same of the weight's gradient; ||right|| is at least the RMS of rows"),
        Column("products_ms", float, "the matrix products alone, alternately with the step", better=0, **_STUDIED),
        Column("over_products", float, "the step's time over products_ms, timed alternately", better=-1, **_STUDIED),
        Column("over_products_alone", float, "the same, each timed alone, so at its own clock", better=-1, **_STUDIED),
        GEMM_TFLOPS,
        Column("tflops", float, "operations of the busiest rank over the step's time", better=1, **_STUDIED),
        Column("above_outputs_gib", float, "peak memory beyond the step's gradients", better=-1, **_STUDIED),
        Column("workspace_gib", float, "memory shared with peers that the variant keeps between iterations", better=-1),
        Column("chunks", int, "chunks of rows (linear_tp)", by_variant=True, **_STUDIED),
        Column("chunk_rows", int, "rows of a chunk (linear_tp)", by_variant=True, **_STUDIED),
    ),
    pivot=Pivot(rows=("hidden", "vocab", "tp_size", "tokens"), sections=("loss", "objective", "mode", "dtype")),
    studies={
        "linear": Study(
            "how far is the loss from its matrix products, and how much memory does it need?",
            best_by=("device_ms", "time_ms"),
            columns=("time_ms", "device_ms", "chained_ms", "fraction_of_floor", "peak_gib"),
            axes=("above_outputs_gib", "time_ms"),
        )
    },
)


def _liger(problem: LinearLoss, tp_size: int) -> str | None:
    if problem.loss != "policy":
        return labels_on_one_rank(problem, tp_size)
    if tp_size > 1 or not problem.trains or problem.ignored:
        return "its policy loss is for one GPU, computes gradients in its forward pass, and ignores no label here"
    return losses.incomplete_sequences(problem, tp_size)


def _liger_cutedsl(problem: LinearLoss, tp_size: int) -> str | None:
    if not problem.trains:
        return "it computes a gradient in its forward pass"
    fits = problem.dtype == "bfloat16" and not problem.tokens % 128 and not problem.vocab % 256
    return None if fits else "it needs bfloat16, tokens that 128 divides and a vocab that 256 divides"


def _cce(problem: LinearLoss, tp_size: int) -> str | None:
    if problem.dtype == "float32" and problem.trains:
        return "it computes gradients in bfloat16 or float16"
    return labels_on_one_rank(problem, tp_size)


def _logprobs(problem: LinearLoss, tp_size: int) -> str | None:
    return None if problem.loss == "logprob" else losses.labels_only(problem, tp_size)


def _verl(problem: LinearLoss, tp_size: int) -> str | None:
    if problem.hidden % 128:
        return f"it needs hidden to be a multiple of 128, got {problem.hidden}"
    return _logprobs(problem, tp_size)


def quack_chunk_rows(problem: LinearLoss) -> int | None:
    """Return QuACK's default chunk size, or one near it, or None. QuACK 0.6.5 raises an error for a chunk with as many
    rows, after padding to a multiple of 128, as the hidden states have columns."""
    for size in (4096, 8192, 2048, 1024, 512, 256, 128):
        chunks = min(size, problem.tokens), (problem.tokens - 1) % size + 1
        if problem.hidden not in (-(-rows // 128) * 128 for rows in chunks):
            return size
    return None


def _quack(problem: LinearLoss, tp_size: int) -> str | None:
    if problem.dtype == "float32" or problem.tokens % 8 or problem.hidden % 8 or problem.vocab % 8:
        return "it needs bfloat16 or float16, and tokens, hidden and vocab that 8 divides"
    has_chunks = quack_chunk_rows(problem) is not None
    return None if has_chunks else f"it needs chunks with more or fewer rows than hidden={problem.hidden}"


def _torch(problem: LinearLoss, tp_size: int) -> str | None:
    installed = machine.version("torch")
    if installed and [int(number) for number in installed.split(".")[:2]] < [2, 13]:
        return "it needs torch 2.13"
    return labels_on_one_rank(problem, tp_size)


_OF_KERNELS: Any = {
    "requires": ("triton",),
    "uses_triton": True,
    "requires_cuda": lambda problem: problem.exchange == "symmetric",
}
_variant = WORKLOAD.variant_of
_variant(
    "linear_tp",
    "linear_tp.prepare",
    "tpbench.kernels.linear_entropy_loss: chunks of rows, our loss in place, sums over ranks behind products",
    options={"entropy", "sequence_parallel", "main_grad", "logits_gib", "logits_dtype", "exchange", "objective"},
    **_OF_KERNELS,
)
_variant(
    "linear_unfused",
    "linear_tp.prepare_unfused",
    "all logits, our loss in place, two products and one all-reduce, in ten lines",
    options={"entropy", "exchange", "objective"},
    **_OF_KERNELS,
)
_gather = "all-gather the logits to the whole vocabulary, then torch's own loss in fp32"
_variant("linear_gather", "in_torch.gather", _gather, options={"entropy", "objective"})
_parallel = "F.linear, then F.cross_entropy of a sharded DTensor in fp32 under torch's loss_parallel()"
_variant("linear_loss_parallel", "in_torch.loss_parallel", _parallel, unsupported_reason=losses.labels_over_ranks)
_variant(
    "linear_compiled",
    "in_torch.compiled",
    "torch.compile of F.linear and F.cross_entropy in fp32, with autograd's backward",
    requires_cuda=True,
    unsupported_reason=labels_on_one_rank,
)
_chunked = "torch's own linear_cross_entropy in chunks (torch 2.13)"
_variant("linear_torch", "in_torch.chunked", _chunked, unsupported_reason=_torch)
peer = partial(losses.peer, WORKLOAD)
peer("linear_liger", "liger_kernel", _liger, "Liger's LigerFusedLinearCrossEntropyLoss and -GRPOLoss, in chunks")
_cute = "Liger's CuTe kernels for Hopper: liger_fused_linear_cross_entropy_sm90, with all logits"
peer("linear_liger_cutedsl", "liger_kernel cutlass", first_of(labels_on_one_rank, _liger_cutedsl), _cute)
peer("linear_cce", "cut_cross_entropy", _cce, "Apple's cut-cross-entropy in Triton, with its filter of small gradients")
peer("linear_verl", "verl", _verl, "verl's Triton kernel: log-probabilities and entropies", options={"entropy"})
_scaled = "Liger's LigerFusedLinearScaledCrossEntropyTPFunction: the same in torch, in chunks of 512 rows"
_refusal = first_of(losses.one_rank, losses.uneven, _logprobs)
peer("linear_liger_tp", "liger_kernel", _refusal, _scaled, options={"entropy"})
peer("linear_quack", "quack", first_of(labels_on_one_rank, _quack), "QuACK's chunked_linear_cross_entropy in CuTe")
