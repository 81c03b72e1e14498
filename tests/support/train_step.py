"""Tiny models for the train step's tests, and the training of a variant beside that of one process."""

import copy
import functools
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support.ranks import Rank
from tpbench.measure.session import Context
from tpbench.packages import installed
from tpbench.workloads.train_step import WORKLOAD, TrainStep
from tpbench.workloads.train_step.model.inputs import micro_batch, replica_batches
from tpbench.workloads.train_step.training.trainer import Trainer

TINY = {
    "model": "tiny", "architecture": "qwen3", "hidden_size": 32, "ffn_size": 64, "layers": 2, "heads": 4,
    "kv_heads": 2, "head_dim": 8, "vocab": 96, "batch_size": 2, "seq_length": 16, "batches": None, "dtype": "float32",
    "learning_rate": 1e-2, "max_grad_norm": 0.5,
}  # fmt: skip

SHARDED = sorted(name for name, each in WORKLOAD.variants.items() if "vocab_parallel" in each.options)
"""The variants with tensor parallelism."""
ARCHITECTURES: list[dict[str, Any]] = [{"architecture": "qwen2"}]
"""Fields of tiny models beside Llama and Qwen3."""
CPU = torch.device("cpu")

_deepspeed_groups: dict[str, Any] = {}
_contexts: dict[tuple[int, int], Context] = {}


def tiny_problem(**fields: Any) -> TrainStep:
    """Return the problem of a small Qwen3 model, with some fields changed."""
    return TrainStep(**{**TINY, **fields})


def config_json(**changes: Any) -> str:
    """Return a config.json of a small Llama model, with some keys changed."""
    content = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "tie_word_embeddings": False,
        "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    return json.dumps(content | changes)


