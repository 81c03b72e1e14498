"""The declaration of the train step: what is known before a cell runs, its columns, and the layout of its rows."""

import functools
from collections.abc import Mapping
from typing import Any

from tpbench import packages
from tpbench.columns import GEMM_TFLOPS, NCCL_ALGORITHM, Column
from tpbench.settings import spelled
from tpbench.workloads import Pivot, Study, Workload
from tpbench.workloads.train_step.documents import json_document
from tpbench.workloads.train_step.estimates import MemoryEstimate, TrainVariant, estimate_memory, parameters
from tpbench.workloads.train_step.model.resolve import resolve
from tpbench.workloads.train_step.problem import ARCHITECTURE, TrainStep

ALIASES = {
    "impl": "variant={} shape=qwen3_32b_tp4",
    "model_name": "model={}",
    "attn_impl": "attention={}",
    "gradient_accumulation_steps": "accumulate={}",
    "use_vocab_parallel": "vocab_parallel={}",
    "no_vocab_parallel": "vocab_parallel=${tpbench.not:{}}",
    "num_training_steps": "steps='${tpbench.difference:num_training_steps,{},warmup_steps,${warmup_steps}}'",
}
"""Names of an older benchmark of AutoTP and FSDP2. Its steps include those of the warm-up, and it trains Qwen3-32B if
no other model is named."""
LARGEST_ESTIMATE = 1.15
"""Most that an estimate of the memory exceeds the peak that is measured, as a factor: 1.13 in 31 measured cells."""
MEMORY_PARTS = MemoryEstimate._fields[:-1]
NEEDS_GPU = {
    "compile=true": "", "train_loss=compiled": "", "train_loss=liger": "liger_kernel",
    "attention=flash_attention_2": "flash_attn",
}  # fmt: skip
"""Values that need a GPU, each with the package that it needs, too, or nothing."""
PLAIN_LOGITS = ("llama", "qwen2", "qwen3", "mistral", "olmo")
"""Beginnings of the model types whose logits are those of the head. Others change them, as by a factor."""
SHOWN_FIRST = (
    "tokens_per_s_per_gpu", "mfu", "bound", "communication_share", "idle_share", "time_ms", "device_ms", "peak_gib",
    "loss_value",
)  # fmt: skip
"""The first columns of the study `training`."""

_shown = functools.partial(Column, studies=("training",))
COLUMNS = (
    Column("parameters", int, "number of weights of the trained model"),
    Column("tokens_per_s", float, "tokens of all replicas' micro-batches over the median step's time", better=1),
    _shown("tokens_per_s_per_gpu", float, "tokens_per_s divided by the number of ranks", better=1),
    Column("samples_per_s", float, "sequences of all replicas' micro-batches over the median step's time", better=1),
    Column("samples_per_s_per_gpu", float, "samples_per_s divided by the number of ranks"),
    Column("tflops_per_gpu", float, "flops divided by the median step's time", "TFLOP/s", better=1),
    _shown("mfu", float, "the model's operations per second and rank, over peak_tflops", better=1, percent=True),
    Column("peak_tflops", float, "dense peak of the GPU in dtype by its datasheet"),
    GEMM_TFLOPS,
    _shown("forward_ms", float, "forward passes of the median step on its slowest rank", better=-1),
    _shown("backward_ms", float, "backward passes of a step, as forward_ms", better=-1),
    _shown("optimizer_ms", float, "clipping and update of a step, as forward_ms", better=-1),
    Column("step_forward_ms", list, "forward passes of each measured step on its slowest rank"),
    Column("step_backward_ms", list, "backward passes of each measured step on its slowest rank"),
    Column("step_optimizer_ms", list, "clipping and update of each measured step on its slowest rank"),
    _shown("steady_gib", float, "memory held between steps, largest of all ranks", better=-1),
    # If activations are freed as gradients are made, only the larger of the two counts.
    _shown("expected_gib", float, "estimated peak memory of a rank, of which parts are the estimates below", better=0),
    _shown("expected_model_gib", float, "estimated memory of a rank's parameters"),
    _shown("expected_gradients_gib", float, "estimated memory of a rank's gradients"),
    _shown("expected_optimizer_gib", float, "estimated memory of a rank's optimizer states"),
    _shown("expected_activations_gib", float, "estimated memory of a rank's activations or, if more, ZeRO's buffers"),
    NCCL_ALGORITHM,
    Column("losses", list, "mean loss of every step, including warm-up"),
    Column("grad_norms", list, "gradient norm before clipping of every step, including warm-up"),
    Column("grad_norm", float, "gradient norm before clipping of the last step"),
    Column("oracle", str, "reference of the row: steps by one process or a forward pass, and what isn't checked"),
    Column("init_s", float, "time to make, shard and wrap the model", "s", better=0),
)


