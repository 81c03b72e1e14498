"""The interface for variants from outside is frozen: names, fields and defaults stay valid."""

import dataclasses
import inspect
from types import ModuleType
from typing import Any

import pytest

from tpbench import api
from tpbench.api import embedding_grad, entropy_loss, linear_loss, tp_block, train_step

NAMES = {
    api: "Costs IGNORED EntropyLoss IterationSchedule Output Rank Session Shard Step Verdict Workload setting variant",
    entropy_loss: "IGNORED EntropyLoss Output Shard Step variant",
    linear_loss: "IGNORED LinearLoss Output Shard Step variant",
    embedding_grad: "EmbeddingGrad Exchange ExchangeContext Phase variant",
    tp_block: "Attention BlockContext ColumnParallelLinear Mlp Pending PlainSchedule PreparedBlock RMSNorm "
    "RowParallelLinear Schedule TpBlock TransformerBlock prepare variant",
    train_step: "Context TorchTrainer TrainStep Trainer models torch_loss variant",
}
FIELDS: list[tuple[Any, str]] = [
    (entropy_loss.Output, "loss row_loss grad grad_factor"),
    (linear_loss.Output, "loss row_loss entropy grad_hidden grad_weight"),
    (
        embedding_grad.EmbeddingGrad,
        "table_rows width tokens accumulate distribution dtype seed overlap_ms index other_mib "
        "other_count transfer_order search",
    ),
    (
        tp_block.TpBlock,
        "tokens hidden ffn heads kv_heads head_dim part dtype seed save_gathered signals rotary "
        "layers steps warmup_steps learning_rate",
    ),
    (tp_block.PreparedBlock, "module x grad size run schedule without_communication columns"),
    (
        train_step.Context,
        "rank world_size tp_rank tp_size dp_rank dp_size tp_group dp_group device graph folder say process_stays",
    ),
    (api.Costs, "bytes_moved bytes_communicated flops"),
    (api.IterationSchedule, "warmup_iterations iterations"),
    (api.Verdict, "columns wrong"),
    (embedding_grad.ExchangeContext, "inputs comm stopwatch"),
    (embedding_grad.Phase, "name run after on_host"),
    (tp_block.BlockContext, "inputs stopwatch"),
]
VARIANT = (
    "summary workload options requires requires_cuda cpu_only_reason no_graph_reason process_settings uses_triton "
    "unsupported_reason"
)
BY_NAME: list[tuple[Any, str]] = [
    (entropy_loss.Shard, "logits target tokens device vocab_start vocab_size group tp_rank tp_size"),
    (linear_loss.Shard, "hidden weight labels teacher vocab_start vocab_size tokens group tp_rank tp_size upstream"),
    (
        entropy_loss.EntropyLoss,
        "tokens vocab loss dtype seed logits_scale temperature ignored block_cap exchange algorithm compile "
        "compute_dtype",
    ),
    (
        linear_loss.LinearLoss,
        "tokens hidden vocab loss mode dtype seed temperature ignored entropy sequence_parallel main_grad logits_gib "
        "exchange",
    ),
    (
        train_step.TrainStep,
        "model architecture hidden_size ffn_size layers heads kv_heads head_dim vocab tied num_layers batch_size "
        "seq_length accumulate batches steps warmup_steps learning_rate weight_decay max_grad_norm dtype autocast seed "
        "attention activation_checkpointing compile zero_stage overlap vocab_parallel train_loss",
    ),
]
"""Types that tpbench makes: users read their fields by name."""


@pytest.mark.parametrize("module", NAMES, ids=lambda module: module.__name__)
def test_names(module: ModuleType) -> None:
    exported = {name for name, value in vars(module).items() if not name.startswith("_")}
    submodules = {name for name, value in vars(module).items() if inspect.ismodule(value) and module is api}
    assert exported - submodules == set(NAMES[module].split())


def test_fields() -> None:
    """A type that users make may get more fields, after these and with defaults."""
    for cls, names in FIELDS:
        fields, present = names.split(), dataclasses.fields(cls)
        assert [field.name for field in present[: len(fields)]] == fields
        missing = dataclasses.MISSING
        assert all((field.default, field.default_factory) != (missing, missing) for field in present[len(fields) :])
    for cls, names in BY_NAME:
        assert {field.name for field in dataclasses.fields(cls)} | {*dir(cls)} >= set(names.split())


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (entropy_loss.EntropyLoss, {"from_labels"}),
        (linear_loss.LinearLoss, {"from_labels", "trains"}),
        (embedding_grad.Exchange, {"overwrites", "result", "release", "columns"}),
        (tp_block.Schedule, {"gather_matmul", "matmul_scatter"}),
        (train_step.Trainer, {"accumulate", "update"}),
        (train_step.TorchTrainer, {"accumulate", "update"}),
    ],
)
def test_properties_and_methods(cls: Any, names: set[str]) -> None:
    assert names <= set(dir(cls))


def test_arguments() -> None:
    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert names(train_step.TorchTrainer)[:4] == ["problem", "model", "context", "loss"]
    assert names(train_step.Trainer.accumulate)[1:] == ["batches", "mark"]
    assert names(train_step.Trainer.update)[1:] == ["mark"]
    assert names(api.Step.__origin__)[:4] == ["run", "bytes_communicated", "columns", "restore"]  # type: ignore[attr-defined]
    step = list(inspect.signature(api.Step.__origin__).parameters.values())  # type: ignore[attr-defined]
    assert all(parameter.default is not inspect.Parameter.empty for parameter in step[1:])
    assert names(api.Workload)[:3] == ["problem", "summary", "tolerances"]
    assert names(api.variant) == VARIANT.split()
