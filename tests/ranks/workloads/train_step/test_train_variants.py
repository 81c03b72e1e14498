"""Every variant computes the same as one process: losses, norms, all gradients and all updated weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.train_step import (
    ARCHITECTURES,
    SHARDED,
    check_errors,
    compare,
)
from tpbench.workloads.train_step import WORKLOAD
from tpbench.workloads.train_step.oracle import LOSS_TOLERANCE, NORM_TOLERANCE

ALONE = sorted(WORKLOAD.variants.keys() - {*SHARDED})
"""The variants without tensor parallelism."""
BOTH = {"accumulate": 2, "activation_checkpointing": True}
EAGER = {"tied": True, "attention": "eager"}
CASES: list[tuple[int, str, int, dict[str, Any]]] = [
    # Ranks, variant, tp_size, fields that differ from the tiny problem.
    *((2, name, 1, {"tied": tied, **more}) for name in ALONE for tied, more in ((False, BOTH), (True, {}))),
    *((2, name, 2, each) for name in SHARDED for each in ({}, {"tied": True, **BOTH}, {"vocab_parallel": False})),
    # One sequence; three sequences, of which a rank has one and a half; an odd number of tokens.
    (2, "dtensor_tp", 2, {"batch_size": 1}), (2, "fsdp_dtensor", 2, {"batch_size": 3, "accumulate": 2}),
    (2, "autotp", 2, {"seq_length": 15, "batch_size": 1}),
    *((2, "autotp", 2, {"zero_stage": stage}) for stage in (0, 2)),
    (2, "autotp", 2, {"tied": True, "zero_stage": 0, **BOTH}),
    (2, "autotp", 2, {"overlap": True, "max_grad_norm": None}),
    (2, "autotp", 1, {"accumulate": 2}),
    *((4, name, 2, {"tied": True, "accumulate": 2}) for name in ("fsdp_dtensor", "dtensor_tp")),
    *((4, "autotp", 2, {"tied": stage == 1, "accumulate": 2, "zero_stage": stage}) for stage in (1, 2)),
    # Llama's layout with its rotary scaling, and a vocabulary that two ranks do not divide.
    *((2, name, 2, {"architecture": "llama", "rope_factor": 8.0, "vocab": 97}) for name in SHARDED),
    # tpbench's losses, over the sharded and the whole vocabulary.
    *((2, name, 2, {"train_loss": "tpbench", "tied": True}) for name in SHARDED),
    (2, "fsdp_dtensor", 2, {"train_loss": "tpbench", "vocab_parallel": False}),
    (2, "ddp", 1, {"train_loss": "tpbench", "max_grad_norm": None}),
    *((2, name, 2, {"train_loss": "tpbench_linear", "tied": True, "vocab": 97}) for name in SHARDED),
    *((2, name, 1, {"train_loss": "tpbench_linear", **BOTH}) for name in ALONE),
    (4, "fsdp_dtensor", 2, {"train_loss": "tpbench_linear", **EAGER, **BOTH}),
    # Other architectures, by their own plans.
    *((2, name, 2, each) for name in SHARDED for each in ARCHITECTURES),
    (2, "fsdp_dtensor", 2, {"architecture": "olmo"}),  # norms without weights
]  # fmt: skip

COMPILED = [(2, "fsdp", 1), (2, "fsdp_dtensor", 2), (4, "fsdp_dtensor", 2)]


def case_name(case: tuple[int, str, int, dict[str, Any]]) -> str:
    ranks, name, tp_size, fields = case
    return f"{name}-{ranks // tp_size}x{tp_size}-" + "-".join(f"{key}={value}" for key, value in fields.items())


FIRST = {name: (ranks, name, tp_size, fields) for ranks, name, tp_size, fields in reversed(CASES)}
"""The first case of each variant."""


def steps_of(case: tuple[int, str, int, dict[str, Any]]) -> int:
    """Return the number of steps. The second step starts from weights and optimizer states that a step has made.

    A third one would repeat the second. So only a few cases have it: each variant's first, and those that compile or
    overlap, because these may use buffers in turn.
    """
    return 3 if case in FIRST.values() or {"compile", "overlap"} & case[3].keys() else 2


@pytest.mark.parametrize(("ranks", "name", "tp_size", "fields"), CASES, ids=map(case_name, CASES))
def test_a_variant_equals_one_process(ranks: int, name: str, tp_size: int, fields: dict[str, Any]) -> None:
    if not enough_gpus(ranks):
        pytest.skip(f"needs {ranks} GPUs, or none")
    for errors in run_on_ranks(ranks, compare, name, tp_size, fields, steps_of((ranks, name, tp_size, fields))):
        check_errors(errors)


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize(
    ("content", "fields"),
    [
        # A rank adds the bias of a row-parallel layer to its tokens.
        (
            {
                "model_type": "llama",
                "attention_bias": True,
                "mlp_bias": True,
                "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
            },
            {},
        ),
        # Transformers takes a rank's tokens, here two sequences, for one sequence that is longer than the window.
        ({"model_type": "mistral", "sliding_window": 16}, {"batch_size": 4}),
    ],
    ids=lambda values: str(values.get("model_type", "")),
)
def test_biases_rotations_and_windows_of_a_folder(
    name: str, content: dict[str, Any], fields: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 96, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes | content))
    folder = {"model_dir": str(tmp_path), "architecture": content["model_type"], **fields}
    test_a_variant_equals_one_process(2, name, 2, folder)


def compare_captured(here: Rank, name: str, tp_size: int, fields: dict[str, Any]) -> dict[str, Any]:
    """Compare compiled layers whose operations are torch's own: without C++ kernels they need no compiler."""
    import torch._inductor.config as inductor

    with inductor.patch(force_disable_caches=True, fallback_by_default=True):
        return compare(here, name, tp_size, {"compile": True, **fields})


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
@pytest.mark.parametrize(
    ("name", "tp_size", "fields"),
    [
        ("fsdp_dtensor", 2, {}),
        ("fsdp_dtensor", 2, BOTH),
        *((name, 2, {"compile": False, "train_loss": "compiled", "vocab": 97}) for name in SHARDED),
        ("ddp", 1, {"compile": False, "train_loss": "compiled"}),
    ],
)
def test_layers_and_losses_are_captured_by_torch_compile(name: str, tp_size: int, fields: dict[str, Any]) -> None:
    for errors in run_on_ranks(2, compare_captured, name, tp_size, fields, timeout_s=600.0):
        check_errors(errors)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Liger's kernels need a GPU")
