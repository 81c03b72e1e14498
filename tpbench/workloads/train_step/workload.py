"""The declaration of the train step: its options, its columns, the layout of its rows in a report, and its variants."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from tpbench import packages
from tpbench.columns import Column
from tpbench.settings import field_traits
from tpbench.workloads import Pivot, Study, Workload
from tpbench.workloads.train_step.documents import json_document
from tpbench.workloads.train_step.estimates import MemoryEstimate, estimate_memory, parameters
from tpbench.workloads.train_step.model.resolve import KNOWN_ARCHITECTURES, resolve
from tpbench.workloads.train_step.problem import ARCHITECTURE, TrainStep

TENSOR_PARALLEL = frozenset({"vocab_parallel"})
"""Options that have a meaning only if the model is sharded."""
AUTOTP = frozenset({"zero_stage", "overlap"})
"""Options of DeepSpeed."""
ALL = frozenset(field_traits(TrainStep, "option")) - TENSOR_PARALLEL - AUTOTP - {"nccl"}
"""Options that every variant supports."""
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


class TrainStepWorkload(Workload):
    """The train step: its model is resolved, and its memory estimated, before a cell runs."""

    def resolve(self, problem: TrainStep, chosen: frozenset[str]) -> TrainStep:
        """Return the problem with the fields that the name or the folder of its model implies. Raises JobError."""
        return resolve(problem, chosen)

    def planned_columns(self, job: Any) -> dict[str, Any]:
        """Return the columns that follow from the job alone: counts, and the expected memory of a rank."""
        expected = estimate_memory(job.problem, job.variant, job.tp_size, job.dp_size, on_gpus=job.device != "cpu")
        return {
            "tokens": job.problem.tokens,
            "parameters": parameters(job.problem),
            **{f"expected_{part}_gib": getattr(expected, part) / 2**30 for part in MEMORY_PARTS},
            "expected_gib": expected.total / 2**30,
        }

    def expected_memory(self, job: Any) -> str:
        """Return the memory estimate as a phrase for the reason of a row that ran out of memory."""
        columns = self.planned_columns(job)
        parts = ", ".join(f"{part} {columns[f'expected_{part}_gib']:.4g}" for part in MEMORY_PARTS)
        return f"expected to need {columns['expected_gib']:.4g} GiB ({parts})"

    def unsupported_reason(self, job: Any) -> str | None:
        """Return why the job's device, its model or the installed packages do not support its options, or None."""
        problem: TrainStep = job.problem
        if job.device == "cpu" and (problem.compile or problem.nccl != "default"):
            return f"{'compile=true' if problem.compile else f'nccl={problem.nccl}'} needs a CUDA GPU"
        if problem.attention == "flash_attention_2":
            if job.device == "cpu":
                return "attention=flash_attention_2 needs a CUDA GPU"
            if not packages.installed("flash_attn"):
                return f"attention=flash_attention_2 {packages.not_installed(['flash_attn'])}"
        return None

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
    aliases=ALIASES,
    headline=("model", "num_layers", "batch_size", "seq_length"),
    scheduled=True,
    reusable_process=False,
    columns=(
        Column("parameters", int, "number of weights of the trained model"),
        Column(
            "tokens_per_s",
            float,
            "tokens of all replicas and micro-batches divided by the median step's time",
            better=1,
        ),
        Column(
            "tokens_per_s_per_gpu",
            float,
            "tokens_per_s divided by the number of ranks",
            better=1,
            studies=("training",),
        ),
        Column(
            "samples_per_s",
            float,
            "sequences of all replicas and micro-batches divided by the median step's time",
            better=1,
        ),
        Column("samples_per_s_per_gpu", float, "samples_per_s divided by the number of ranks"),
        Column("tflops_per_gpu", float, "flops divided by the median step's time", "TFLOP/s", better=1),
        Column(
            "mfu",
            float,
            "model FLOPs utilisation: the model's operations by time and number of ranks, divided by peak_tflops",
            better=1,
            percent=True,
            studies=("training",),
        ),
        Column("peak_tflops", float, "dense peak of the GPU in dtype by its datasheet"),
        Column("gemm_tflops", float, "measured rate of a large square matrix product in this dtype"),
        Column(
            "forward_ms",
            float,
            "forward passes of the median step on its slowest rank",
            better=-1,
            studies=("training",),
        ),
        Column("backward_ms", float, "backward passes of a step, as forward_ms", better=-1, studies=("training",)),
        Column("optimizer_ms", float, "clipping and update of a step, as forward_ms", better=-1, studies=("training",)),
        Column("step_forward_ms", list, "forward passes of each measured step on its slowest rank"),
        Column("step_backward_ms", list, "backward passes of each measured step on its slowest rank"),
        Column("step_optimizer_ms", list, "clipping and update of each measured step on its slowest rank"),
        Column(
            "steady_gib", float, "memory held between steps, largest of all ranks", better=-1, studies=("training",)
        ),
        Column(
            "expected_gib",
            float,
            "estimated peak memory of a rank: the sum of the estimates below; if activations are freed as "
            "gradients are made, only the larger of the two counts",
            better=0,
            studies=("training",),
        ),
        Column("expected_model_gib", float, "estimated memory of a rank's parameters", studies=("training",)),
        Column("expected_gradients_gib", float, "estimated memory of a rank's gradients", studies=("training",)),
        Column("expected_optimizer_gib", float, "estimated memory of a rank's optimizer states", studies=("training",)),
        Column(
            "expected_activations_gib",
            float,
            "estimated memory of a rank's activations at the beginning of the backward pass "
            "or, if more, of activations and AutoTP's buffers at the first gradient",
            studies=("training",),
        ),
        Column(
            "nccl_algorithm", str, "what NCCL runs for an all-gather of the step's size: its kernel, or copy engine"
        ),
        Column("losses", list, "mean loss of every step, including warm-up"),
        Column("grad_norms", list, "gradient norm before clipping of every step, including warm-up"),
        Column("grad_norm", float, "gradient norm before clipping of the last step"),
        Column(
            "oracle",
            str,
            "reference of the row: the first steps by one process, or a forward pass of the first step; for a "
            "variant from outside tpbench all steps, or which are not checked",
        ),
        Column("init_s", float, "time to make, shard and wrap the model", "s", better=0),
    ),
    former_fields={"optimizer": "torch"},
    pivot=Pivot(
        rows=("model", "num_layers", "seq_length", "dp_size", "tp_size"),
        sections=("dtype",),
        implied=(*ARCHITECTURE, "model_dir"),
        loss_tolerance={"bfloat16": 2e-2, "float32": 1e-3},
    ),
    studies={
        "training": Study(
            "which throughput does each implementation reach, and how much memory does it need?",
            best_by=("tokens_per_s_per_gpu",),
            compared_across=("dp_size", "tp_size", "batch_size"),
            axes=("peak_gib", "tokens_per_s_per_gpu"),
            columns=(
                "tokens_per_s_per_gpu",
                "mfu",
                "bound",
                "communication_share",
                "idle_share",
                "time_ms",
                "device_ms",
                "peak_gib",
                "loss_value",
            ),
        ),
    },
)

