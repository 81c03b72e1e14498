"""The model that is meant: of a file of conf/model, or of a local folder with the config.json of the transformers
package, read without it; and whether that package has it."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tpbench.fields import JobError, parse
from tpbench.workloads.train_step.problem import ARCHITECTURE, TrainStep

_NAMES = {
    "architecture": "model_type",
    "hidden_size": "hidden_size",
    "ffn_size": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
}
_USUAL = ("llama", "qwen3")
"""Architectures that need no look at the transformers package, which takes seconds to import."""


def resolve(problem: TrainStep, chosen: frozenset[str] = frozenset()) -> TrainStep:
    """The problem with the fields that its folder describes, if it names one, its depth as a number, and a name that
    says which fields of the model were set on the command line (`chosen`). Raises JobError for a folder that describes
    no dense decoder, fields set beside a folder, and models that the transformers package makes otherwise or not."""
    changed = [name for name in ARCHITECTURE if name in chosen]
    if problem.model_dir:
        if changed:
            raise JobError(f"model_dir={problem.model_dir} says what the model is: not {', '.join(changed)} too")
        folder = Path(problem.model_dir)
        problem = parse(TrainStep, asdict(problem) | described(folder))
    elif changed:
        values = ",".join(f"{name}={getattr(problem, name)}" for name in changed)
        problem = replace(problem, model=f"{problem.model}[{values}]")
    if problem.architecture not in _USUAL and importlib.util.find_spec("transformers"):
        from tpbench.workloads.train_step.models import build

        try:
            build(replace(problem, num_layers=1))
        except (TypeError, ValueError) as error:
            raise JobError(str(error)) from None
    return replace(problem, num_layers=problem.depth)


def described(folder: Path) -> dict[str, Any]:
    """The architecture's fields, of whatever type the file gives them. Raises JobError for a folder that does not
    describe a dense decoder."""
    file = folder / "config.json"
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JobError(f"model_dir={folder}: {file} cannot be read: {error}") from None
    missing = [name for name in _NAMES.values() if name not in content] if isinstance(content, dict) else ["an object"]
    if missing:
        raise JobError(f"model_dir={folder}: {file} lacks {', '.join(missing)}")
    if experts := [name for name, value in content.items() if "expert" in name and value]:
        raise JobError(f"model_dir={folder}: a mixture of experts ({experts[0]}), whose sizes are not counted")
    hidden, heads = content["hidden_size"], content["num_attention_heads"]
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    try:
        head_dim = content.get("head_dim") or int(hidden) // int(heads)
        theta = float(rope.get("rope_theta") or content.get("rope_theta", 10000.0))
        factor = float(rope.get("factor", 1.0))
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise JobError(f"model_dir={folder}: {file} describes no decoder: {error}") from None
    return {
        **{field: content[name] for field, name in _NAMES.items()},
        "model": folder.resolve().name,
        "model_dir": str(folder.resolve()),
        "kv_heads": content.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "tied": bool(content.get("tie_word_embeddings", False)),
        "rope_theta": theta,
        "rope_factor": factor,
        "norm_eps": content.get("rms_norm_eps", 1e-6),
    }