@pytest.mark.parametrize(("name", "tp_size"), [*((name, 2) for name in SHARDED), ("ddp", 1)])
def test_ligers_losses(name: str, tp_size: int) -> None:
    pytest.importorskip("liger_kernel")
    test_a_variant_equals_one_process(2, name, tp_size, {"train_loss": "liger", "accumulate": 2})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compile=true needs a GPU")
@pytest.mark.parametrize("fields", [{}, BOTH], ids=["", "checkpointed"])
@pytest.mark.parametrize(("ranks", "name", "tp_size"), COMPILED)
def test_compiled_variants(ranks: int, name: str, tp_size: int, fields: dict[str, Any]) -> None:
    test_a_variant_equals_one_process(ranks, name, tp_size, {"compile": True, **fields})


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
@pytest.mark.parametrize(
    ("name", "tp_size", "train_loss"),
    [*((name, 2, "torch") for name in SHARDED), ("fsdp_dtensor", 2, "tpbench_linear"), ("ddp", 1, "tpbench")],
)
def test_float16_with_a_scaled_loss(name: str, tp_size: int, train_loss: str) -> None:
    fields = {"dtype": "float16", "autocast": True, "accumulate": 2, "train_loss": train_loss}
    errors = run_on_ranks(2, compare, name, tp_size, fields)[0]
    assert errors["loss"] < LOSS_TOLERANCE["float16"]
    assert errors["norm"] < NORM_TOLERANCE["float16"]


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("fields", [{}, {"autocast": True}], ids=["bfloat16", "autocast"])
def test_bfloat16_within_the_oracles_tolerance(name: str, fields: dict[str, Any]) -> None:
    errors = run_on_ranks(2, compare, name, 2, {**fields, "dtype": "bfloat16", "learning_rate": 3e-4})[0]
    assert errors["loss"] < LOSS_TOLERANCE["bfloat16"] / 10
    assert errors["norm"] < NORM_TOLERANCE["bfloat16"] / 4
