"""`python -m tpbench.workloads.train_step.answers`: answer questions about models, in lines of JSON.

The launching side imports neither torch nor transformers, so `model.resolve.ask` starts this process. It ends with its
input.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from tpbench.settings import parse
from tpbench.workloads.train_step.model import builders, configuration
from tpbench.workloads.train_step.model.models import build, counted
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.sharding.plan import blocks


def completed(problem: TrainStep) -> TrainStep:
    """Return the problem with the sizes of its `model_dir`, and with the number of its feed-forward matrices.

    Raises a TypeError or ValueError if there is no such model, or if its sizes do not describe it.
    """
    if problem.model_dir:
        of_file = ".py:" in problem.model_dir
        folder = Path(problem.model_dir)
        fields = (
            builders.problem_fields(problem.model_dir)
            if of_file
            else configuration.folder_sizes(folder, problem.architecture)
        )
        problem = parse(TrainStep, asdict(problem) | fields)
    return counted(problem)


def unsupported_model(problem: TrainStep, module: str) -> str | None:
    """Return why the ranks cannot share the model by its plan, or None if they can. One layer is made, without weights.

    `module`: the module of the train step that would shard it.
    """
    try:
        model = build(replace(problem, num_layers=1, compile=False))
        plan = blocks(problem, model)
    except configuration.UnknownArchitecture as error:
        return str(error)
    reason: str | None = importlib.import_module(f"{__package__}.{module}").unsupported_model(problem, model, plan)
    return reason


QUESTIONS: dict[str, Callable[..., TrainStep | str | None]] = {
    "completed": completed,
    "unsupported_model": unsupported_model,
}


def main() -> None:
    """Answer each line, [QUESTION, PROBLEM, ARGUMENT...], by a line with its result, or with why it is refused."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that nothing that packages and users' files print is taken for an answer
    for line in sys.stdin:
        question, problem, *arguments = json.loads(line)
        try:
            result = QUESTIONS[question](TrainStep(**problem), *arguments)
            answer = {"result": asdict(result) if isinstance(result, TrainStep) else result}
        except (TypeError, ValueError) as error:
            answer = {"refused": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
