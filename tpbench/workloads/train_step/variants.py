"""The variants of the train step. Every one honours every option but those that its decorator leaves out."""

from __future__ import annotations

from typing import Any

from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.workload import ALL, TENSOR_PARALLEL, WORKLOAD


def _uses_triton(problem: TrainStep) -> bool:
    return problem.train_loss == "tpbench"


def _no_tensor_parallelism(problem: TrainStep, tp_size: int) -> str | None:
    return f"it has no tensor parallelism: tp_size must be 1, got {tp_size}" if tp_size > 1 else None


def _nothing_for_one(problem: TrainStep, tp_size: int) -> str | None:
    """Options of what only several tensor-parallel ranks do."""
    if tp_size > 1:
        return None
    if not problem.vocab_parallel:
        return "with tp_size=1 the vocabulary is not sharded: vocab_parallel=false has no meaning"
    return (
        "with tp_size=1 there are no all-reduces to overlap: overlap=true has no meaning" if problem.overlap else None
    )


def _only_compiled_tensor_parallelism(problem: TrainStep, tp_size: int) -> str | None:
    if not problem.compile:
        return "it is a pass of torch.compile: compile=false is fsdp_dtensor"
    return "with tp_size=1 there is nothing to overlap: it would be fsdp" if tp_size == 1 else None


def _beyond_autotp(problem: TrainStep, tp_size: int) -> str | None:
    if problem.dtype == "float16":
        return "DeepSpeed's scaled autocast does not train under ZeRO as one process does: it has no dtype=float16"
    return _nothing_for_one(problem, tp_size)


@WORKLOAD.variant(
    "DeepSpeed AutoTP by the model's own plan, ZeRO 0 to 2 over replicas",
    options=ALL | TENSOR_PARALLEL | {"zero_stage", "overlap"},
    requires=("transformers", "deepspeed"),
    uses_triton=_uses_triton,
    unsupported_reason=_beyond_autotp,
)
def autotp(problem: TrainStep, place: Any) -> Any:
    from tpbench.workloads.train_step.autotp import prepare

    return prepare(problem, place)


@WORKLOAD.variant(
    "torch's own: FSDP2 over replicas, DTensor with sequence parallelism within them",
    options=ALL | TENSOR_PARALLEL,
    requires=("transformers",),
    uses_triton=_uses_triton,
    unsupported_reason=_nothing_for_one,
)
def fsdp_dtensor(problem: TrainStep, place: Any) -> Any:
    from tpbench.workloads.train_step import mesh

    return mesh.fsdp_dtensor(problem, place)


@WORKLOAD.variant(
    "fsdp_dtensor through torch.compile with async-TP: products in pieces beside their collectives",
    options=ALL | TENSOR_PARALLEL,
    requires=("transformers",),
    requires_cuda=True,
    uses_triton=_uses_triton,
    unsupported_reason=_only_compiled_tensor_parallelism,
)
def fsdp_dtensor_async(problem: TrainStep, place: Any) -> Any:
    from tpbench.workloads.train_step import mesh

    return mesh.fsdp_dtensor_async(problem, place)


@WORKLOAD.variant(
    "no tensor parallelism: FSDP2, parameters sharded over replicas",
    options=ALL,
    requires=("transformers",),
    uses_triton=_uses_triton,
    unsupported_reason=_no_tensor_parallelism,
)
def fsdp(problem: TrainStep, place: Any) -> Any:
    from tpbench.workloads.train_step import mesh

    return mesh.fsdp_dtensor(problem, place)


@WORKLOAD.variant(
    "no tensor parallelism: DistributedDataParallel, all of the model on every rank",
    options=ALL,
    requires=("transformers",),
    uses_triton=_uses_triton,
    unsupported_reason=_no_tensor_parallelism,
)
def ddp(problem: TrainStep, place: Any) -> Any:
    from tpbench.workloads.train_step import replicas

    return replicas.ddp(problem, place)
