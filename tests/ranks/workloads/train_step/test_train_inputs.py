"""Weights and tokens come from the seed, whoever makes them; sizes are those published."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode
from transformers.masking_utils import create_sliding_window_causal_mask

from tests.support.command import ROOT
from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.train_step import alone, context, named, prepared, problem, whole
from tpbench.measure.session import Context
from tpbench.settings import JobError
from tpbench.workloads.train_step import TrainStep, sizes
from tpbench.workloads.train_step.batches import micro_batch
from tpbench.workloads.train_step.local import resolve
from tpbench.workloads.train_step.losses import torch_loss
from tpbench.workloads.train_step.models import UnknownArchitecture, build, configuration, materialise
from tpbench.workloads.train_step.trainer import model_inputs

CPU = torch.device("cpu")


def filled(here: Rank, name: str, tp_size: int, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    cell, place = problem(**fields), context(here, tp_size)
    return {each: whole(value, each, cell, place) for each, value in named(prepared(name, cell, place).model)}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("name", "ranks", "tp_size"),
    [("ddp", 2, 1), ("fsdp", 2, 1), ("fsdp_dtensor", 2, 2), ("fsdp_dtensor", 4, 2), ("autotp", 2, 2)],
)
def test_initial_weights_have_the_same_bits_however_sharded(name: str, ranks: int, tp_size: int, tied: bool) -> None:
    if not enough_gpus(ranks):
        pytest.skip(f"needs {ranks} GPUs, or none")
    cell = problem(tied=tied, vocab=97)
    model = build(cell)
    materialise(model, CPU, cell.seed)
    right = dict(model.named_parameters())
    for got in run_on_ranks(ranks, filled, name, tp_size, {"tied": tied, "vocab": 97}):
        assert set(got) == set(right)
        assert [each for each in right if not torch.equal(got[each], right[each])] == []


def test_initial_weights_stay_what_they_were_and_look_normal() -> None:
    """Rows measured yesterday are of the same problem only as long as this holds."""
    model = build(problem(vocab=4096, dtype="bfloat16"))
    materialise(model, CPU, 7)
    digest = hashlib.sha256(model.lm_head.weight.detach().view(torch.int16).numpy().tobytes()).hexdigest()[:16]
    assert digest == "46ffa2e61316a5fc"
    weights = model.model.embed_tokens.weight.float()
    assert weights.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(weights.mean().item()) < 2e-4
    assert (model.model.norm.weight == 1).all()
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)


def test_tokens_stay_what_they_were() -> None:
    batch = micro_batch(problem(seed=7, vocab=151936, seq_length=512), 1, 0, 1, 2, CPU)
    assert hashlib.sha256(batch.tokens.numpy().tobytes()).hexdigest()[:16] == "4cffb1dca1d13336"
    assert torch.equal(batch.labels[:, :-1], batch.tokens[:, 1:])
    assert batch.tokens.min() >= 0 and batch.tokens.max() < 151936
    assert (batch.tokens < 151936 / 8).float().mean() > 0.5  # low numbers are frequent: there is something to learn


def seen(here: Rank, tp_size: int) -> tuple[int, int, list[int]]:
    place = context(here, tp_size)
    batch = micro_batch(problem(), 0, 0, place.dp_rank, place.dp_size, here.device)
    return place.dp_rank, place.tp_rank, batch.tokens.flatten().tolist()


def test_the_mesh_is_row_major_and_a_replicas_ranks_see_one_batch() -> None:
    if not enough_gpus(4):
        pytest.skip("needs 4 GPUs, or none")
    found = run_on_ranks(4, seen, 2)
    assert [(dp, tp) for dp, tp, _ in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found[0][2] == found[1][2] != found[2][2] == found[3][2]


def device_mesh(here: Rank) -> list[list[int]]:
    from tpbench.workloads.train_step.mesh import mesh

    made = mesh(context(here, 2))
    assert made["tp"].get_local_rank() == here.rank % 2 and made["dp"].get_local_rank() == here.rank // 2
    return made.mesh.tolist()


def test_dtensors_mesh_is_the_same_one() -> None:
    if not enough_gpus(4):
        pytest.skip("needs 4 GPUs, or none")
    assert run_on_ranks(4, device_mesh) == [[[0, 1], [2, 3]]] * 4


MODELS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / "conf/model").glob("*.yaml"))}
PUBLISHED = {
    "qwen3_0p6b": 0.596e9, "qwen3_1p7b": 1.721e9, "qwen3_4b": 4.022e9, "qwen3_8b": 8.191e9, "qwen3_14b": 14.768e9,
    "qwen3_32b": 32.762e9, "llama3_1b": 1.236e9, "llama3_8b": 8.030e9, "llama3_70b": 70.554e9, "llama3_405b": 405.85e9,
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_file_makes_a_model_of_the_published_size(name: str) -> None:
    cell = TrainStep(**MODELS[name])
    assert cell.model == name
    count = sum(each.numel() for each in build(cell).parameters())
    assert count == sizes.parameters(cell)
    if name in PUBLISHED:
        assert count == pytest.approx(PUBLISHED[name], rel=1e-3)


@pytest.mark.parametrize("fields", [{}, {"tied": True}, {"heads": 8, "num_layers": 1}], ids=str)
def test_the_flop_count_is_what_torch_counts(fields: dict[str, Any]) -> None:
    """Of the forward pass, three times: the backward pass has two products for each. Eager attention, because torch
    does not count what sdpa does on a CPU."""
    cell = problem(attention="eager", **fields)
    model = build(cell)
    materialise(model, CPU, 0)
    batch = micro_batch(cell, 0, 0, 0, 1, CPU)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=batch.tokens, **model_inputs(cell, CPU))
    rotations = 2 * cell.seq_length * cell.head_dim // 2  # which some transformers make by a product
    assert sizes.step_flops(cell, 1) - 3 * counter.get_total_flops() in (0, -3 * rotations)


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
    """On a CPU torch's RMS norm of bf16 keeps fp32 copies, on a GPU it does not."""
    device = CPU if fields.get("dtype") != "bfloat16" or "autocast" in fields else torch.device("cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    cell = problem(**{"hidden_size": 128, "ffn_size": 384, "head_dim": 32, "layers": 4, "seq_length": 128, **fields})
    model = build(cell)
    materialise(model, device, 0)
    held = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = micro_batch(cell, 0, 0, 0, 1, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=cell.autocast)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        loss = torch_loss(model(input_ids=batch.tokens, **model_inputs(cell, device)).logits, batch.labels)
    assert loss.isfinite()  # and has kept everything alive until here
    gradients = cell.tokens * cell.vocab * (4 + sizes.ITEM_BYTES[cell.dtype])  # of the logits, when the loss goes back
    expected = sizes.memory(cell, "ddp", 1, 1).activations - gradients
    assert sum(kept.values()) == pytest.approx(expected, rel=0.25)


def test_memory_of_parameters_by_variant() -> None:
    cell = problem(dtype="bfloat16", vocab=96)
    count, embedding = sizes.parameters(cell), 96 * 32
    whole_model = sizes.memory(cell, "ddp", 1, 2)
    assert (whole_model.model, whole_model.gradients, whole_model.optimizer) == (2 * count, 2 * count, 4 * count)
    assert whole_model.total == 8 * count + whole_model.activations  # the gradients are views of its buckets
    sharded = sizes.memory(cell, "fsdp_dtensor", 2, 2)
    assert sharded.total == sharded.model + sharded.optimizer + max(sharded.gradients, sharded.activations)
    kept = sizes.memory(problem(dtype="bfloat16", vocab=96, accumulate=2), "fsdp_dtensor", 2, 2)
    assert kept.total == kept.model + kept.gradients + kept.optimizer + kept.activations
    assert sharded.model == sharded.gradients == pytest.approx(2 * count / 4, abs=2)
    assert sizes.memory(cell, "autotp", 2, 1).model == pytest.approx(2 * (embedding + (count - embedding) / 2), abs=2)


def test_autotp_s_buffers_replace_the_logits_where_they_are_larger() -> None:
    """Two of ZeRO's, which it makes with the first gradient on GPUs, whatever the model's size."""
    buffers = 2 * 500_000_000 * 2
    cell = problem(dtype="bfloat16", vocab=96)
    there, none = (sizes.memory(cell, "autotp", 2, 1, on_gpus=each).activations for each in (True, False))
    logits = cell.tokens * 96 // 2 * (2 * 2 + 2 * 4)
    assert there == none - logits + buffers
    assert sizes.memory(problem(dtype="bfloat16", vocab=96, zero_stage=0), "autotp", 2, 1).activations == none
    many = problem(dtype="bfloat16", vocab=2**20, seq_length=2**12)
    assert sizes.memory(many, "autotp", 2, 1) == sizes.memory(many, "autotp", 2, 1, on_gpus=False)
    # They are there while the second micro-batch's logits are.
    twice = problem(dtype="bfloat16", vocab=96, accumulate=2)
    assert sizes.memory(twice, "autotp", 2, 1).activations == there + logits


def described(**changes: Any) -> str:
    """A config.json of a small model."""
    content = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "tie_word_embeddings": False,
        "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    return json.dumps(content | changes)


def test_a_local_folder_describes_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(described())
    cell = resolve(problem(model_dir=str(folder), num_layers=2))
    assert (cell.model, cell.architecture, cell.head_dim, cell.layers, cell.num_layers) == ("mine", "llama", 16, 3, 2)
    assert resolve(cell) == cell
    model = build(cell)
    assert len(model.model.layers) == 2
    assert sum(each.numel() for each in model.parameters()) == sizes.parameters(cell)
    (folder / "config.json").write_text(
        described(tie_word_embeddings=None).replace('"tie_word_embeddings": null, ', "")
    )
    silent = resolve(problem(model_dir=str(folder), num_layers=2))
    assert not silent.tied
    assert sum(each.numel() for each in build(silent).parameters()) == sizes.parameters(silent)


def written(folder: Path, **changes: Any) -> TrainStep:
    """The problem of a folder with that config.json; what is None is not in there."""
    content = {name: value for name, value in json.loads(described(**changes)).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    return problem(model_dir=str(folder))


def test_the_default_of_the_type_holds_where_a_folder_does_not_say_whether_it_is_tied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for architecture, tied in (("gemma", True), ("mistral", False)):
        cell = resolve(written(tmp_path, model_type=architecture, tie_word_embeddings=None, head_dim=16))
        assert cell.tied is tied
        assert sum(each.numel() for each in build(cell).parameters()) == sizes.parameters(cell)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(JobError, match=re.escape("lacks tie_word_embeddings, for which only the transformers package")):
        resolve(written(tmp_path, model_type="gemma", tie_word_embeddings=None))
    assert resolve(written(tmp_path, model_type="gemma", tie_word_embeddings=True)).tied
    assert not resolve(written(tmp_path, tie_word_embeddings=None)).tied


def test_the_default_of_the_type_holds_where_a_folder_does_not_say_how_wide_heads_are(tmp_path: Path) -> None:
    qwen3 = {"model_type": "qwen3", "num_attention_heads": 32, "num_key_value_heads": None}
    for changes, sizes_of_heads in (({}, (2, 16)), (qwen3, (32, 128)), (qwen3 | {"head_dim": 8}, (32, 8))):
        cell = resolve(written(tmp_path, **changes))
        assert (cell.kv_heads, cell.head_dim) == sizes_of_heads
        assert sum(each.numel() for each in build(cell).parameters()) == sizes.parameters(cell)


QWEN2 = {"model_type": "qwen2", "sliding_window": 8}
SLIDES = {**QWEN2, "use_sliding_window": True}
KINDS = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("content", "width"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, 8),
        ({"model_type": "mistral", "sliding_window": 15}, 15),  # longer than a shard of the sequence
        ({"model_type": "mistral", "sliding_window": 16}, None),
        ({"model_type": "mistral"}, None),  # 4096
        ({"sliding_window": 8}, None),  # Llama has none, whatever is written there
        (QWEN2, None),
        ({**SLIDES, "max_window_layers": 3}, None),
        ({**SLIDES, "max_window_layers": 2}, 8),
        ({**SLIDES, "layer_types": KINDS}, 8),
        ({**SLIDES, "model_type": "qwen3", "head_dim": 16, "layer_types": KINDS}, 8),
        ({"model_type": "ministral", "head_dim": 16, "sliding_window": 8, "layer_types": KINDS}, 8),
    ],
    ids=str,
)
def test_a_sliding_window_is_refused_where_it_is_one(
    content: dict[str, Any], width: int | None, tmp_path: Path
) -> None:
    """Of a shard's length it would be another window, and fewer operations are needed than are counted."""
    cell = written(tmp_path, **content)
    if width is None:
        assert resolve(cell).seq_length == 16
        return
    with pytest.raises(JobError, match=rf"sliding window of {width} tokens, .* seq_length=16 must be at most that"):
        resolve(cell)
    assert resolve(replace(cell, seq_length=width)).seq_length == width


