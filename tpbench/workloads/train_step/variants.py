"""The variants of the train step, with the options that each of them supports."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from tpbench import packages
from tpbench.workloads.train_step.model.resolve import KNOWN_ARCHITECTURES
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.workload import ALL, AUTOTP, TENSOR_PARALLEL, WORKLOAD

DDP_WARMUP_STEPS = 11
"""Steps before DistributedDataParallel can be captured: it times its first ten by events (torch's notes on CUDA)."""


def _unsupported_without_tensor_parallelism(problem: TrainStep, tp_size: int) -> str | None:
    return f"it has no tensor parallelism: tp_size must be 1, got {tp_size}" if tp_size > 1 else None


def _unsupported_by(variant: str, problem: TrainStep, tp_size: int) -> str | None:
    """Return why a variant with tensor parallelism cannot train a problem, or None."""
    if variant == "fsdp_dtensor_async" and not problem.compile:
        return "it is a pass of torch.compile: compile=false is fsdp_dtensor"
    if variant == "autotp" and problem.dtype == "float16" and not problem.zero_stage:
        return "without ZeRO, DeepSpeed does not scale the loss of dtype=float16: zero_stage must be 1 or 2"
    if tp_size == 1:
        if variant in ("dtensor_tp", "fsdp_dtensor_async"):
            return "with tp_size=1 there is nothing to parallelize: it would be fsdp"
        return None
    tokens = problem.seq_length if variant == "dtensor_tp" else problem.tokens
    if variant != "autotp" and tokens % tp_size:
        sizes = f"seq_length={problem.seq_length}" if variant == "dtensor_tp" else f"batch_size x seq_length={tokens}"
        return f"the ranks share the tokens: tp_size={tp_size} must divide {sizes}"
    if problem.train_loss == "tpbench_linear" and variant == "dtensor_tp":
        return "its head returns logits of torch's DTensors: fsdp_dtensor has train_loss=tpbench_linear"
    if problem.train_loss == "tpbench_linear" and not problem.vocab_parallel:
        return "train_loss=tpbench_linear makes no whole logits that could be gathered: vocab_parallel must be true"
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

    return unsupported_model(problem)


def _no_graph(variant: str, problem: TrainStep) -> str:
    """Return why a step cannot be captured in a CUDA graph, or nothing."""
    if variant == "ddp" and problem.warmup_steps < DDP_WARMUP_STEPS:
        return (
            "DistributedDataParallel times its first ten steps on the host: "
            f"warmup_steps must be at least {DDP_WARMUP_STEPS}, got {problem.warmup_steps}"
        )
    if variant == "autotp" and problem.zero_stage:
        return f"ZeRO's update reads the gradient norm on the host: zero_stage must be 0, got {problem.zero_stage}"
    if variant == "autotp" and problem.train_loss == "torch" and problem.vocab_parallel:
        return "DeepSpeed's loss of a sharded vocabulary checks the labels on the host: train_loss must be tpbench"
    if not problem.warmup_steps:
        return "the optimizer makes its states in the first step: warmup_steps must be at least 1"
    if problem.attention == "flash_attention_2":
        return "transformers looks for packed sequences on the host before flash_attention_2"
    return ""


def _variant(
    name: str, summary: str, options: frozenset[str] = TENSOR_PARALLEL, **traits: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator that registers the variant of that name. `options`: those besides `ALL`."""
    unsupported = partial(_unsupported_by, name) if options else _unsupported_without_tensor_parallelism
    defaults: dict[str, Any] = {
        "requires": ("transformers",),
        "no_graph_reason": partial(_no_graph, name),
        "uses_triton": lambda problem: problem.train_loss != "torch",
        "unsupported_reason": unsupported,
    }
    return WORKLOAD.variant(summary, options=ALL | options, **defaults | traits)


@_variant(
    "autotp", "DeepSpeed AutoTP by the model's own plan, ZeRO 0 to 2 over replicas",
    TENSOR_PARALLEL | AUTOTP, requires=("transformers", "deepspeed"),
)  # fmt: skip
def autotp(problem: TrainStep, context: Any) -> Any:
    from tpbench.workloads.train_step.training.autotp import DeepSpeedTrainer

    return DeepSpeedTrainer(problem, context)


@_variant("fsdp_dtensor", "FSDP2 over replicas, tpbench's sharded layers with sequence parallelism within them")
def fsdp_dtensor(problem: TrainStep, context: Any) -> Any:
    from tpbench.workloads.train_step.training import fsdp

    return fsdp.fsdp_dtensor(problem, context)


@_variant("dtensor_tp", "torch's own: FSDP2 over replicas, parallelize_module with sequence parallelism within them")
def dtensor_tp(problem: TrainStep, context: Any) -> Any:
    from tpbench.workloads.train_step.sharding import by_dtensor
    from tpbench.workloads.train_step.training import fsdp

    return fsdp.fsdp_dtensor(problem, context, by_dtensor)


@_variant(
    "fsdp_dtensor_async",
    "fsdp_dtensor through torch.compile with async-TP: products in pieces beside their collectives",
    requires_cuda=True,
)
def fsdp_dtensor_async(problem: TrainStep, context: Any) -> Any:
    from tpbench.workloads.train_step.training import fsdp

    return fsdp.fsdp_dtensor_async(problem, context)


@_variant("fsdp", "no tensor parallelism: FSDP2, parameters sharded over replicas", frozenset())
def fsdp(problem: TrainStep, context: Any) -> Any:
    from tpbench.workloads.train_step.training import fsdp as implementation

    return implementation.fsdp_dtensor(problem, context)


@_variant("ddp", "no tensor parallelism: DistributedDataParallel, all of the model on every rank", frozenset())
def ddp(problem: TrainStep, context: Any) -> Any:
    from tpbench.workloads.train_step.training import fsdp

    return fsdp.ddp(problem, context)