def folder_problem(folder: Path, **changes: Any) -> TrainStep:
    """Write `config_json(**changes)` without its null values into the folder and return the problem that uses it."""
    content = {name: value for name, value in json.loads(config_json(**changes)).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    return tiny_problem(model_dir=str(folder))


def single_context(device: torch.device = CPU) -> Context:
    """Return the context of a process without process groups."""
    return Context(0, 1, 0, 1, 0, 1, None, None, device)  # type: ignore[arg-type]


def mesh_context(here: Rank, tp_size: int) -> Context:
    """Return this rank's context in the row-major (dp, tp) mesh, as the worker makes it."""
    dp_size = here.world_size // tp_size
    if (here.world_size, tp_size) not in _contexts:
        dp_rank, tp_rank = divmod(here.rank, tp_size)
        replicas = [[dp * tp_size + tp for tp in range(tp_size)] for dp in range(dp_size)]
        tp_groups = [dist.new_group(ranks) for ranks in replicas]
        dp_groups = [dist.new_group(list(ranks)) for ranks in zip(*replicas, strict=True)]
        _contexts[here.world_size, tp_size] = Context(
            here.rank, here.world_size, tp_rank, tp_size, dp_rank, dp_size, tp_groups[dp_rank], dp_groups[tp_rank],
            here.device,
        )  # fmt: skip
    return _contexts[here.world_size, tp_size]


@dataclass
class TrainedModel:
    """Results of a training run, with whole tensors on every rank."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    """Gradients of the last step before clipping, by the plain model's names."""
    weights: dict[str, Tensor]
    """Weights after the last step."""


def train(trainer: Trainer, problem: TrainStep, context: Context, steps: int, batches: Any = None) -> TrainedModel:
    """Train some steps. A loss is the mean over replicas."""
    result = TrainedModel([], [], {}, {})
    for step in range(steps):
        loss = trainer.accumulate(batches(step) if batches else batches_here(problem, context, step))
        if context.dp_size > 1:
            dist.all_reduce(loss, group=context.dp_group)
        result.losses.append(float(loss) / context.dp_size)
        if step == steps - 1:
            result.gradients = {
                name: whole(gradient(parameter), name, problem, context) for name, parameter in named(trainer.model)
            }
        result.norms.append(float(trainer.update()))
    result.weights = {
        name: whole(parameter.detach(), name, problem, context) for name, parameter in named(trainer.model)
    }
    return result


def batches_here(problem: TrainStep, context: Context, step: int) -> Any:
    return replica_batches(problem, step, context.dp_rank, context.dp_size, context.device)


def train_alone(problem: TrainStep, context: Context, steps: int) -> TrainedModel:
    """Train by one process with the micro-batches of all replicas."""
    shared = {
        "train_loss": "torch", "zero_stage": 1, "overlap": False, "vocab_parallel": True,
        "activation_checkpointing": False, "compile": False,
    }  # fmt: skip
    return _trained_alone(replace(problem, **shared), context.dp_size, context.device, steps)


@functools.cache
def _trained_alone(problem: TrainStep, dp_size: int, device: torch.device, steps: int) -> TrainedModel:
    """Train once for all variants and options that compute the same."""
    from tpbench.workloads.train_step.oracle import single_process_trainer

    context = single_context(device)

    def batches(step: int) -> Any:
        return [
            micro_batch(problem, step, micro, replica, dp_size, device)
            for micro in range(problem.accumulate)
            for replica in range(dp_size)
        ]

    return train(single_process_trainer(problem, context), problem, context, steps, batches)


def prepared(name: str, problem: TrainStep, context: Context) -> Trainer:
    """Return the trainer of a variant."""
    if name == "autotp":
        reset_deepspeed_groups(context)
    trainer: Trainer = WORKLOAD.variants[name].prepare(problem, context)
    return trainer


def reset_deepspeed_groups(here: Context | Rank) -> None:
    """Undo DeepSpeed's choice of a mesh. DeepSpeed allows one mesh per process, but these tests use several."""
    if not installed("deepspeed"):
        return
    os.environ["LOCAL_RANK"] = str(here.rank)
    from deepspeed.utils import groups

    if not _deepspeed_groups:
        _deepspeed_groups.update({name: each for name, each in vars(groups).items() if name.isupper() or name == "mpu"})
    vars(groups).update(copy.deepcopy(_deepspeed_groups))


def named(model: Any) -> list[tuple[str, Tensor]]:
    """Return the parameters with the plain model's names."""
    return [(name.removeprefix("module."), parameter) for name, parameter in model.named_parameters()]


def gradient(parameter: Tensor) -> Tensor:
    """Return a gradient from where the variant keeps it. ZeRO keeps gradients in its own partitions."""
    if hasattr(parameter, "_hp_mapping") or getattr(parameter, "_z3_optimizer", None) is not None:
        from deepspeed.utils import safe_get_full_grad

        full: Tensor = safe_get_full_grad(parameter)
        return full
    assert parameter.grad is not None
    return parameter.grad


@functools.cache
def shapes(problem: TrainStep) -> dict[str, torch.Size]:
    """Return the shapes of the plain model's parameters."""
    from tpbench.workloads.train_step.model.models import build

    return {name: parameter.shape for name, parameter in build(problem).named_parameters()}


def whole(value: Tensor, name: str, problem: TrainStep, context: Context) -> Tensor:
    """Return all shards of a tensor in fp32 on the CPU. A pickled GPU shard would return to its own rank's GPU."""
    if isinstance(value, DTensor):
        return value.full_tensor().float().cpu().clone()
    value, right = value.detach().float().cpu().clone(), shapes(problem)[name]
    for dimension, (shard_size, whole_size) in enumerate(zip(value.shape, right, strict=True)):
        if shard_size != whole_size:
            parts: list[Any] = [None] * context.tp_size  # their sizes may differ
            dist.all_gather_object(parts, value, group=context.tp_group)
            value = torch.cat(parts, dimension)
    assert value.shape == right, (name, value.shape, right)
    return value


def largest_error(actual: dict[str, Tensor], right: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative error of a tensor, and the tensor's name."""
    assert set(actual) == set(right), set(actual) ^ set(right)
    return max(
        (float((actual[name] - tensor).norm() / tensor.norm().clamp(min=1e-6)), name) for name, tensor in right.items()
    )


def compare(here: Rank, name: str, tp_size: int, fields: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """Return the relative errors of a variant against one process, over some steps."""
    problem, context = tiny_problem(**fields), mesh_context(here, tp_size)
    right = train_alone(problem, context, steps)
    actual = train(prepared(name, problem, context), problem, context, steps)
    return {
        "loss": max(abs(a / b - 1) for a, b in zip(actual.losses, right.losses, strict=True)),
        "norm": max(abs(a / b - 1) for a, b in zip(actual.norms, right.norms, strict=True)),
        "gradient": largest_error(actual.gradients, right.gradients),
        "weight": largest_error(actual.weights, right.weights),
        "losses": right.losses,
        "norms": right.norms,
    }


def check_errors(errors: dict[str, Any]) -> None:
    """Assert that the errors of `compare` are within the tolerances of fp32. Known errors of such code are 50%."""
    assert errors["loss"] < 1e-5, errors
    assert errors["norm"] < 2e-4, errors
    assert errors["gradient"][0] < 3e-3, errors
    assert errors["weight"][0] < 3e-3, errors
