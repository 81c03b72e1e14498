"""`python -m tpbench.workloads.train_step.answers`: answer questions about models, in lines of JSON.

The launching side imports neither torch nor transformers, so `model.resolve.ask` starts this process. It ends with its
input.
"""

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tpbench.settings import JobError, parse
from tpbench.workloads.train_step.model import configuration
from tpbench.workloads.train_step.model.models import build
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.sharding.plan import blocks


def completed(problem: TrainStep) -> dict[str, Any]:
    """Return the problem's fields with the sizes of its `model_dir`. Raises JobError if they don't describe a model."""
    if problem.model_dir:
        sizes = configuration.folder_sizes(Path(problem.model_dir), problem.architecture)
        problem = parse(TrainStep, asdict(problem) | sizes)
    configuration.model_configuration(problem)  # the kinds of all layers, of which the model below has one
    build(replace(problem, num_layers=1, compile=False))
    return asdict(problem)


def unsupported_model(problem: TrainStep) -> str | None:
    """Return why ranks cannot share the model by its plan, or None if they can. One layer is made, without weights."""
    try:
        blocks(problem, build(replace(problem, num_layers=1, compile=False)))
    except JobError as error:
        return str(error)
    return None


def main() -> None:
    """Answer each line, [FUNCTION, PROBLEM], by a line with its result, or with why it is refused."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that nothing that packages print is taken for an answer
    for line in sys.stdin:
        question, fields = json.loads(line)
        try:
            answer = {"result": globals()[question](TrainStep(**fields))}
        except JobError as error:
            answer = {"refused": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
