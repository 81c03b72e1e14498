"""Complete a problem's model: read its local folder, name it, and check that transformers makes the counted model."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from tpbench import packages
from tpbench.settings import JobError, parse
from tpbench.workloads.train_step.model import config_json
from tpbench.workloads.train_step.model.config_json import KNOWN_ARCHITECTURES
from tpbench.workloads.train_step.problem import ARCHITECTURE, COMPUTED, TrainStep
from tpbench.workloads.train_step.sharding.styles import parse_mapping


def resolve(problem: TrainStep, chosen: frozenset[str] = frozenset()) -> TrainStep:
    """Return the problem with the fields of its local folder, if it has one, and with its depth as a number.

    `chosen` names the fields that the command line sets. If some of them describe the model, the model's name gains
    them. Raises JobError if the folder describes no dense decoder, if `chosen` contradicts a folder, and if the
    transformers package does not have the model or makes a model of other sizes.
    """
    if "config_hash" in chosen:
        raise JobError("config_hash is of what the model's folder says: it cannot be set")
    if computed := [name for name in COMPUTED if name in chosen]:
        raise JobError(f"{computed[0]} is what the model's layers have: it cannot be set")
    problem = replace(problem, **{name: getattr(TrainStep, name) for name in COMPUTED})
    changed = [name for name in ARCHITECTURE if name in chosen]
    must_check = problem.architecture not in KNOWN_ARCHITECTURES
    if problem.model_dir:
        if changed:
            raise JobError(f"model_dir={problem.model_dir} says what the model is: not {', '.join(changed)} too")
        folder = config_json.model_folder(problem.model_dir)
        content = config_json.read(folder)
        fields = config_json.problem_fields(folder, content)
        if "tp_mapping" in chosen:
            fields.pop("tp_mapping", None)
        if "tied" not in fields:
            fields["tied"] = _tied_by_default(problem.model_dir, fields["architecture"])
        problem = parse(TrainStep, asdict(problem) | fields)
        must_check = problem.architecture not in KNOWN_ARCHITECTURES or bool(content.get("use_sliding_window"))
    elif changed:
        values = ",".join(f"{name}={getattr(problem, name)}" for name in changed)
        problem = replace(problem, model=f"{problem.model}[{values}]")
    parse_mapping(problem.tp_mapping)
    if must_check and packages.installed("transformers"):
        from tpbench.workloads.train_step.model.configuration import with_window
        from tpbench.workloads.train_step.model.models import counted

        try:
            problem = counted(with_window(problem))
        except (TypeError, ValueError) as error:
            raise JobError(str(error)) from None
    return replace(problem, num_layers=problem.depth)


def _tied_by_default(model_dir: str, architecture: Any) -> bool:
    """Return whether models of this type are tied if their config.json does not say.

    Raises JobError if only the transformers package knows and it is not installed.
    """
    if architecture in KNOWN_ARCHITECTURES:
        return False
    if not packages.installed("transformers"):
        raise JobError(
            f"model_dir={model_dir}: config.json lacks tie_word_embeddings, for which only the transformers package "
            f"(not installed) knows the default of {architecture}. To install it: {packages.install_command('train')}"
        )
    from tpbench.workloads.train_step.model.configuration import tied_by_default

    try:
        return tied_by_default(str(architecture))
    except TypeError as error:
        raise JobError(str(error)) from None
