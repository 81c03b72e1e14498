"""A training problem's fields, from the command line and from a local folder, without the transformers package."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.train_step import single_context, tiny_problem
from tpbench.settings import JobError
from tpbench.workloads.train_step import WORKLOAD
from tpbench.workloads.train_step.model.resolve import resolve
from tpbench.workloads.train_step.training.autotp import deepspeed_configuration
from tpbench.workloads.train_step.workload import unsupported_loss


@pytest.mark.parametrize(
    ("fields", "tp_size", "said"),
    [
        ({"heads": 3, "kv_heads": 2}, 1, "kv_heads=2 must divide heads=3"),
        ({"head_dim": 3}, 1, "head_dim=3 must be even"),
        ({"num_layers": 3}, 1, "num_layers=3 is more than the 2 of tiny"),
        ({"autocast": True}, 1, "autocast=true needs dtype=bfloat16 or float16"),
        ({"dtype": "float16"}, 1, "dtype=float16 needs autocast=true"),
        ({"attention": "flash_attention_2"}, 1, "has no float32"),
    ],
)
def test_fields_that_cannot_be_trained_are_refused(fields: dict[str, Any], tp_size: int, said: str) -> None:
    assert any(said in each for each in tiny_problem(**fields).check(tp_size, 1))
    assert not tiny_problem().check(2, 2)


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("fsdp_dtensor", {"kv_heads": 4}, None),
        ("autotp", {}, "tp_size=4 must divide heads=4, kv_heads=2 and ffn_size=64 (valid: 1, 2)"),
        ("fsdp_dtensor", {"kv_heads": 4, "seq_length": 15}, "share 30 tokens, which tp_size=4 must divide"),
        ("dtensor_tp", {"kv_heads": 4, "seq_length": 14}, "share 14 tokens, which tp_size=4 must divide"),
        ("fsdp_dtensor", {"kv_heads": 4, "ffn_size": 62}, "ffn_size=62 (valid: 1, 2)"),
    ],
)
def test_ranks_share_heads_and_columns(name: str, fields: dict[str, Any], said: str | None) -> None:
    problem = tiny_problem(**fields)
    assert not problem.check(4, 1)
    reason = WORKLOAD.variants[name].unsupported_reason(problem, 4)
    assert reason is None if said is None else reason is not None and said in reason


@pytest.mark.parametrize(
    ("fields", "tp_size", "said"),
    [
        ({"train_loss": "tpbench_linear"}, 2, None),
        ({"train_loss": "liger", "vocab": 97}, 1, None),
        (
            {"train_loss": "liger", "vocab": 97},
            2,
            "train_loss=liger needs equal shards: tp_size=2 must divide vocab=97",
        ),
        ({"train_loss": "tpbench_linear", "vocab_parallel": False}, 2, "needs vocab_parallel=true"),
        ({"train_loss": "tpbench_linear", "architecture": "gemma2"}, 1, "gets no logits, which gemma2 may change"),
    ],
)
def test_a_loss_that_a_model_cannot_have_is_skipped(fields: dict[str, Any], tp_size: int, said: str | None) -> None:
    reason = unsupported_loss(tiny_problem(**fields), tp_size)
    assert reason is None if said is None else reason is not None and said in reason


def test_changed_fields_are_part_of_the_models_name(tmp_path: Path) -> None:
    problem = tiny_problem(vocab=96, heads=8)
    assert resolve(problem).model == resolve(problem, frozenset({"num_layers", "seq_length"})).model == "tiny"
    assert resolve(problem, frozenset({"vocab", "heads", "model"})).model == "tiny[heads=8,vocab=96]"
    with pytest.raises(JobError, match="says what the model is: not vocab too"):
        resolve(tiny_problem(model_dir=str(tmp_path)), frozenset({"vocab"}))


def test_float16_is_trained_by_autocast() -> None:
    problem = tiny_problem(dtype="float16")
    assert resolve(problem).autocast and not resolve(problem, frozenset({"autocast"})).autocast
    reason = WORKLOAD.variants["autotp"].unsupported_reason(replace(resolve(problem), zero_stage=0), 2)
    assert reason == "DeepSpeed keeps fp32 parameters beside float16 only with zero_stage 1 or 2"


def test_deepspeeds_configuration_has_the_overlap() -> None:
    context = replace(single_context(), tp_size=2)
    for overlap in (False, True):
        configuration = deepspeed_configuration(tiny_problem(overlap=overlap), context, {})
        assert configuration["tensor_parallel"]["tp_overlap_comm"] is overlap


def test_an_id_is_answered_with_what_to_write_instead() -> None:
    with pytest.raises(JobError, match=re.escape("hf download Someone/Tiny-1B config.json --local-dir")):
        resolve(tiny_problem(model_dir="Someone/Tiny-1B"))
    with pytest.raises(JobError, match=r"cannot be read: [^`]*$"):
        resolve(tiny_problem(model_dir="/nowhere/Tiny-1B"))
