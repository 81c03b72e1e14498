"""Complete the model that a problem names, by a local folder's config.json. Nothing is downloaded."""

import functools
import hashlib
import importlib
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, cast

from tpbench import packages
from tpbench.settings import JobError, user_path
from tpbench.workloads.train_step.problem import ARCHITECTURE, TrainStep

KNOWN_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Architectures whose sizes need no check by the transformers package, whose import takes seconds."""
_ANSWERS = "tpbench.workloads.train_step.answers"
_SAVING_KEYS = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")
"""Keys that describe how the file was saved. They are not part of the model: the problem sets the trained dtype."""


def resolve(problem: TrainStep, chosen: frozenset[str] = frozenset()) -> TrainStep:
    """Return the problem with the fields of its local folder, if it has one, and with its depth as a number.

    `chosen` names the fields that the command line sets. Those that describe the model become part of its name. Raises
    JobError if transformers has no such dense decoder, and if `chosen` contradicts a folder.
    """
    if "config_hash" in chosen:
        raise JobError("config_hash follows from the model: it cannot be set")
    if problem.dtype == "float16" and "autocast" not in chosen:
        problem = replace(problem, autocast=True)
    changed = [name for name in ARCHITECTURE if name in chosen]
    if problem.model_dir:
        if changed:
            raise JobError(f"model_dir={problem.model_dir} says what the model is: not {', '.join(changed)} too")
        if not packages.installed("transformers"):
            raise JobError(f"model_dir={problem.model_dir} {packages.not_installed(['transformers'])}")
        folder = user_path(problem.model_dir, "model_dir")
        content, path = read(folder), folder.resolve()
        kind, found = str(content["model_type"]), fingerprint(content)
        problem = replace(problem, model=path.name, model_dir=str(path), architecture=kind, config_hash=found)
    elif changed:
        values = ",".join(f"{name}={getattr(problem, name)}" for name in changed)
        problem = replace(problem, model=f"{problem.model}[{values}]")
    # Any key of config.json may have a value with which no model can be made.
    if problem.model_dir or (problem.architecture not in KNOWN_ARCHITECTURES and packages.installed("transformers")):
        problem = TrainStep(**ask("completed", problem))
    return replace(problem, num_layers=problem.depth)


def ask(question: str, problem: TrainStep) -> Any:
    """Return the answer of `train_step.answers`, a process with torch and transformers. Raises its JobError.

    If this process has imported transformers, as a notebook may, it answers itself.
    """
    if "transformers.modeling_utils" in sys.modules:
        return getattr(importlib.import_module(_ANSWERS), question)(problem)
    requests, answers = _answering_process()
    requests.write(json.dumps([question, asdict(problem)]) + "\n")
    requests.flush()
    if not (line := answers.readline()):
        raise RuntimeError("the process that makes models has ended: its last lines of stderr say why")
    answer = json.loads(line)
    if refused := answer.get("refused"):
        raise JobError(refused)
    return answer["result"]


@functools.cache
def _answering_process() -> tuple[IO[str], IO[str]]:
    """Start the process once, and return its input and output. It ends when its input does, with this process."""
    command = [sys.executable, "-m", _ANSWERS]
    # A session of its own, so that Ctrl-C ends this process first.
    pipes = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    return cast("IO[str]", pipes.stdin), cast("IO[str]", pipes.stdout)


def read(folder: Path) -> dict[str, Any]:
    """Return the content of the folder's config.json. Raises JobError if it cannot be read or lacks `model_type`."""
    file = folder / "config.json"
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        may_be_id = len(folder.parts) == 2 and not (folder.is_absolute() or folder.exists())
        hint = f" (of an id: `hf download {folder} config.json --local-dir FOLDER`)" if may_be_id else ""
        raise JobError(f"model_dir={folder}: {file} cannot be read: {error}{hint}") from None
    if not isinstance(content, dict) or "model_type" not in content:
        raise JobError(f"model_dir={folder}: {file} lacks model_type")
    return content


def fingerprint(content: dict[str, Any]) -> str:
    """Return a short hash of the model's content. No other field of the problem has its activations and scalings."""
    model = {name: value for name, value in content.items() if name not in _SAVING_KEYS}
    return hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()[:12]
