"""`python -m tpbench.outside.describe FILE VERSION`: run a user's file, and print what its workloads are, as JSON.

The launcher starts this process for a file that its command line names. Only this process and the ranks run the file.
"""

import contextlib
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpbench.outside.variant import KINDS, load_module, require_kinds, workloads_of
from tpbench.settings import JobError
from tpbench.workloads import NAMES, Variant, Workload
from tpbench.workloads.definition import definition_of

SIGNATURES = {
    "inputs": ("problem", "rank"),
    "refresh": ("problem", "inputs", "rank"),
    "reference": ("problem", "inputs", "rank"),
    "check": ("problem", "inputs", "output", "rank"),
    "costs": ("problem", "rank"),
    "step": ("problem", "inputs", "prepared", "rank"),
    "details": ("problem", "inputs", "session", "rank"),
    "session": ("problem", "variant", "rank"),
    "variant": ("problem", "inputs", "rank"),
}
"""The arguments of a workload's functions."""


def described(path: Path, version: str) -> dict[str, Any]:
    """Return the workloads of a file, or an error of one line."""
    try:
        module = load_module(path, version)
        return {"workloads": [_workload(workload, path) for workload in workloads_of(module).values()]}
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
        place = f"{path.name}:{frames[-1].lineno}" if frames else path.name
        kind = "" if isinstance(error, JobError) else f"{type(error).__name__}: "
        return {"error": f"{place}: {kind}{str(error).splitlines()[0] if str(error) else ''}"}


def _workload(workload: Workload, path: Path) -> dict[str, Any]:
    name = workload.name
    if name in NAMES or not str(name).isidentifier():
        problem = "is the name of a workload of tpbench" if name in NAMES else "is not an identifier"
        raise JobError(f"{name} {problem}: write Workload(..., name=...)")
    needed = ["inputs"] if "check" in workload.functions else ["inputs", "reference"]
    for what in [] if "session" in workload.functions else needed:
        if what not in workload.functions:
            raise JobError(f"the workload {name} has no {what}: decorate a function with its .{what}")
    for what, function in workload.functions.items():
        _require_signature(what, function)
    if not workload.variants:
        raise JobError(f'the workload {name} has no variants: decorate a function with its .variant("one line")')
    if workload.options or any(variant.options for variant in workload.variants.values()):
        raise JobError(
            f"the workload {name}: options are for workloads of tpbench; refuse values in unsupported_reason"
        )
    try:
        definition = definition_of(workload)
    except (ValueError, TypeError, NameError) as error:
        raise JobError(f"{workload.problem.__name__}: {error}") from None
    return {
        "definition": definition,
        "variants": {variant.name: _variant(variant) for variant in workload.variants.values()},
    }


def _variant(variant: Variant) -> dict[str, Any]:
    _require_signature("variant", variant.prepare)
    traits = {name: getattr(variant, name) for name in KINDS if name not in ("workload", "options")}
    require_kinds(traits, variant.name)
    summary = traits["summary"] or (inspect.getdoc(variant.prepare) or "").partition("\n")[0]
    return {**traits, "summary": summary, "line": inspect.unwrap(variant.prepare).__code__.co_firstlineno}


def _require_signature(what: str, function: Callable[..., Any]) -> None:
    expected = SIGNATURES[what]
    signature = inspect.signature(function)
    if what == "costs" and len(signature.parameters) == 3:
        expected = ("problem", "inputs", "rank")
    try:
        signature.bind(*expected)
    except TypeError:
        raise JobError(
            f"{function.__name__} must take {len(expected)} arguments, as {function.__name__}({', '.join(expected)}), "
            f"not {signature}"
        ) from None


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        description = described(Path(sys.argv[1]), sys.argv[2])
    print(json.dumps(description))
