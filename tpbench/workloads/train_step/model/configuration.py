"""Make the transformers configuration of a problem: from its sizes, or from the config.json of a local folder."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tpbench.suggestions import nearest
from tpbench.workloads.train_step.model import attention, config_json, sliding_window
from tpbench.workloads.train_step.problem import TrainStep

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Rotary scaling of Llama 3.1 to 3.3; only the factor differs (https://github.com/meta-llama/llama-models)."""


class UnknownArchitecture(TypeError):
    """The model cannot be trained: transformers does not have it, its sizes differ from the problem's, or the variant
    has no plan for it."""


def model_configuration(problem: TrainStep) -> Any:
    """Return the transformers configuration of a problem, with full attention if a window hides no token.

    Raises UnknownArchitecture.
    """
    configuration = _configuration(problem)
    width = sliding_window.window(configuration)
    if width is None or width >= problem.seq_length:
        sliding_window.disable(configuration, problem.tokens)
    elif width != problem.window:
        raise UnknownArchitecture(
            f"{problem.model} has a sliding window of {width} tokens, and the job {problem.window}"
        )
    return configuration


def with_window(problem: TrainStep) -> TrainStep:
    """Return the problem with the window of its model, if that hides tokens. Raises UnknownArchitecture."""
    configuration = _configuration(problem)
    width = sliding_window.window(configuration)
    if width is None or width >= problem.seq_length:
        return replace(problem, window=None, window_layers=0)
    return replace(problem, window=width, window_layers=sliding_window.windowed_layers(configuration))


def _configuration(problem: TrainStep) -> Any:
    _check_exists(problem.architecture)
    common = {"use_cache": False, "attn_implementation": attention.implementation(problem.attention)}
    if problem.model_dir:
        configuration = _from_folder(problem, common)
    else:
        configuration = _from_sizes(problem, common)
        sliding_window.disable(configuration, problem.tokens)  # the problem names no window
    if experts := [name for name, value in configuration.to_dict().items() if "expert" in name and value]:
        raise UnknownArchitecture(
            f"{problem.model} ({problem.architecture}) is a mixture of experts ({experts[0]}), whose operations "
            "tpbench does not count"
        )
    _disable_dropout(configuration)
    return configuration


def _disable_dropout(configuration: Any) -> None:
    """Set the probabilities of dropout to 0: the variants could not draw the same random numbers."""
    for name, value in configuration.to_dict().items():
        if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float):
            setattr(configuration, name, 0.0)


def tied_by_default(architecture: str) -> bool:
    """Return whether embedding and head share a weight in models of this type whose config.json does not say.

    Raises UnknownArchitecture.
    """
    _check_exists(architecture)
    return bool(getattr(AutoConfig.for_model(architecture), "tie_word_embeddings", False))


@contextlib.contextmanager
def refused_by_transformers(complaint: str) -> Iterator[None]:
    """Turn any error of transformers into an UnknownArchitecture: the complaint and the error in one line.

    Transformers itself would also log the whole configuration.
    """
    logger = logging.getLogger("transformers.configuration_utils")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:  # the errors of transformers' validators and model types have no other base class
        said = " ".join(str(error).split())
        raise UnknownArchitecture(f"{complaint}: {type(error).__name__}: {said}") from error
    finally:
        logger.setLevel(level)


def _check_exists(architecture: str) -> None:
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = nearest(architecture, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        raise UnknownArchitecture(
            f"no architecture is called {architecture}{near} (valid: the model types of causal language models "
            f"in transformers {transformers.__version__})"
        )


def _from_folder(problem: TrainStep, common: dict[str, Any]) -> Any:
    """Read the folder's config.json with transformers and set the depth."""
    folder = str(problem.model_dir)
    if problem.config_hash and config_json.fingerprint(config_json.read(Path(folder))) != problem.config_hash:
        raise UnknownArchitecture(
            f"model_dir={folder}: its config.json was changed after this job had been made from it"
        )
    with refused_by_transformers(f"model_dir={folder}: transformers cannot take its config.json"):
        configuration = AutoConfig.from_pretrained(folder, local_files_only=True, **common)
    layer_types = getattr(configuration, "layer_types", None)
    configuration.num_hidden_layers = problem.depth
    if layer_types is not None:
        configuration.layer_types = layer_types[: problem.depth]
    return configuration


def _ffn_names(architecture: str) -> list[str]:
    """Return the names by which a model type calls the width of its feed-forward layer."""
    kind = CONFIG_MAPPING[architecture]
    return ["intermediate_size", *(name for name in ("ffn_dim", "n_inner") if hasattr(kind, name))]


def _from_sizes(problem: TrainStep, common: dict[str, Any]) -> Any:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": problem.rope_theta}
    if problem.rope_factor != 1.0:
        rope |= {"rope_type": "llama3", "factor": problem.rope_factor, **LLAMA3_ROPE}
    with refused_by_transformers(f"transformers cannot make {problem.architecture} of the sizes of {problem.model}"):
        return AutoConfig.for_model(
            problem.architecture,
            hidden_size=problem.hidden_size,
            **dict.fromkeys(_ffn_names(problem.architecture), problem.ffn_size),
            num_hidden_layers=problem.depth,
            num_attention_heads=problem.heads,
            num_key_value_heads=problem.kv_heads,
            head_dim=problem.head_dim,
            vocab_size=problem.vocab,
            tie_word_embeddings=problem.tied,
            rms_norm_eps=problem.norm_eps,
            rope_parameters=rope,
            max_position_embeddings=max(problem.seq_length, LLAMA3_ROPE["original_max_position_embeddings"]),
            # The model type's defaults may lie outside of the vocabulary, of which transformers would warn.
            pad_token_id=None,
            bos_token_id=0,
            eos_token_id=0,
            **common,
        )