DDP_WARMUP_STEPS = 11
"""Steps before DistributedDataParallel can be captured: it times its first ten by events (torch's notes on CUDA)."""


def _unsupported_by(variant: str, problem: TrainStep, tp_size: int) -> str | None:
    """Return why a variant cannot train a problem, or None."""
    if variant in ("fsdp", "ddp"):
        return f"it has no tensor parallelism: tp_size must be 1, got {tp_size}" if tp_size > 1 else None
    if tp_size == 1:
        return "with tp_size=1 there is nothing to parallelize: it would be fsdp" if variant == "dtensor_tp" else None
    tokens = problem.seq_length if variant == "dtensor_tp" else problem.tokens
    if variant != "autotp" and tokens % tp_size:
        sizes = f"seq_length={problem.seq_length}" if variant == "dtensor_tp" else f"batch_size x seq_length={tokens}"
        return f"the ranks share the tokens: tp_size={tp_size} must divide {sizes}"
    common = math.gcd(problem.heads, problem.kv_heads, problem.ffn_size)
    if common % tp_size:
        valid = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
        return (
            f"tp_size={tp_size} must divide heads={problem.heads}, kv_heads={problem.kv_heads} and "
            f"ffn_size={problem.ffn_size} (valid: {valid})"
        )
    if problem.architecture in KNOWN_ARCHITECTURES or not packages.installed("transformers"):
        return None
    from tpbench.workloads.train_step.sharding.plan import unsupported_model

    return unsupported_model(problem, variant)


def _no_graph(variant: str, problem: TrainStep) -> str:
    """Return why a step cannot be captured in a CUDA graph, or nothing."""
    if variant == "ddp" and problem.warmup_steps < DDP_WARMUP_STEPS:
        return (
            "DistributedDataParallel times its first ten steps on the host: "
            f"warmup_steps must be at least {DDP_WARMUP_STEPS}, got {problem.warmup_steps}"
        )
    if variant == "autotp":
        return "DeepSpeed reads the gradient norm on the host in each update"
    if not problem.warmup_steps:
        return "the optimizer makes its states in the first step: warmup_steps must be at least 1"
    if problem.attention == "flash_attention_2":
        return "transformers looks for packed sequences on the host before flash_attention_2"
    return ""


VARIANTS: dict[str, tuple[str, frozenset[str], str]] = {
    "autotp": (
        "autotp.DeepSpeedTrainer",
        ALL | TENSOR_PARALLEL | AUTOTP,
        "DeepSpeed AutoTP by the model's own plan, ZeRO 0 to 2 over replicas",
    ),
    "fsdp_dtensor": (
        "fsdp.fsdp_dtensor",
        ALL | TENSOR_PARALLEL | {"nccl"},
        "FSDP2 over replicas, tpbench's sharded layers with sequence parallelism within them",
    ),
    "dtensor_tp": (
        "fsdp.dtensor_tp",
        # torch 2.13 fails to keep the mesh of DTensors in compiled layers that are checkpointed.
        ALL - {"compile"} | TENSOR_PARALLEL,
        "torch's own: FSDP2 over replicas, parallelize_module with sequence parallelism within them",
    ),
    "fsdp": ("fsdp.fsdp_dtensor", ALL | {"nccl"}, "no tensor parallelism: FSDP2, parameters sharded over replicas"),
    "ddp": ("fsdp.ddp", ALL, "no tensor parallelism: DistributedDataParallel, all of the model on every rank"),
}
"""The function of each variant in `training`, its options and its summary."""

for _name, (_function, _options, _summary) in VARIANTS.items():
    WORKLOAD.variant_of(
        _name,
        f"training.{_function}",
        _summary,
        options=_options,
        requires=("transformers", "deepspeed") if _name == "autotp" else ("transformers",),
        no_graph_reason=partial(_no_graph, _name),
        uses_triton=lambda problem: problem.train_loss != "torch",
        unsupported_reason=partial(_unsupported_by, _name),
    )
