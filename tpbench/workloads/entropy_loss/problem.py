"""The problem of the entropy loss: its fields, its columns in a row, its layout in a report, and its variants."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from tpbench.columns import Column
from tpbench.kernels import COMPARING_LOSSES, Loss
from tpbench.settings import setting
from tpbench.workloads import Pivot, Study, Variant, Workload, losses
from tpbench.workloads.losses import bytes_of_rows, first_of, labels_on_one_rank, other_losses, uneven
from tpbench.workloads.sizes import ITEM_BYTES

TERMS = {
    "label_smoothing": "cross_entropy",
    "z_loss": "cross_entropy",
    "softcap": "cross_entropy",
    "entropy_weight": "policy",
}
"""Options that change the loss itself, with that loss."""


@dataclass(frozen=True)
class EntropyLoss(losses.LossProblem):
    """Sizes, loss, dtype and seed, then the options that only some variants support."""

    loss: Loss = setting("cross_entropy", help="a loss from labels, or against target logits (a teacher's)")
    logits_scale: float = setting(1.0, help="factor on logits and target logits", low=1e-6)
    label_smoothing: float | None = setting(
        None, help="share of the mean of all columns in cross_entropy", low=0.0, high=1.0, option="skipped"
    )
    z_loss: float | None = setting(
        None, help="factor on log(sum(exp(x)))^2, a term of cross_entropy", low=0.0, option="skipped"
    )
    softcap: float | None = setting(
        None, help="cross_entropy of c tanh(logits / c) with this c", low=1e-3, option="skipped"
    )
    entropy_weight: float | None = setting(
        None, help="policy: weight of the entropy, which is subtracted from the loss", low=0.0, option="skipped"
    )
    block_cap: Literal["auto", 4096, 8192, 16384, 32768] = setting(
        "auto", help="largest column block of a kernel", option="ignored"
    )
    exchange: Literal["auto", "nccl", "symmetric", "yielding", "all_reduce"] = setting(
        "auto",
        help="exchange of statistics: nccl (all-gather), symmetric (triton_tp: memory shared over NVLink), yielding "
        "(the same, safe beside other collectives), all_reduce (pytorch_tp_manual: of maxima, then of sums), auto",
        option="ignored",
    )
    algorithm: Literal["auto", "two_reads", "two_kernels", "one_read"] = setting(
        "auto",
        help="triton_tp: two_reads or one_read of a row in one kernel, two_kernels with statistics between, auto",
        option="ignored",
    )
    compile: bool = setting(False, help="use torch.compile (pytorch_tp_manual, pytorch_gather)", option="skipped")
    compute_dtype: Literal["float32", "logits"] = setting(
        "float32", help="dtype in which torch's losses use the logits: float32, or the logits' own", option="skipped"
    )
    autograd: bool = setting(
        False,
        help="triton_tp: call the module EntropyLoss and torch's autograd, as a training loop does",
        option="skipped",
    )

    def check(self, tp_size: int, dp_size: int) -> list[str]:
        given = ((name, loss, getattr(self, name)) for name, loss in TERMS.items())
        wrong = [f"{name}={value} is for loss={loss}" for name, loss, value in given if value and loss != self.loss]
        return [*super().check(tp_size, dp_size), *wrong]


_OF_KERNELS: Any = {"by_variant": True, "studies": ("block_cap",)}


@dataclass(frozen=True)
class EntropyLossVariant(Variant):
    """An implementation of the entropy loss, with what its cost model needs."""

    exchanges: Literal["numbers", "numbers of parts", "sums", "logits"] = "numbers"
    """What ranks exchange: numbers of each row or of its parts, sums of such numbers, or all logits."""


class EntropyLossWorkload(Workload):
    """The entropy loss, whose inputs are most of its memory."""

    def least_gib(self, job: Any) -> float:
        """Return the memory of a rank's inputs in GiB, with at least what torch makes of gathered logits."""
        problem: EntropyLoss = job.problem
        logits = problem.tokens * -(-problem.vocab // job.tp_size) * ITEM_BYTES[problem.dtype]
        if job.implementation.exchanges == "logits" and job.tp_size > 1 and not problem.compile:
            # The gathered logits, their log-softmax, and the gradients of both. Measured are 4.0 to 16.
            logits += 4 * problem.tokens * problem.vocab * ITEM_BYTES[problem.dtype]
        return float(problem.matrices * logits + bytes_of_rows(problem)) / 2**30


WORKLOAD = EntropyLossWorkload(
    name="entropy_loss",
    summary="entropy loss over a sharded vocabulary, forward and backward",
    problem=EntropyLoss,
    variant_class=EntropyLossVariant,
    headline=("loss", "tokens", "vocab"),
    columns=(
        *losses.LOSS_COLUMNS,
        Column("algorithm_used", str, "two_reads, two_kernels or one_read: which ran (triton_tp)", **_OF_KERNELS),
        Column("block_used", int, "columns of the kernels' block (triton_tp)", **_OF_KERNELS),
        # The largest number of the kernels that read the logits, of the occupancy the smallest.
        Column("registers", int, "registers per thread as compiled, of the worst kernel (triton_tp)", **_OF_KERNELS),
        Column("spilled_bytes", int, "spilled registers per thread, of the worst kernel (triton_tp)", **_OF_KERNELS),
        Column("shared_kib", float, "shared memory per program, of the worst kernel (triton_tp)", **_OF_KERNELS),
        Column("occupancy", float, "share of resident warps, worst kernel (triton_tp)", percent=True, **_OF_KERNELS),
    ),
    pivot=Pivot(
        rows=("vocab", "tp_size", "shard"),
        sections=("loss", *TERMS, "dtype"),
        derived={"shard": lambda row: -(-row["vocab"] // row["tp_size"])},
    ),
    studies={
        "block_cap": Study(
            "why is one block cap slow?",
            best_by=("device_ms", "time_ms"),
            columns=("time_ms", "device_ms", "chained_ms", "gb_per_s", "fraction_of_floor", "peak_gib"),
            compared_across=("block_cap",),
            axes=("block_used", "device_ms"),
        )
    },
)


def _triton_tp(problem: EntropyLoss, tp_size: int) -> str | None:
    if problem.exchange == "all_reduce":
        return "exchange=all_reduce is of pytorch_tp_manual"
    if problem.autograd and problem.entropy:
        return "autograd=true has no entropy=true: the module returns the loss alone"
    if problem.loss in COMPARING_LOSSES and problem.algorithm == "two_reads":
        return f"loss={problem.loss} is algorithm=two_kernels or one_read"
    if tp_size > 1 and problem.algorithm == "two_reads":
        return "algorithm=two_reads makes loss and gradient in one kernel: over ranks the exchange lies between them"
    exchanges = {"two_kernels": ("nccl",), "one_read": ("symmetric", "yielding")}.get(problem.algorithm)
    if tp_size > 1 and exchanges and problem.exchange not in ("auto", *exchanges):
        return f"algorithm={problem.algorithm} over ranks is exchange={exchanges[0]}, got exchange={problem.exchange}"
    return None


def _manual(problem: EntropyLoss, tp_size: int) -> str | None:
    if problem.loss in COMPARING_LOSSES or problem.top_k:
        return f"it has no {'top_k' if problem.top_k else problem.loss}"
    return None


def _gather(problem: EntropyLoss, tp_size: int) -> str | None:
    # In fp16, gradients by many columns are subnormal: errors of 0.07 to 0.34 were measured for 2^15 and 2^17.
    inexact = problem.loss in (*COMPARING_LOSSES, "policy") or (problem.dtype == "float16" and not problem.from_labels)
    inexact |= any(getattr(problem, name) for name in ("entropy", *TERMS))
    too_inexact = f"{problem.loss} that is computed in {problem.dtype} is too inexact"
    return too_inexact if inexact and problem.compute_dtype == "logits" else None


def _bf16_only(problem: EntropyLoss, tp_size: int) -> str | None:
    return None if problem.dtype == "bfloat16" else "its gradient is in bfloat16"


def _fast_llm(problem: EntropyLoss, tp_size: int) -> str | None:
    if problem.top_k or problem.kl_weight or problem.loss in COMPARING_LOSSES:
        return f"it has no top_k, no {' and no '.join(COMPARING_LOSSES)}, and no divergence from a reference policy"
    return uneven(problem, tp_size) if problem.from_labels else None


def _liger(problem: EntropyLoss, tp_size: int) -> str | None:
    if problem.loss not in (*COMPARING_LOSSES, "policy"):
        return losses.labels_of_even_shards(problem, tp_size)
    if tp_size > 1 or problem.compute_dtype != "float32":
        return "for this loss it is for one GPU, and has no compute_dtype"
    return losses.incomplete_sequences(problem, tp_size) if problem.loss == "policy" else None


WORKLOAD.variant_of(
    "triton_tp",
    "triton_tp.prepare",
    "our fused Triton kernels on the local shard; one exchange of a few scalars a row",
    options={"block_cap", "exchange", "algorithm", "autograd", "entropy", *TERMS},
    requires=("triton",),
    uses_triton=True,
    requires_cuda=lambda problem: problem.algorithm == "one_read" or problem.exchange == "symmetric",
    unsupported_reason=_triton_tp,
    exchanges="numbers of parts",
)
WORKLOAD.variant_of(
    "pytorch_tp_manual",
    "in_torch.prepare_manual",
    "the same algorithm in torch operations (compile=true: torch.compile)",
    options={"compile", "exchange"},
    option_values={"exchange": ("auto", "all_reduce")},
    unsupported_reason=_manual,
)
WORKLOAD.variant_of(
    "pytorch_gather",
    "in_torch.prepare_gather",
    "all-gather the logits to the whole vocabulary, then torch's own loss (compile=true: torch.compile)",
    options={"compute_dtype", "compile", "entropy", *TERMS},
    unsupported_reason=_gather,
    exchanges="logits",
)
peer = partial(losses.peer, WORKLOAD)
_parallel = "torch's own: F.cross_entropy of a sharded DTensor under loss_parallel()"
_in_torch: Any = {"requires_cuda": False, "exchanges": "sums"}
peer("torch_loss_parallel", "", losses.labels_over_ranks, _parallel, options={"compute_dtype"}, **_in_torch)
peer("fast_llm", "fast_llm", _fast_llm, "Fast-LLM's Triton kernels, from a checkout on PYTHONPATH", exchanges="sums")
peer("quack", "quack", labels_on_one_rank, "QuACK's CuTe kernel: forward and gradient (of the sum) in one launch")
_unfused = "Megatron-LM's vocab_parallel_cross_entropy in torch"
peer("megatron", "megatron", losses.labels_of_even_shards, _unfused, **_in_torch)
_fused = "Megatron-LM's fused_vocab_parallel_cross_entropy: the same, fused by torch.compile"
peer("megatron_fused", "megatron", first_of(_bf16_only, losses.labels_of_even_shards), _fused, **_in_torch)
_overwriting = "Liger's Triton kernels, which overwrite the logits"
peer("liger", "liger_kernel", _liger, _overwriting, options={"compute_dtype"}, exchanges="sums")
peer("flash_attn", "flash_attn", first_of(uneven, other_losses), "flash-attention's Triton kernel")
