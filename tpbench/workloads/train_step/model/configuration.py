"""Make the transformers configuration of a problem: from its sizes, or from the config.json of a local folder."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import AttentionInterface, AutoConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tpbench.settings import JobError
from tpbench.suggestions import nearest
from tpbench.workloads.train_step.model import resolve
from tpbench.workloads.train_step.problem import TrainStep

SIZES = {
    "hidden_size": "hidden_size",
    "ffn_size": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocab": "vocab_size",
}
"""The names of sizes in a configuration, by field of the problem."""
LOCAL = {"local_files_only": True, "trust_remote_code": False}
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Rotary scaling of Llama 3.1 to 3.3; only the factor differs (https://github.com/meta-llama/llama-models)."""
MASKLESS_SDPA = "sdpa_without_masks"
"""Scaled dot-product attention for which transformers makes no mask.

For its own "sdpa", transformers searches the positions of each step for packed sequences. It reads the result on the
host, which waits for the device, and which a CUDA graph cannot hold. Batches of this workload have no packed sequences.
"""

AttentionInterface.register(MASKLESS_SDPA, sdpa_attention_forward)


def model_configuration(problem: TrainStep) -> Any:
    """Return the transformers configuration of a problem, with full attention. Raises JobError."""
    _check_exists(problem.architecture)
    configuration = _from_folder(problem) if problem.model_dir else _from_sizes(problem)
    values = configuration.to_dict()
    if experts := [name for name, value in values.items() if "expert" in name and value]:
        raise JobError(
            f"{problem.title} is a mixture of experts ({experts[0]}), whose operations tpbench does not count"
        )
    window = getattr(configuration, "sliding_window", None)
    if window is not None:
        # A file of conf/model names no window, and a model type ignores settings that its class does not declare.
        declared = problem.model_dir and hasattr(type(configuration), "sliding_window")
        if declared and window < problem.seq_length:
            raise JobError(
                f"{problem.title} has a sliding window of {window} tokens, and tpbench trains full attention only: "
                f"seq_length={window} can be trained, or a config.json with a longer window"
            )
        # Transformers takes a rank's tokens, up to a whole micro-batch, for one sequence. For a window of at most that
        # length it makes a mask, and a mask disables attention's fast kernels. The window cannot be removed: model
        # types with different kinds of layers need one.
        configuration.sliding_window = max(window, problem.tokens + 1)
    configuration.pad_token_id = None  # every token of a batch counts
    for name, value in values.items():
        # The variants could not draw the same random numbers for dropout.
        if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, (int, float)):
            setattr(configuration, name, 0.0)
    return configuration


def folder_sizes(folder: Path, architecture: str) -> dict[str, Any]:
    """Return the fields of the problem that a folder's config.json sets. Raises JobError."""
    _check_exists(architecture)
    with refused_by_transformers(f"model_dir={folder}: transformers cannot take its config.json"):
        configuration = AutoConfig.from_pretrained(str(folder), **LOCAL)
        if hasattr(configuration, "text_config"):
            raise ValueError("it reads more than text; its text_config in a folder of its own can be trained")
        found = {field: getattr(configuration, name) for field, name in SIZES.items()}
        head_dim = getattr(configuration, "head_dim", None) or found["hidden_size"] // found["heads"]
        tied = bool(getattr(configuration, "tie_word_embeddings", False))
        return {**found, "head_dim": head_dim, "tied": tied}


@contextlib.contextmanager
def refused_by_transformers(complaint: str) -> Iterator[None]:
    """Turn any error of transformers into a JobError of one line. Transformers would also log the configuration."""
    logger = logging.getLogger("transformers.configuration_utils")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:  # the errors of transformers' validators and model types have no other base class
        message = " ".join(str(error).split()).partition(" Errors: ")[0]  # without a line for each type of a union
        raise JobError(f"{complaint}: {type(error).__name__}: {message}") from error
    finally:
        logger.setLevel(level)


def _check_exists(architecture: str) -> None:
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = nearest(architecture, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        raise JobError(
            f"no architecture is called {architecture}{near} (valid: the model types of causal language models "
            f"in transformers {transformers.__version__})"
        )


def _from_folder(problem: TrainStep) -> Any:
    folder = str(problem.model_dir)
    if problem.config_hash and resolve.fingerprint(resolve.read(Path(folder))) != problem.config_hash:
        raise JobError(f"model_dir={folder}: its config.json was changed after this job had been made from it")
    with refused_by_transformers(f"model_dir={folder}: transformers cannot take its config.json"):
        configuration = AutoConfig.from_pretrained(folder, **LOCAL, **_common(problem))
    layer_types = getattr(configuration, "layer_types", None)
    configuration.num_hidden_layers = problem.depth
    if layer_types is not None:
        configuration.layer_types = layer_types[: problem.depth]
    return configuration


def _from_sizes(problem: TrainStep) -> Any:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": problem.rope_theta}
    if problem.rope_factor != 1.0:
        rope |= {"rope_type": "llama3", "factor": problem.rope_factor, **LLAMA3_ROPE}
    with refused_by_transformers(f"transformers cannot make {problem.architecture} of the sizes of {problem.model}"):
        return AutoConfig.for_model(
            problem.architecture,
            **{name: getattr(problem, field) for field, name in SIZES.items() if field != "layers"},
            num_hidden_layers=problem.depth,
            head_dim=problem.head_dim,
            tie_word_embeddings=problem.tied,
            rms_norm_eps=problem.norm_eps,
            rope_parameters=rope,
            max_position_embeddings=max(problem.seq_length, LLAMA3_ROPE["original_max_position_embeddings"]),
            # The model type's defaults may lie outside of the vocabulary, of which transformers would warn.
            pad_token_id=None,
            bos_token_id=0,
            eos_token_id=0,
            **_common(problem),
        )


def _common(problem: TrainStep) -> dict[str, Any]:
    """Return what holds for every model, whatever its config.json says: it returns logits alone. tpbench sets the
    weights, so that the initializer only has to be a possible one."""
    return {
        "attn_implementation": MASKLESS_SDPA if problem.attention == "sdpa" else problem.attention,
        "use_cache": False,
        "return_dict": True,
        "output_attentions": False,
        "output_hidden_states": False,
        "initializer_range": 0.02,
    }
