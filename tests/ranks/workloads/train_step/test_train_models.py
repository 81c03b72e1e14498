"""Models of the transformers package for a problem: sizes, weights, operations, memory and sliding windows."""

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers.masking_utils import create_sliding_window_causal_mask

from tests.support.command import ROOT
from tests.support.train_step import CPU, config_json, folder_problem, tiny_problem
from tpbench.settings import JobError
from tpbench.workloads.sizes import ITEM_BYTES
from tpbench.workloads.train_step import TrainStep, estimates
from tpbench.workloads.train_step.estimates import Distribution, estimate_memory
from tpbench.workloads.train_step.model.configuration import model_configuration
from tpbench.workloads.train_step.model.inputs import micro_batch, model_inputs
from tpbench.workloads.train_step.model.models import build, materialise
from tpbench.workloads.train_step.model.resolve import resolve
from tpbench.workloads.train_step.training.losses import torch_loss


def test_initial_weights_of_a_seed_never_change_and_are_normal() -> None:
    """Rows of earlier versions stay comparable only if the weights stay the same."""
    model = build(tiny_problem(vocab=4096, dtype="bfloat16"))
    materialise(model, CPU, 7)
    digest = hashlib.sha256(model.lm_head.weight.detach().view(torch.int16).numpy().tobytes()).hexdigest()[:16]
    assert digest == "46ffa2e61316a5fc"
    weights = model.model.embed_tokens.weight.float()
    assert weights.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(weights.mean().item()) < 2e-4
    assert (model.model.norm.weight == 1).all()
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)


MODELS = {
    path.stem: {name: value for name, value in yaml.safe_load(path.read_text()).items() if name != "hub_ids"}
    for path in sorted((ROOT / "conf/model").glob("*.yaml"))
}
PUBLISHED = {
    "qwen3_0p6b": 0.596e9, "qwen3_1p7b": 1.721e9, "qwen3_4b": 4.022e9, "qwen3_8b": 8.191e9, "qwen3_14b": 14.768e9,
    "qwen3_32b": 32.762e9, "llama3_1b": 1.236e9, "llama3_8b": 8.030e9, "llama3_70b": 70.554e9, "llama3_405b": 405.85e9,
    "llama3_0_8b": 8.030e9, "qwen2p5_7b": 7.616e9,
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_file_makes_a_model_of_the_published_size(name: str) -> None:
    problem = TrainStep(**MODELS[name])
    assert problem.model == name
    count = sum(each.numel() for each in build(problem).parameters())
    biases = sum(each.numel() for part, each in build(problem).named_parameters() if part.endswith("bias"))
    assert count - biases == estimates.parameters(problem)
    if name in PUBLISHED:
        assert count == pytest.approx(PUBLISHED[name], rel=1e-3)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dtype": "bfloat16"},
        {"architecture": "llama"},
        {"attention": "eager"},
        {"architecture": "llama", "dtype": "bfloat16", "autocast": True},
    ],
    ids=str,
)
def test_activations_take_about_what_was_estimated(fields: dict[str, Any]) -> None:
    """bf16 needs a GPU: on a CPU, torch's RMS norm of bf16 keeps copies in fp32."""
    device = CPU if fields.get("dtype") != "bfloat16" or "autocast" in fields else torch.device("cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    problem = tiny_problem(
        **{"hidden_size": 128, "ffn_size": 384, "head_dim": 32, "layers": 4, "seq_length": 128, **fields}
    )
    model = build(problem)
    materialise(model, device, 0)
    held = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = micro_batch(problem, 0, 0, 0, 1, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=problem.autocast)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        loss = torch_loss(model(input_ids=batch.tokens, **model_inputs(problem, device)).logits, batch.labels)
    assert loss.isfinite()  # `loss` keeps the saved tensors alive until here
    # The estimate includes the logits' gradients, which only the backward pass makes.
    gradients = problem.tokens * problem.vocab * (4 + ITEM_BYTES[problem.dtype])
    expected = estimate_memory(problem, Distribution("ddp"), 1, 1).activations - gradients
    assert sum(kept.values()) == pytest.approx(expected, rel=0.25)


def test_a_local_folder_describes_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(config_json())
    problem = resolve(tiny_problem(model_dir=str(folder), num_layers=2))
    assert (problem.model, problem.architecture, problem.head_dim) == ("mine", "llama", 16)
    assert (problem.layers, problem.num_layers) == (3, 2)
    assert resolve(problem) == problem
    model = build(problem)
    assert len(model.model.layers) == 2
    assert sum(each.numel() for each in model.parameters()) == estimates.parameters(problem)
    qwen3 = {"model_type": "qwen3", "num_attention_heads": 32, "num_key_value_heads": None}
    for changes, heads in (({}, (2, 16)), (qwen3, (32, 128)), (qwen3 | {"head_dim": 8}, (32, 8))):
        untied = resolve(folder_problem(folder, tie_word_embeddings=None, **changes))
        assert not untied.tied and (untied.kv_heads, untied.head_dim) == heads
        assert sum(each.numel() for each in build(untied).parameters()) == estimates.parameters(untied)


def test_tied_embeddings_default_to_those_of_the_model_type(tmp_path: Path) -> None:
    for architecture, tied in (("gemma", True), ("mistral", False)):
        problem = resolve(folder_problem(tmp_path, model_type=architecture, tie_word_embeddings=None, head_dim=16))
        assert problem.tied is tied
        assert sum(each.numel() for each in build(problem).parameters()) == estimates.parameters(problem)


