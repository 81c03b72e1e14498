"""What the train step is to the rest of tpbench: its options, its columns, how a report lays its rows out."""

from __future__ import annotations

import importlib.util
from typing import Any

from tpbench.workloads import Option, Pivot, Study, Workload
from tpbench.workloads.train_step import sizes
from tpbench.workloads.train_step.document import document
from tpbench.workloads.train_step.local import resolve
from tpbench.workloads.train_step.problem import ARCHITECTURE, NORM_GROWTH, TrainStep

ALL = frozenset(
    {"attention", "activation_checkpointing", "compile", "train_loss", "phase_steps", "profile", "log_interval"}
)
"""Options that every variant honours."""
TENSOR_PARALLEL = frozenset({"vocab_parallel"})
"""Those that only shards of the model give a meaning."""


def beforehand(job: Any) -> dict[str, Any]:
    """The counts that follow from the job, and the memory that it is expected to need on a rank."""
    expected = sizes.memory(job.problem, job.variant, job.tp_size, job.dp_size, on_gpus=job.device != "cpu")
    return {
        "tokens": job.problem.tokens,
        "parameters": sizes.parameters(job.problem),
        "expected_model_gib": expected.model / 2**30,
        "expected_gradients_gib": expected.gradients / 2**30,
        "expected_optimizer_gib": expected.optimizer / 2**30,
        "expected_activations_gib": expected.activations / 2**30,
        "expected_gib": expected.total / 2**30,
    }


def needed(job: Any) -> str:
    """The estimate as words."""
    columns = beforehand(job)
    parts = ", ".join(
        f"{name} {columns[f'expected_{name}_gib']:.3g}" for name in ("model", "gradients", "optimizer", "activations")
    )
    return f"expected to need {columns['expected_gib']:.3g} GiB ({parts})"


def hindrance(job: Any) -> str | None:
    """What needs a GPU, or a package that only some options want."""
    problem: TrainStep = job.problem
    if job.device == "cpu" and problem.compile:
        return "compile=true needs a CUDA GPU"
    if problem.attention == "flash_attention_2":
        if importlib.util.find_spec("flash_attn") is None:
            return "attention=flash_attention_2 needs flash_attn (not installed)"
        if job.device == "cpu":
            return "attention=flash_attention_2 needs a CUDA GPU"
    return None


WORKLOAD = Workload(
    name="train_step",
    summary="steps of training a transformer, tensor and data parallel",
    problem=TrainStep,
    headline=("model", "num_layers", "batch_size", "seq_length"),
    job_only_fields=(*ARCHITECTURE, "model_dir", "phase_steps", "profile", "log_interval"),
    scheduled=True,
    resolve=resolve,
    planned_columns=beforehand,
    expected_memory=needed,
    unsupported_reason=hindrance,
    document=document,
    columns={
        "model": "name of the model",
        "config_hash": "hash of what the config.json of the model's folder says; empty: a model of conf/model",
        "num_layers": "decoder layers that were trained",
        "batch_size": "sequences of a replica in one micro-batch",
        "seq_length": "tokens of a sequence",
        "accumulate": "micro-batches whose gradients add up to one update",
        "steps": "measured steps",
        "warmup_steps": "steps before them",
        "learning_rate": "AdamW's learning rate",
        "weight_decay": "AdamW's decay",
        "max_grad_norm": "norm to which gradients are scaled down",
        "autocast": "whether parameters are in fp32 and products in dtype",
        "seed": "seed of initial weights and tokens",
        "attention": "implementation of attention",
        "activation_checkpointing": "whether layers keep only their inputs",
        "compile": "whether through torch.compile",
        "zero_stage": "DeepSpeed's ZeRO stage (autotp)",
        "overlap": "whether all-reduces overlap with products (autotp)",
        "vocab_parallel": "whether head and loss work on the sharded vocabulary",
        "train_loss": "cross-entropy: torch (the variant's own) or tpbench",
        "parameters": "weights of the model as trained, by count",
        "tokens_per_s": "tokens of all replicas and micro-batches over the median step's time",
        "tokens_per_s_per_gpu": "tokens_per_s over the number of ranks",
        "samples_per_s": "sequences of all replicas and micro-batches over the median step's time",
        "samples_per_s_per_gpu": "samples_per_s over the number of ranks",
        "tflops_per_gpu": "flops over the median step's time, TFLOP/s",
        "mfu": "flops over the median step's time and peak_tflops: model FLOPs utilisation",
        "peak_tflops": "dense peak of the GPU's datasheet in dtype, TFLOP/s",
        "gemm_tflops": "rate of a large square product in this dtype on this machine, TFLOP/s",
        "forward_ms": "forward passes of a step timed apart, median over steps of the slowest rank, ms",
        "backward_ms": "backward passes likewise, ms",
        "optimizer_ms": "clipping and update likewise, ms",
        "exposed_share": "share of a step in which a rank communicates and computes nothing, the most of any rank",
        "steady_gib": "what the hungriest rank holds between steps, GiB",
        "expected_model_gib": "parameters of a rank, estimated beforehand, GiB",
        "expected_gradients_gib": "gradients of a rank, estimated beforehand, GiB",
        "expected_optimizer_gib": "what the optimizer holds on a rank, estimated beforehand, GiB",
        "expected_activations_gib": "activations of a rank as its backward pass begins, or fewer and AutoTP's buffers "
        "with the first gradient, estimated beforehand, GiB",
        "expected_gib": "their sum, but of gradients and activations the larger if these go as those come, GiB",
        "losses": "mean loss of every step, warm-up included",
        "grad_norms": "gradient norm before clipping of every step, warm-up included",
        "grad_norm": "gradient norm before clipping of the last step",
        "oracle": "what the row was compared with: one process over the first steps, or a forward pass of the first",
        "init_s": "making, sharding and wrapping the model, s",
    },
    options=(
        Option("attention"),
        Option("activation_checkpointing"),
        Option("compile"),
        Option("zero_stage"),
        Option("overlap"),
        Option("vocab_parallel"),
        Option("train_loss"),
        Option("phase_steps"),
        Option("profile"),
        Option("log_interval"),
    ),
    pivot=Pivot(
        rows=("model", "num_layers", "seq_length", "dp_size", "tp_size"),
        sections=("dtype",),
        implied=(*ARCHITECTURE, "model_dir"),
        trajectories={"losses": 1.0, "grad_norms": NORM_GROWTH},
        loss_tolerance={"bfloat16": 2e-2, "float16": 2e-2, "float32": 1e-3},
    ),
    percentages=("mfu", "exposed_share"),
    studies={
        "training": Study(
            "what does each implementation reach, and what does it need?",
            best_by=("tokens_per_s_per_gpu",),
            compared_across=("dp_size", "tp_size"),
            columns=(
                "tokens_per_s_per_gpu",
                "mfu",
                "exposed_share",
                "time_ms",
                "device_ms",
                "forward_ms",
                "backward_ms",
                "optimizer_ms",
                "peak_gib",
                "steady_gib",
                "expected_gib",
                "expected_model_gib",
                "expected_gradients_gib",
                "expected_optimizer_gib",
                "expected_activations_gib",
                "loss_value",
            ),
        )
    },
    metrics={
        "tokens_per_s": 1,
        "tokens_per_s_per_gpu": 1,
        "samples_per_s": 1,
        "mfu": 1,
        "tflops_per_gpu": 1,
        "exposed_share": -1,
        "steady_gib": -1,
        "forward_ms": -1,
        "backward_ms": -1,
        "optimizer_ms": -1,
        "init_s": 0,
        "expected_gib": 0,
    },
)
