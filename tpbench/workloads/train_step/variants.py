"""The variants of the train step: the options of each, how it distributes the model, and what it cannot train."""

import math
from collections.abc import Iterable
from typing import Any

from tpbench import packages
from tpbench.settings import field_traits
from tpbench.workloads.train_step.estimates import Distribution
from tpbench.workloads.train_step.model.resolve import KNOWN_ARCHITECTURES, ask
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.workload import WORKLOAD

ALWAYS = field_traits(TrainStep, "option").keys() - {"compile", "vocab_parallel", "zero_stage", "overlap"}
"""Options that every variant supports."""


def no_graph_reason(problem: TrainStep) -> str:
    if not problem.warmup_steps:
        return "the optimizer makes its states in the first step: warmup_steps must be at least 1"
    if problem.attention == "flash_attention_2":
        return "transformers looks for packed sequences on the host before flash_attention_2"
    return ""


def not_alone(problem: TrainStep, tp_size: int) -> str | None:
    return f"it has no tensor parallelism: tp_size must be 1, got {tp_size}" if tp_size > 1 else None


def not_shared(problem: TrainStep, tp_size: int, tokens: int = 0) -> str | None:
    """Return why tensor-parallel ranks cannot share the model, or so many tokens, or None."""
    if tp_size == 1:
        return None
    if tokens % tp_size:
        return f"the ranks share {tokens} tokens, which tp_size={tp_size} must divide"
    common = math.gcd(problem.heads, problem.kv_heads, problem.ffn_size)
    if common % tp_size:
        valid = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
        return (
            f"tp_size={tp_size} must divide heads={problem.heads}, kv_heads={problem.kv_heads} and "
            f"ffn_size={problem.ffn_size} (valid: {valid})"
        )
    if problem.architecture in KNOWN_ARCHITECTURES or not packages.installed("transformers"):
        return None
    reason: str | None = ask("unsupported_model", problem)
    return reason


def not_by_deepspeed(problem: TrainStep, tp_size: int) -> str | None:
    if problem.dtype == "float16" and not problem.zero_stage:
        return "DeepSpeed keeps fp32 parameters beside float16 only with zero_stage 1 or 2"
    return not_shared(problem, tp_size)


def not_by_dtensor(problem: TrainStep, tp_size: int) -> str | None:
    if tp_size == 1:
        return "with tp_size=1 there is nothing to parallelize: it would be fsdp"
    return not_shared(problem, tp_size, problem.seq_length)


def _register(name: str, function: str, summary: str, options: Iterable[str], **traits: Any) -> None:
    WORKLOAD.variant_of(
        name,
        f"training.{function}",
        summary,
        options=(*ALWAYS, *options),
        uses_triton=lambda problem: problem.train_loss not in ("torch", "compiled"),
        **{"requires": ("transformers",), "no_graph_reason": no_graph_reason, **traits},
    )


_register(
    "autotp",
    "autotp.DeepSpeedTrainer",
    "DeepSpeed AutoTP by the model's own plan, ZeRO 0 to 2 over replicas",
    ("compile", "vocab_parallel", "zero_stage", "overlap"),
    requires=("transformers", "deepspeed"),
    no_graph_reason="DeepSpeed reads the gradient norm on the host in each update",
    unsupported_reason=not_by_deepspeed,
    process_settings="DeepSpeed's own process groups",
    distribution=Distribution("zero", sequence_parallel=False),
)
_register(
    "fsdp_dtensor",
    "fsdp.fsdp_dtensor",
    "FSDP2 over replicas, tpbench's sharded layers with sequence parallelism within them",
    ("compile", "vocab_parallel"),
    unsupported_reason=lambda problem, tp_size: not_shared(problem, tp_size, problem.tokens),
    distribution=Distribution(dtensor_logits=True),
)
_register(
    "dtensor_tp",
    "fsdp.dtensor_tp",
    "torch's own: FSDP2 over replicas, parallelize_module with sequence parallelism within them",
    # torch 2.13 fails to keep the mesh of DTensors in compiled layers that are checkpointed.
    ("vocab_parallel",),
    unsupported_reason=not_by_dtensor,
    distribution=Distribution(dtensor_logits=True),
)
_register(
    "fsdp",
    "fsdp.fsdp_dtensor",
    "no tensor parallelism: FSDP2, parameters sharded over replicas",
    ("compile",),
    unsupported_reason=not_alone,
)
_register(
    "ddp",
    "fsdp.ddp",
    "no tensor parallelism: DistributedDataParallel, all of the model on every rank",
    ("compile",),
    no_graph_reason="DistributedDataParallel times its first ten steps on the host: fsdp has graphs",
    unsupported_reason=not_alone,
    distribution=Distribution("ddp"),
)
