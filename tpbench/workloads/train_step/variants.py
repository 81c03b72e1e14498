"""The variants of the train step, with the options that each of them supports."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tpbench import packages
from tpbench.workloads.train_step.estimates import GATHERED_ATTENTION
from tpbench.workloads.train_step.model.resolve import KNOWN_ARCHITECTURES
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.workload import ALL, TENSOR_PARALLEL, WORKLOAD

DDP_WARMUP_STEPS = 11
"""Steps before DistributedDataParallel can be captured: it times its first ten by events (torch's notes on CUDA)."""


def _uses_triton(problem: TrainStep) -> bool:
    return problem.train_loss != "torch"


def _unsupported_without_tensor_parallelism(problem: TrainStep, tp_size: int) -> str | None:
    return f"it has no tensor parallelism: tp_size must be 1, got {tp_size}" if tp_size > 1 else None


def _unsupported_by(variant: str) -> Callable[[TrainStep, int], str | None]:
    """Return the function that returns why a variant with tensor parallelism cannot train a problem, or None."""

    def reason(problem: TrainStep, tp_size: int) -> str | None:
        if variant == "fsdp_dtensor_async" and not problem.compile:
            return "it is a pass of torch.compile: compile=false is fsdp_dtensor"
        if variant == "autotp" and problem.dtype == "float16" and not problem.zero_stage:
            return "without ZeRO, DeepSpeed does not scale the loss of dtype=float16: zero_stage must be 1 or 2"
        if tp_size == 1:
            return _unsupported_by_one_rank(variant, problem)
        if variant == "fsdp_dtensor_async" and problem.tokens % tp_size:
            return (
                f"tp_size={tp_size} does not divide batch_size={problem.batch_size} times "
                f"seq_length={problem.seq_length}: padding stands between products and their collectives, so none "
                "would overlap, as in fsdp_dtensor"
            )
        if problem.train_loss == "tpbench_linear" and not problem.vocab_parallel:
            return (
                "train_loss=tpbench_linear makes no whole logits, so there are none to gather: vocab_parallel must be "
                "true"
            )
        return _unsupported_sizes(problem, variant, tp_size) or _unsupported_plan(problem, variant)

    return reason


def _unsupported_by_one_rank(variant: str, problem: TrainStep) -> str | None:
    """Return why options that concern several tensor-parallel ranks have no meaning with one rank, or None."""
    if variant in ("dtensor_tp", "fsdp_dtensor_async"):
        return "with tp_size=1 there is nothing to parallelize: it would be fsdp"
    if not problem.vocab_parallel:
        return "with tp_size=1 the vocabulary is not sharded: vocab_parallel=false has no meaning"
    if problem.overlap:
        return "with tp_size=1 there are no all-reduces to overlap: overlap=true has no meaning"
    return None


def _unsupported_sizes(problem: TrainStep, variant: str, tp_size: int) -> str | None:
    """Return why the ranks cannot share the heads and the columns of feed-forward layers, or None if they can."""
    # Where ranks gather the columns of all heads, a rank's columns may end within a head, but not in AutoTP.
    of_columns = problem.architecture in GATHERED_ATTENTION and variant != "autotp"
    unit = problem.head_dim if of_columns else 1
    common = math.gcd(unit * problem.heads, unit * problem.kv_heads, problem.ffn_size)
    if common % tp_size == 0:
        return None
    return (
        f"tp_size={tp_size} must divide heads={problem.heads}, kv_heads={problem.kv_heads} and "
        f"ffn_size={problem.ffn_size} (valid: {', '.join(str(n) for n in range(1, common + 1) if common % n == 0)})"
    )


def _unsupported_plan(problem: TrainStep, variant: str) -> str | None:
    """Return why the variant cannot shard the model by its plan, or None if it can.

    Models whose plans are known are not made for this check. Without the transformers package it is left out.
    """
    if problem.architecture in KNOWN_ARCHITECTURES or not packages.installed("transformers"):
        return None
    from tpbench.workloads.train_step.sharding.plan import unsupported_model

    return unsupported_model(problem, variant)


def _no_graph(problem: TrainStep) -> str:
    """Return why a step cannot be captured in a CUDA graph, or nothing."""
    if not problem.warmup_steps:
        return "the optimizer makes its states in the first step: warmup_steps must be at least 1"
    if problem.attention == "flash_attention_2":
        return "transformers looks for packed sequences on the host before flash_attention_2"
    return ""


def _no_graph_of_ddp(problem: TrainStep) -> str:
    if problem.warmup_steps < DDP_WARMUP_STEPS:
        return (
            "DistributedDataParallel times its first ten steps on the host: "
            f"warmup_steps must be at least {DDP_WARMUP_STEPS}, got {problem.warmup_steps}"
        )
    return _no_graph(problem)


def _no_graph_of_autotp(problem: TrainStep) -> str:
    if problem.zero_stage:
        return f"ZeRO's update reads the gradient norm on the host: zero_stage must be 0, got {problem.zero_stage}"
    if problem.train_loss == "torch" and problem.vocab_parallel:
        return "DeepSpeed's loss of a sharded vocabulary checks the labels on the host: train_loss must be tpbench"
    return _no_graph(problem)


@WORKLOAD.variant(
    "DeepSpeed AutoTP by the model's own plan, ZeRO 0 to 2 over replicas",
    options=ALL | TENSOR_PARALLEL | {"zero_stage", "overlap"},
    requires=("transformers", "deepspeed"),
    no_graph_reason=_no_graph_of_autotp,
    uses_triton=_uses_triton,
    unsupported_reason=_unsupported_by("autotp"),
)
def autotp(problem: TrainStep, context: Any) -> Any:
    from tpbench.workloads.train_step.training.autotp import DeepSpeedTrainer

    return DeepSpeedTrainer(problem, context)


@WORKLOAD.variant(
    "FSDP2 over replicas, tpbench's sharded layers with sequence parallelism within them",
    options=ALL | TENSOR_PARALLEL,
    requires=("transformers",),
    no_graph_reason=_no_graph,
    uses_triton=_uses_triton,
    unsupported_reason=_unsupported_by("fsdp_dtensor"),
)
def fsdp_dtensor(problem: TrainStep, context: Any) -> Any:
    from tpbench.workloads.train_step.training import fsdp

    return fsdp.fsdp_dtensor(problem, context)


@WORKLOAD.variant(
    "torch's own: FSDP2 over replicas, parallelize_module with sequence parallelism within them",
    options=ALL | TENSOR_PARALLEL,
    requires=("transformers",),
    no_graph_reason=_no_graph,
    uses_triton=_uses_triton,
    unsupported_reason=_unsupported_by("dtensor_tp"),
)
def dtensor_tp(problem: TrainStep, context: Any) -> Any:
    from tpbench.workloads.train_step.training import fsdp

    return fsdp.dtensor_tp(problem, context)


@WORKLOAD.variant(
    "fsdp_dtensor through torch.compile with async-TP: products in pieces beside their collectives",
    options=ALL | TENSOR_PARALLEL,
    requires=("transformers",),
    no_graph_reason=_no_graph,
    requires_cuda=True,
    uses_triton=_uses_triton,
    unsupported_reason=_unsupported_by("fsdp_dtensor_async"),
)
def fsdp_dtensor_async(problem: TrainStep, context: Any) -> Any:
    from tpbench.workloads.train_step.training import fsdp

    return fsdp.fsdp_dtensor_async(problem, context)


@WORKLOAD.variant(
    "no tensor parallelism: FSDP2, parameters sharded over replicas",
    options=ALL,
    requires=("transformers",),
    no_graph_reason=_no_graph,
    uses_triton=_uses_triton,
    unsupported_reason=_unsupported_without_tensor_parallelism,
)
def fsdp(problem: TrainStep, context: Any) -> Any:
    from tpbench.workloads.train_step.training import fsdp as implementation

    return implementation.fsdp_dtensor(problem, context)


@WORKLOAD.variant(
    "no tensor parallelism: DistributedDataParallel, all of the model on every rank",
    options=ALL,
    requires=("transformers",),
    no_graph_reason=_no_graph_of_ddp,
    uses_triton=_uses_triton,
    unsupported_reason=_unsupported_without_tensor_parallelism,
)
def ddp(problem: TrainStep, context: Any) -> Any:
    from tpbench.workloads.train_step.training import fsdp

    return fsdp.ddp(problem, context)
