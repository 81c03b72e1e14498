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
        (embedding_grad.ExchangeContext, ["inputs", "comm", "stopwatch"]),
        (embedding_grad.Phase, ["name", "run", "after", "on_host"]),
        (tp_block.BlockContext, ["inputs", "stopwatch"]),
    ],
)
def test_fields(cls: Any, fields: list[str]) -> None:
    """A type may get more fields, after these and with defaults."""
    present = dataclasses.fields(cls)
    assert [each.name for each in present[: len(fields)]] == fields
    assert all(each.default is not dataclasses.MISSING for each in present[len(fields) :])


def test_a_step_needs_only_its_function() -> None:
    parameters = list(inspect.signature(api.Step.__origin__).parameters.values())  # type: ignore[attr-defined]
    assert [each.name for each in parameters[:4]] == ["run", "bytes_communicated", "columns", "restore"]
    assert all(each.default is not inspect.Parameter.empty for each in parameters[1:])


def test_arguments_of_the_decorator() -> None:
    assert list(inspect.signature(api.variant).parameters) == [
        "summary", "workload", "options", "requires", "requires_cuda", "cpu_only_reason", "no_graph_reason",
        "uses_triton", "unsupported_reason",
    ]  # fmt: skip
