"""The model that is meant: of a file of conf/model, or of a local folder; and whether the transformers package has it
and makes of it what is counted."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tpbench.settings import JobError, parse
from tpbench.workloads.train_step import folder
from tpbench.workloads.train_step.problem import ARCHITECTURE, TrainStep

_USUAL = ("llama", "qwen3")
"""Architectures that need no look at the transformers package, which takes seconds to import. Their embeddings are not
tied where a folder does not say."""


def resolve(problem: TrainStep, chosen: frozenset[str] = frozenset()) -> TrainStep:
    """The problem with the fields that its folder describes, if it names one, its depth as a number, and a name that
    says which fields of the model were set on the command line (`chosen`). Raises JobError for a folder that describes
    no dense decoder, fields set beside a folder, and models that the transformers package makes otherwise or not.
    """
    if "config_hash" in chosen:
        raise JobError("config_hash is of what the model's folder says: it cannot be set")
    changed = [name for name in ARCHITECTURE if name in chosen]
    looked_at = problem.architecture not in _USUAL
    if problem.model_dir:
        if changed:
            raise JobError(f"model_dir={problem.model_dir} says what the model is: not {', '.join(changed)} too")
        content = folder.read(Path(problem.model_dir))
        found = folder.described(Path(problem.model_dir), content)
        if "tied" not in found:
            found["tied"] = _tied_unsaid(problem.model_dir, found["architecture"])
        problem = parse(TrainStep, asdict(problem) | found)
        looked_at = problem.architecture not in _USUAL or bool(content.get("use_sliding_window"))
    elif changed:
        values = ",".join(f"{name}={getattr(problem, name)}" for name in changed)
        problem = replace(problem, model=f"{problem.model}[{values}]")
    if looked_at and importlib.util.find_spec("transformers"):
        from tpbench.workloads.train_step.models import build, configuration

        try:
            configuration(problem)  # of all layers
            build(replace(problem, num_layers=1))
        except (TypeError, ValueError) as error:
            raise JobError(str(error)) from None
    return replace(problem, num_layers=problem.depth)


def _tied_unsaid(model_dir: str, architecture: Any) -> bool:
    """Whether a model of that type is tied where its folder does not say. Raises JobError where nobody knows."""
    if architecture in _USUAL:
        return False
    if not importlib.util.find_spec("transformers"):
        raise JobError(
            f"model_dir={model_dir}: config.json lacks tie_word_embeddings, for which only the transformers package "
            f"(not installed) knows the default of {architecture}"
        )
    from tpbench.workloads.train_step.models import tied_by_default

    try:
        return tied_by_default(str(architecture))
    except TypeError as error:
        raise JobError(str(error)) from None