def unsupported_loss(problem: TrainStep, tp_size: int) -> str | None:
    """Return why the problem's `train_loss` cannot be trained on tp_size ranks, or None."""
    choice = f"train_loss={problem.train_loss}"
    if problem.train_loss not in ("liger", "tpbench_linear"):
        return None
    if tp_size > 1 and not problem.vocab_parallel:
        return f"{choice} needs vocab_parallel=true: it is of one head, or of shards of it"
    if problem.train_loss == "liger" and problem.vocab % tp_size:
        return f"{choice} needs equal shards: tp_size={tp_size} must divide vocab={problem.vocab}"
    is_linear = problem.train_loss == "tpbench_linear" or tp_size == 1
    if is_linear and not problem.architecture.startswith(PLAIN_LOGITS):
        return f"{choice} gets no logits, which {problem.architecture} may change: train_loss=tpbench gets them"
    return None


class TrainStepWorkload(Workload):
    """The train step: its model is resolved, and its memory estimated, before a cell runs."""

    def resolve(self, problem: TrainStep, chosen: frozenset[str]) -> TrainStep:
        """Return the problem with the fields that the name or the folder of its model implies. Raises JobError."""
        return resolve(problem, chosen)

    def planned_columns(self, job: Any) -> dict[str, Any]:
        """Return the columns that follow from the job alone: counts, and the expected memory of a rank."""
        distribution, on_gpus = job.implementation.distribution, job.device != "cpu"
        expected = estimate_memory(job.problem, distribution, job.tp_size, job.dp_size, on_gpus=on_gpus)
        return {
            "tokens": job.problem.tokens,
            "parameters": parameters(job.problem),
            **{f"expected_{part}_gib": getattr(expected, part) / 2**30 for part in MEMORY_PARTS},
            "expected_gib": expected.total / 2**30,
        }

    def expected_memory(self, job: Any) -> str:
        """Return the memory estimate as a phrase for the reason of a row that ran out of memory."""
        columns = self.planned_columns(job)
        gib = {part: columns[f"expected_{part}_gib"] for part in MEMORY_PARTS}
        parts = [f"{part} {gib[part]:.4g}" for part in MEMORY_PARTS]
        if sum(gib.values()) > columns["expected_gib"] * (1 + 1e-6):  # each gradient takes the place of activations
            larger = [f"{part} {gib[part]:.4g}" for part in ("gradients", "activations")]
            parts = [*(part for part in parts if part not in larger), f"the larger of {' and '.join(larger)}"]
        return f"expected to need {columns['expected_gib']:.4g} GiB ({' + '.join(parts)})"

    def unsupported_reason(self, job: Any) -> str | None:
        """Return why the job's device, its model or the installed packages do not support its options, or None."""
        problem: TrainStep = job.problem
        for choice, package in NEEDS_GPU.items():
            name, _, value = choice.partition("=")
            if spelled(getattr(problem, name)) != value:
                continue
            if job.device == "cpu":
                return f"{choice} needs a CUDA GPU"
            if package and not packages.installed(package):
                return f"{choice} {packages.not_installed([package])}"
        return unsupported_loss(problem, job.tp_size)

    def least_gib(self, job: Any) -> float:
        """Return the expected memory of a rank in GiB, divided by the largest error of the estimate."""
        return float(self.planned_columns(job)["expected_gib"]) / LARGEST_ESTIMATE

    def document(self, row: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Return the row as the JSON document of an older benchmark, with its file name, or None."""
        return json_document(row)


WORKLOAD = TrainStepWorkload(
    name="train_step",
    summary="steps of training a transformer, tensor and data parallel",
    problem=TrainStep,
    variant_class=TrainVariant,
    aliases=ALIASES,
    headline=("model", "num_layers", "batch_size", "seq_length"),
    scheduled=True,
    columns=COLUMNS,
    former_fields={"optimizer": "torch", "nccl": "default", "ffn_matrices": 3, "phase_steps": 3},
    pivot=Pivot(
        rows=("model", "num_layers", "seq_length", "dp_size", "tp_size"),
        sections=("dtype",),
        implied=(*ARCHITECTURE, "model_dir"),
        loss_tolerance={"bfloat16": 2e-2, "float16": 2e-2, "float32": 1e-3},
    ),
    studies={
        "training": Study(
            "which throughput does each implementation reach, and how much memory does it need?",
            best_by=("tokens_per_s_per_gpu",),
            compared_across=("dp_size", "tp_size", "batch_size"),
            axes=("peak_gib", "tokens_per_s_per_gpu"),
            columns=SHOWN_FIRST,
        ),
        "train_loss": Study("what is a loss worth in a step?", module="tpbench.workloads.train_step.loss_study"),
    },
)
