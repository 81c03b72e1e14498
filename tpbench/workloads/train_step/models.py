"""From a problem's fields to a model of the transformers package, on whatever device, its weights not made yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
import transformers.modeling_utils  # what every model needs: here once, else anew in each job that is forked
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tpbench.settings import nearest
from tpbench.workloads.train_step import folder, sizes, windows
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.weights import fill

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""https://github.com/meta-llama/llama-models: the same in all of Llama 3.1 to 3.3; only the factor differs."""


class UnknownArchitecture(TypeError):
    """A model that is not what its problem's sizes say, that transformers has not, or a variant has no plan for."""


def configuration(problem: TrainStep) -> Any:
    """The transformers configuration of a problem, with full attention in every layer."""
    _must_exist(problem.architecture)
    common = {"use_cache": False, "attn_implementation": problem.attention}
    found = _of_folder(problem, common) if problem.model_dir else _of_sizes(problem, common)
    windows.widen(found, problem.tokens)
    return found


def tied_by_default(architecture: str) -> bool:
    """Whether models of that type have one weight for embedding and head where their file does not say."""
    _must_exist(architecture)
    return bool(getattr(AutoConfig.for_model(architecture), "tie_word_embeddings", False))


def _must_exist(architecture: str) -> None:
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = nearest(architecture, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        raise UnknownArchitecture(
            f"no architecture is called {architecture}{near} (valid: the model types of causal language models "
            f"in transformers {transformers.__version__})"
        )


def _of_folder(problem: TrainStep, common: dict[str, Any]) -> Any:
    """As the folder's config.json has it, but for the depth."""
    where = str(problem.model_dir)
    if problem.config_hash and folder.fingerprint(folder.read(Path(where))) != problem.config_hash:
        raise UnknownArchitecture(
            f"model_dir={where}: its config.json was changed after this job had been made from it"
        )
    try:
        found = AutoConfig.from_pretrained(where, local_files_only=True, **common)
    except Exception as error:  # its validators' errors have no common base but this
        raise UnknownArchitecture(f"model_dir={where}: transformers cannot take its config.json: {error}") from error
    kinds = getattr(found, "layer_types", None)
    found.num_hidden_layers = problem.depth
    if kinds is not None:
        found.layer_types = kinds[: problem.depth]
    width = windows.window(found)
    if width is not None and width < problem.seq_length:
        raise UnknownArchitecture(
            f"model_dir={where}: attention is limited to a sliding window of {width} tokens, for which no variant has "
            f"masks and no operations are counted: seq_length={problem.seq_length} must be at most that"
        )
    return found


def _of_sizes(problem: TrainStep, common: dict[str, Any]) -> Any:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": problem.rope_theta}
    if problem.rope_factor != 1.0:
        rope |= {"rope_type": "llama3", "factor": problem.rope_factor, **LLAMA3_ROPE}
    return AutoConfig.for_model(
        problem.architecture,
        hidden_size=problem.hidden_size,
        intermediate_size=problem.ffn_size,
        num_hidden_layers=problem.depth,
        num_attention_heads=problem.heads,
        num_key_value_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        vocab_size=problem.vocab,
        tie_word_embeddings=problem.tied,
        rms_norm_eps=problem.norm_eps,
        rope_parameters=rope,
        max_position_embeddings=max(problem.seq_length, LLAMA3_ROPE["original_max_position_embeddings"]),
        **common,
    )


class FusedNorm(nn.Module):
    """RMS norm as one operation, in place of the model's own of six: the same in every variant, so that they differ
    in nothing but how they share out the work."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = norm.weight
        self.variance_epsilon: float = norm.variance_epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.variance_epsilon)


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Over the last dimension, in one operation and in the dtype of what is normed."""
    return F.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), epsilon)


def build(problem: TrainStep, *, fused_norms: bool = True) -> Any:
    """The model with its parameters on the meta device, in training mode, checkpointing layers where asked to.

    Rotary embeddings hold buffers that no weight file has: they are made anew on the real device by `place_buffers`.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration(problem), dtype=getattr(torch, problem.stored_dtype))
    counted, there = (
        sizes.matrix_parameters(problem),
        sum(each.numel() for each in model.parameters() if each.dim() > 1),
    )
    if there != counted:
        raise UnknownArchitecture(
            f"{problem.model} ({problem.architecture}) has {there} weights in matrices where a dense decoder of its "
            f"sizes has {counted}: operations and memory would be counted wrong"
        )
    for parent in list(model.modules()) if fused_norms else ():
        for name, child in list(parent.named_children()):
            if hasattr(child, "variance_epsilon"):
                setattr(parent, name, FusedNorm(child))
    model.train()
    if problem.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def place_buffers(model: Any, device: torch.device) -> None:
    """Real rotary embeddings in place of those on the meta device."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if any(buffer.is_meta for buffer in child.buffers(recurse=False)):
                with torch.device(device):
                    setattr(parent, name, type(child)(model.config))


def materialise(model: Any, device: torch.device, seed: int) -> None:
    """The whole model on the device, with its initial weights."""
    place_buffers(model, device)
    buffers = dict(model.named_buffers())
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    model.tie_weights()  # each module was given memory of its own
    fill(model, "", seed)


def compile_layers(model: Any) -> None:
    """Each decoder layer through torch.compile: one graph serves all of them. Not the hooks around it, of FSDP and of
    tensor parallelism, which are for the host alone."""
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward)


def causal_mask(problem: TrainStep, device: torch.device) -> torch.Tensor | None:
    """(1, 1, S, S), added to eager attention's scores; sdpa and flash know causality without one.

    Made here because a model that is given a share of the tokens would make one of the share's length.
    """
    if problem.attention != "eager":
        return None
    dtype = getattr(torch, problem.dtype)
    blocked = torch.full((problem.seq_length, problem.seq_length), torch.finfo(dtype).min, dtype=dtype, device=device)
    return blocked.triu_(1)[None, None]
