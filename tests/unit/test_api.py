"""The interface for variants from outside is frozen: names, fields and defaults stay valid."""

from __future__ import annotations

import dataclasses
import inspect
from types import ModuleType
from typing import Any

import pytest

from tpbench import api
from tpbench.api import embedding_grad, entropy_loss, linear_loss, tp_block, train_step

NAMES = {
    api: {"IGNORED", "EntropyLoss", "Output", "Shard", "Step", "variant"},
    entropy_loss: {"IGNORED", "EntropyLoss", "Output", "Shard", "Step", "variant"},
    linear_loss: {"IGNORED", "LinearLoss", "Output", "Shard", "Step", "variant"},
    embedding_grad: {"EmbeddingGrad", "Exchange", "ExchangeContext", "Phase", "variant"},
    tp_block: {
        "BlockContext", "Pending", "PlainSchedule", "PreparedBlock", "Schedule", "TpBlock", "prepare", "variant",
    },
    train_step: {"Context", "TorchTrainer", "TrainStep", "Trainer", "models", "torch_loss", "variant"},
}  # fmt: skip


@pytest.mark.parametrize("module", NAMES, ids=lambda module: module.__name__)
def test_names(module: ModuleType) -> None:
    exported = {name for name, value in vars(module).items() if not name.startswith("_")}
    submodules = {name for name, value in vars(module).items() if inspect.ismodule(value) and module is api}
    assert exported - submodules == NAMES[module]


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (entropy_loss.Output, ["loss", "row_loss", "grad", "grad_factor"]),
        (entropy_loss.Shard, ["logits", "target", "vocab_start", "vocab_size", "group", "tp_rank", "tp_size"]),
        (linear_loss.Output, ["loss", "row_loss", "entropy", "grad_hidden", "grad_weight"]),
        (
            linear_loss.Shard,
            [
                "hidden",
                "weight",
                "labels",
                "teacher",
                "vocab_start",
                "vocab_size",
                "tokens",
                "group",
                "tp_rank",
                "tp_size",
                "upstream",
            ],
        ),
        (
            entropy_loss.EntropyLoss,
            [
                "tokens", "vocab", "loss", "dtype", "seed", "logits_scale", "temperature", "ignored", "block_cap",
                "exchange", "algorithm", "compile", "compute_dtype",
            ],
        ),
        (
            linear_loss.LinearLoss,
            [
                "tokens", "hidden", "vocab", "loss", "mode", "dtype", "seed", "temperature", "ignored", "entropy",
                "sequence_parallel", "main_grad", "logits_gib", "exchange",
            ],
        ),
        (
            embedding_grad.EmbeddingGrad,
            [
                "table_rows", "width", "tokens", "accumulate", "distribution", "duplicates", "dtype", "seed",
                "overlap_ms", "transfers", "index", "other_mib", "other_count", "transfer_order", "merge", "search",
                "pinned",
            ],
        ),
        (
            tp_block.TpBlock,
            [
                "tokens", "hidden", "ffn", "heads", "kv_heads", "head_dim", "part", "dtype", "seed", "save_gathered",
                "signals", "try_graphs", "profile", "rotary", "layers", "steps", "warmup_steps", "learning_rate",
            ],
        ),
        (
            tp_block.PreparedBlock,
            [
                "module", "x", "grad", "without_communication", "plan", "size", "run", "run_without_communication",
                "columns",
            ],
        ),
        (
            train_step.Context,
            [
                "rank", "world_size", "tp_rank", "tp_size", "dp_rank", "dp_size", "tp_group", "dp_group", "device",
                "graph", "folder", "say", "process_stays",
            ],
        ),
        (embedding_grad.ExchangeContext, ["inputs", "comm", "stopwatch"]),
        (embedding_grad.Phase, ["name", "run", "after", "on_host"]),
        (tp_block.BlockContext, ["inputs", "stopwatch"]),
    ],
)  # fmt: skip
def test_fields(cls: Any, fields: list[str]) -> None:
    """A type may get more fields, after these and with defaults."""
    present = dataclasses.fields(cls)
    assert [each.name for each in present[: len(fields)]] == fields
    assert all(each.default is not dataclasses.MISSING for each in present[len(fields) :])


def test_fields_of_a_train_step() -> None:
    """A problem is made by name, so that a new field may stand between others."""
    fields = {each.name for each in dataclasses.fields(train_step.TrainStep)}
    assert fields >= {
        "model", "architecture", "hidden_size", "ffn_size", "layers", "heads", "kv_heads", "head_dim", "vocab", "tied",
        "num_layers", "batch_size", "seq_length", "accumulate", "batches", "steps", "warmup_steps", "learning_rate",
        "weight_decay", "max_grad_norm", "dtype", "autocast", "seed", "optimizer", "attention",
        "activation_checkpointing", "compile", "zero_stage", "overlap", "vocab_parallel", "train_loss",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (entropy_loss.EntropyLoss, {"from_labels"}),
        (entropy_loss.Shard, {"tokens", "device"}),
        (linear_loss.LinearLoss, {"from_labels", "trains"}),
        (embedding_grad.Exchange, {"overwrites", "result", "release", "expected_bytes", "columns"}),
        (tp_block.Schedule, {"gather_matmul", "matmul_scatter"}),
        (train_step.Trainer, {"accumulate", "update"}),
        (train_step.TorchTrainer, {"accumulate", "update"}),
    ],
)
def test_properties_and_methods(cls: Any, names: set[str]) -> None:
    assert names <= set(dir(cls))


def test_arguments_of_trainers() -> None:
    assert list(inspect.signature(train_step.TorchTrainer).parameters)[:4] == ["problem", "model", "context", "loss"]
    assert list(inspect.signature(train_step.Trainer.accumulate).parameters)[1:] == ["batches", "mark"]
    assert list(inspect.signature(train_step.Trainer.update).parameters)[1:] == ["mark"]


def test_a_step_needs_only_its_function() -> None:
    parameters = list(inspect.signature(api.Step.__origin__).parameters.values())  # type: ignore[attr-defined]
    assert [each.name for each in parameters[:4]] == ["run", "bytes_communicated", "columns", "restore"]
    assert all(each.default is not inspect.Parameter.empty for each in parameters[1:])


def test_arguments_of_the_decorator() -> None:
    assert list(inspect.signature(api.variant).parameters) == [
        "summary", "workload", "options", "requires", "requires_cuda", "cpu_only_reason", "no_graph_reason",
        "uses_triton", "unsupported_reason",
    ]  # fmt: skip