QWEN2 = {"model_type": "qwen2", "sliding_window": 8}
SLIDES = {**QWEN2, "use_sliding_window": True}
KINDS = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("content", "width"),
    [
        ({"model_type": "mistral", "sliding_window": 15}, 15),
        ({"model_type": "mistral", "sliding_window": 16}, None),
        ({"sliding_window": 8}, None),  # Llama ignores it
        (QWEN2, None),
        ({**SLIDES, "max_window_layers": 2}, 8),
        ({**SLIDES, "model_type": "qwen3", "head_dim": 16, "layer_types": KINDS}, 8),
    ],
    ids=str,
)
def test_a_window_shorter_than_the_sequence_is_refused(
    content: dict[str, Any], width: int | None, tmp_path: Path
) -> None:
    problem = folder_problem(tmp_path, **content)
    if width is None:
        resolve(problem)
        return
    with pytest.raises(JobError, match=f"has a sliding window of {width} tokens.*seq_length={width} can be trained"):
        resolve(problem)
    resolve(replace(problem, seq_length=width))


def test_a_window_that_hides_nothing_needs_no_mask(tmp_path: Path) -> None:
    """Transformers would make a mask for a window as long as a rank's tokens. A file of conf/model names no window."""
    exact = resolve(folder_problem(tmp_path, model_type="mistral", sliding_window=16))
    default = resolve(tiny_problem(architecture="mistral", seq_length=5000))
    for problem in (exact, replace(exact, batch_size=1), default):
        configuration = model_configuration(problem)
        embedded = torch.zeros(1, problem.tokens, 2, device="meta")
        assert create_sliding_window_causal_mask(configuration, embedded, None, past_key_values=None) is None


def test_a_folder_that_changed_since_planning_is_refused(tmp_path: Path) -> None:
    problem = resolve(folder_problem(tmp_path, attention_bias=False))
    assert problem.config_hash and resolve(tiny_problem()).config_hash is None
    folder_problem(tmp_path, attention_bias=True)
    with pytest.raises(JobError, match="was changed after this job had been made from it"):
        build(problem)
    folder_problem(tmp_path, attention_bias=False, torch_dtype="float32", transformers_version="4.57.1")
    build(problem)


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ("quen3", "no architecture is called quen3, did you mean qwen3? (valid: the model types of causal"),
        ("qwen3_moe", "is a mixture of experts (num_experts_per_tok), whose operations tpbench does not count"),
        ("deepseek_v3", "is a mixture of experts"),
        ("youtu", "weights in matrices where a dense decoder of its sizes has"),
        ("bert", "bert"),
        ("granite_swa", "transformers has no attention=sdpa for"),
        # Any error of transformers is one line.
        ("falcon", "transformers cannot make falcon of the sizes of tiny: AttributeError: property 'head_dim'"),
    ],
)
def test_an_unknown_architecture_is_refused_before_the_launch(architecture: str, said: str) -> None:
    with pytest.raises(JobError, match=re.escape(said)) as error:
        resolve(tiny_problem(architecture=architecture))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "kind", "theta", "factor"),
    [("qwen3_8b", "default", 1e6, None), ("llama3_1b", "llama3", 5e5, 32.0), ("llama3_70b", "llama3", 5e5, 8.0)],
)
def test_rotary_embeddings_are_the_published_ones(name: str, kind: str, theta: float, factor: float | None) -> None:
    rope = model_configuration(TrainStep(**MODELS[name])).rope_parameters
    assert (rope["rope_type"], rope["rope_theta"], rope.get("factor")) == (kind, theta, factor)


def test_the_hash_of_a_folder_cannot_be_set() -> None:
    with pytest.raises(JobError, match="config_hash follows from the model: it cannot be set"):
        resolve(tiny_problem(), frozenset({"config_hash"}))


def test_dropout_of_a_folder_is_disabled(tmp_path: Path) -> None:
    content = {"model_type": "qwen2", "attention_dropout": 0.1}
    model = build(resolve(folder_problem(tmp_path, **content)))
    assert model.model.layers[0].self_attn.attention_dropout == 0.0


def test_outputs_and_initial_values_of_a_folder_are_ignored(tmp_path: Path) -> None:
    content = {"return_dict": False, "output_hidden_states": True, "initializer_range": -1.0, "use_cache": True}
    problem = resolve(folder_problem(tmp_path, model_type="gemma", head_dim=16, **content))
    model = build(problem)
    materialise(model, CPU, 0)
    result = model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    assert list(result) == ["logits"] and result.logits.isfinite().all()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        pytest.param("[" * 100_000, "cannot be read", id="brackets"),
        ("{}", "lacks model_type"),
        (config_json(hidden_size="wide", head_dim=None), "cannot take its config.json: "),
        (config_json(num_attention_heads=0), "cannot take its config.json: ZeroDivisionError"),
        (config_json(intermediate_size=-96), "ffn_size=-96 must be at least 1"),
        (config_json(model_type="lama"), "no architecture is called lama, did you mean llama"),
        (config_json(hidden_act="nosuch"), "of its config.json: KeyError: 'nosuch'"),
        (config_json(rope_scaling={"rope_type": "nosuch"}), "of its config.json"),
        (config_json(tie_word_embeddings=None), "cannot take its config.json: "),
    ],
)
def test_a_folder_without_a_dense_decoder_is_refused(content: str | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(JobError, match=re.escape(said)):
        resolve(tiny_problem(model_dir=str(tmp_path)))
