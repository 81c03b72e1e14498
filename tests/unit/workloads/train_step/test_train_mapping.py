"""A user's mapping of modules to styles, and models by their ids, without the transformers package."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support.train_step import config_json, tiny_problem
from tpbench.settings import JobError, parse
from tpbench.workloads.train_step import TrainStep
from tpbench.workloads.train_step.resolve import resolve
from tpbench.workloads.train_step.sharding.styles import parse_mapping


def test_a_mapping_of_a_yaml_file_becomes_text_and_keeps_its_order() -> None:
    mapping = {"model.layers.0.mlp.*": "replicated", "layers.*.mlp.up_proj": "colwise"}
    problem = parse(TrainStep, {**vars(tiny_problem()), "tp_mapping": mapping})
    assert list(parse_mapping(problem.tp_mapping).items()) == [
        ("layers.0.mlp.*", "replicated"),
        ("layers.*.mlp.up_proj", "colwise"),
    ]
    assert parse_mapping(None) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "tp_mapping={ must be an object of module patterns and styles, such as"),
        ("[1]", "tp_mapping=[1] must be an object"),
        ("{}", "tp_mapping={} must be an object"),
        (
            '{"layers.*": "columnwise"}',
            "layers.*: no style is called columnwise, did you mean colwise? (valid: colwise, ",
        ),
        ('{"layers.*": 1}', "layers.*: no style is called 1"),
    ],
)
def test_a_bad_mapping_is_one_message(text: str, said: str) -> None:
    with pytest.raises(JobError, match=re.escape(said)) as error:
        resolve(tiny_problem(tp_mapping=text))
    assert len(str(error.value).splitlines()) == 1


def test_a_folder_may_hold_a_mapping_and_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config_json(model_type="unknown", tp_mapping={"layers.*": "columnwise"}))
    with pytest.raises(JobError, match="no style is called columnwise"):
        resolve(tiny_problem(model_dir=str(tmp_path)))
    chosen = tiny_problem(model_dir=str(tmp_path), tp_mapping='{"layers.*": "row"}')
    with pytest.raises(JobError, match="no style is called row,"):
        resolve(chosen, frozenset({"tp_mapping"}))


def test_an_id_is_looked_up_in_the_local_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    missing = "model=Someone/Tiny-1B is neither a folder nor in conf/model nor in the cache of Hugging Face"
    with pytest.raises(JobError, match=re.escape(missing) + ".*tpbench downloads nothing"):
        resolve(tiny_problem(model_dir="Someone/Tiny-1B"))
    snapshot = tmp_path / "models--Someone--Tiny-1B/snapshots/0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(config_json())
    (tmp_path / "models--Someone--Tiny-1B/refs").mkdir()
    (tmp_path / "models--Someone--Tiny-1B/refs/main").write_text("0123")
    problem = resolve(tiny_problem(model_dir="Someone/Tiny-1B"))
    assert (problem.model, problem.hidden_size) == ("Someone/Tiny-1B", json.loads(config_json())["hidden_size"])
    assert resolve(problem) == problem