def test_a_window_in_layers_that_are_left_out_is_none(tmp_path: Path) -> None:
    cell = written(tmp_path, **SLIDES, max_window_layers=2)
    assert resolve(replace(cell, num_layers=2)).num_layers == 2


def test_a_window_that_blocks_nothing_takes_no_mask(tmp_path: Path) -> None:
    """Transformers makes one for a window of just the sequence's length, which it takes the share of a micro-batch's
    tokens for that a rank has; a file of conf/model names no window."""
    exact = resolve(written(tmp_path, model_type="mistral", sliding_window=16))
    for cell in (exact, replace(exact, batch_size=1), resolve(problem(architecture="mistral", seq_length=5000))):
        embedded = torch.zeros(1, cell.tokens, 2, device="meta")
        assert create_sliding_window_causal_mask(configuration(cell), embedded, None, past_key_values=None) is None


def test_a_folder_that_was_changed_since_is_not_trained(tmp_path: Path) -> None:
    cell = resolve(written(tmp_path, attention_bias=False))
    assert cell.config_hash and resolve(problem()).config_hash is None
    written(tmp_path, attention_bias=True)
    with pytest.raises(UnknownArchitecture, match="was changed after this job had been made from it"):
        build(cell)
    written(tmp_path, attention_bias=False, torch_dtype="float32", transformers_version="4.57.1")
    build(cell)
    with pytest.raises(JobError, match="config_hash is of what the model's folder says"):
        resolve(problem(), frozenset({"config_hash"}))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "lacks"),
        ("{}", "lacks model_type"),
        (described(hidden_size="wide", head_dim=None), "describes no decoder: invalid literal"),
        (described(num_attention_heads=0), "describes no decoder: integer division"),
        (described(rope_scaling="yes"), "describes no decoder: 'str' object"),
        (described(intermediate_size=-96), "ffn_size=-96 must be at least 1"),
        (described(vocab_size=12.5), "vocab=12.5 must be a whole number"),
        (described(num_local_experts=8), "a mixture of experts (num_local_experts)"),
        (described(tie_word_embeddings="false"), 'tie_word_embeddings="false" must be true or false'),
        (described(tie_word_embeddings=None), "tie_word_embeddings=null must be true or false"),
        (described(model_type="mistral", hidden_act=5), "transformers cannot take its config.json"),
    ],
)
def test_a_folder_that_does_not_is_refused(content: str | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(JobError, match=re.escape(said)):
        resolve(problem(model_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ("quen3", "no architecture is called quen3, did you mean qwen3? (valid: the model types of causal"),
        ("qwen3_moe", "weights in matrices where a dense decoder of its sizes has"),
        ("bert", "bert"),
    ],
)
def test_an_architecture_that_is_not_there_is_refused_before_a_launch(
    architecture: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=re.escape(said)):
        resolve(problem(architecture=architecture))
    (tmp_path / "config.json").write_text(described(model_type=architecture))
    with pytest.raises(JobError, match=re.escape(said)):
        resolve(problem(model_dir=str(tmp_path)))


def test_another_dense_decoder_is_taken() -> None:
    assert resolve(problem(architecture="mistral")).architecture == "mistral"


def test_a_model_that_was_changed_on_the_line_is_called_so(tmp_path: Path) -> None:
    cell = problem(vocab=96, heads=8)
    assert resolve(cell).model == resolve(cell, frozenset({"num_layers", "seq_length"})).model == "tiny"
    assert resolve(cell, frozenset({"vocab", "heads", "model"})).model == "tiny[heads=8,vocab=96]"
    with pytest.raises(JobError, match="says what the model is: not vocab too"):
        resolve(problem(model_dir=str(tmp_path)), frozenset({"vocab"}))


@pytest.mark.parametrize(
    ("name", "kind", "theta", "factor"),
    [("qwen3_8b", "default", 1e6, None), ("llama3_1b", "llama3", 5e5, 32.0), ("llama3_70b", "llama3", 5e5, 8.0)],
)
def test_rotary_embeddings_are_the_published_ones(name: str, kind: str, theta: float, factor: float | None) -> None:
    rope = configuration(TrainStep(**MODELS[name])).rope_parameters
    assert (rope["rope_type"], rope["rope_theta"], rope.get("factor")) == (kind, theta, factor)


def test_a_model_that_is_not_what_its_sizes_say_is_refused() -> None:
    """Its FLOPs, and with them MFU, would be another model's."""
    with pytest.raises(UnknownArchitecture, match=r"tiny \(qwen3_moe\) has \d+ weights in matrices where a dense"):
        build(problem(architecture="qwen3_moe"))


@pytest.mark.parametrize(
    ("fields", "tp_size", "said"),
    [
        ({}, 4, "tp_size=4 must divide the 2 key-value heads of tiny (valid: 1, 2)"),
        ({"ffn_size": 63}, 2, "tp_size=2 must divide ffn_size=63"),
        ({"seq_length": 15}, 2, "tp_size=2 must divide seq_length=15"),
        ({"heads": 3, "kv_heads": 2}, 1, "kv_heads=2 must divide heads=3"),
        ({"head_dim": 7}, 1, "head_dim=7 must be even"),
        ({"num_layers": 3}, 1, "num_layers=3 is more than the 2 layers of tiny"),
        ({"max_grad_norm": 0.0}, 1, "max_grad_norm=0 would leave no gradient: null is for no clipping"),
        ({"dtype": "float16"}, 1, "dtype=float16 needs autocast=true"),
        ({"autocast": True}, 1, "autocast=true needs dtype=bfloat16 or float16"),
        ({"attention": "flash_attention_2"}, 1, "has no float32"),
    ],
)
def test_what_cannot_be_is_said(fields: dict[str, Any], tp_size: int, said: str) -> None:
    assert any(said in each for each in problem(**fields).check(tp_size, 1))
    assert not problem().check(2, 2)


def unknown(here: Rank) -> str:
    """A model with a module that the plan does not name."""
    from tpbench.workloads.train_step import mesh

    cell, place = problem(), context(here, 2)
    model = build(cell)
    model.model.layers[1].mlp.extra = torch.nn.Linear(4, 4, device="meta")
    try:
        mesh.shard_tensors(cell, model, mesh.mesh(place)["tp"])
    except mesh.UnknownArchitecture as error:
        return str(error)
    return "nothing"


def test_a_plan_that_misses_a_parameter_is_refused() -> None:
    if not enough_gpus(2):
        pytest.skip("needs 2 GPUs, or none")
    for said in run_on_ranks(2, unknown):
        assert "does not know model.layers.1.mlp.extra.weight of tiny" in said


def test_training_learns() -> None:
    place = Context(0, 1, 0, 1, 0, 1, None, None, CPU)  # type: ignore[arg-type]
    losses = alone(problem(tied=True), place, 12).losses
    assert losses[-1] < losses[0] - 0.4
