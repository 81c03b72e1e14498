"""`python -m tpbench.outside.describe FILE VERSION`: run a user's file, and print what its variants are, as JSON.

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

from tpbench import packages
from tpbench.outside import source
from tpbench.outside.loading import load_module, variants_of, workloads_of
from tpbench.settings import JobError
from tpbench.suggestions import unknown
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

_SEVERAL = (tuple, list, set, frozenset)
TRAITS: dict[str, Any] = {
    "summary": str,
    "requires": _SEVERAL,
    "options": _SEVERAL,
    "requires_cuda": bool,
    "cpu_only_reason": str,
    "no_graph_reason": str,
    "process_settings": str,
    "uses_triton": bool | None,
}
"""The traits of a variant that the launcher needs, with their types."""


def described(path: Path, version: str) -> dict[str, Any]:
    """Return the fields of `OutsideVariant`, with an error, for each variant of a file, or an error of one line."""
    try:
        module = load_module(path, version)
        definitions = {workload.name: _definition(workload) for workload in workloads_of(module)}
        uses_triton = source.uses_triton(path)
        pairs = variants_of(module)
        return {"variants": [_fields(*pair, definitions.get(pair[0].name), uses_triton) for pair in pairs]}
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
        place = f"{path.name}:{frames[-1].lineno}" if frames else path.name
        package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if package and packages.missing([package]):
            return {"error": f"{place}: it {packages.not_installed([package])}"}
        kind = "" if isinstance(error, JobError) else f"{type(error).__name__}: "
        return {"error": f"{place}: {kind}{str(error).splitlines()[0] if str(error) else ''}"}


def _definition(workload: Workload) -> dict[str, Any]:
    """Return the definition of a workload of the file. Raises JobError for one that cannot be measured."""
    name = workload.name
    if name in NAMES or not str(name).isidentifier():
        problem = "is the name of a workload of tpbench" if name in NAMES else "is not an identifier"
        raise JobError(f"{name} {problem}: write Workload(..., name=...)")
    needed = ["inputs"] if "check" in workload.functions else ["inputs", "reference"]
    for what in [] if "session" in workload.functions else needed:
        if what not in workload.functions:
            raise JobError(f"the workload {name} has no {what}: decorate a function with its .{what}")
    for what, function in workload.functions.items():
        if complaint := _complaint(function, SIGNATURES[what]):
            raise JobError(complaint)
    if not workload.variants:
        raise JobError(f'the workload {name} has no variants: decorate a function with its .variant("one line")')
    if workload.option_defaults or any(variant.options for variant in workload.variants.values()):
        reason = "options are for workloads of tpbench; refuse values in unsupported_reason"
        raise JobError(f"the workload {name}: {reason}")
    try:
        return definition_of(workload)
    except (ValueError, TypeError, NameError) as error:
        raise JobError(f"{workload.problem.__name__}: {error}") from None


def _fields(workload: Workload, variant: Variant, definition: object, uses_triton: bool) -> dict[str, Any]:
    """Return what the launcher knows of a variant as plain data. Raises JobError for a wrong trait."""
    function, of_file = variant.prepare, definition is not None
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)  # func: of a partial
    traits: dict[str, Any] = {}
    for name, kind in TRAITS.items():
        value: Any = getattr(variant, name)
        several = isinstance(value, _SEVERAL)
        if not isinstance(value, kind) or (several and not all(isinstance(text, str) for text in value)):
            raise JobError(f"{name}={value!r:.40} of {variant.name} has the wrong type")
        traits[name] = sorted(value) if several else value
    for option in traits["options"]:
        if option not in (valid := workload.option_defaults):
            raise JobError(f"{variant.name}: {unknown(f'option of {workload.name}', option, valid)}")
    traits["summary"] = traits["summary"] or (inspect.getdoc(function) or "").partition("\n")[0]
    traits["uses_triton"] = traits["uses_triton"] or (uses_triton and (of_file or traits["uses_triton"] is None))
    complaint = _complaint(function, SIGNATURES["variant"] if of_file else ("problem", "shard"))
    if complaint and of_file:
        raise JobError(complaint)
    return {
        "function": variant.name,
        "workload": workload.name,
        "line": code.co_firstlineno if code else 0,
        "declared": traits,
        "definition": definition,
        "error": complaint,
    }


def _complaint(function: Callable[..., Any], expected: tuple[str, ...]) -> str:
    """Return why a function cannot be called with these arguments, or an empty string if it can."""
    signature = inspect.signature(function)
    if expected == SIGNATURES["costs"] and len(signature.parameters) == 3:
        expected = ("problem", "inputs", "rank")
    try:
        signature.bind(*expected)
    except TypeError:
        name = getattr(function, "__name__", "the function")
        wanted = f"{len(expected)} arguments, as {name}({', '.join(expected)})"
        return f"{name} must take {wanted}, not {signature}"
    return ""


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        description = described(Path(sys.argv[1]), sys.argv[2])
    print(json.dumps(description))
