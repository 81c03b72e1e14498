"""The decorator `tpbench.api.variant`, and how a file is read without running it: functions, declarations, imports."""

import ast
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from tpbench import packages
from tpbench.measure.kernels_version import imported
from tpbench.settings import JobError
from tpbench.workloads import NAMES

REFUSAL = "_tpbench_unsupported_reason"
"""Attribute of a declared function: its argument `unsupported_reason`, or None."""

_PACKAGES = {"tpbench", *packages.REQUIRED, *packages.OPTIONAL}

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def variant(
    summary: str = "",
    *,
    workload: str = NAMES[0],
    options: Iterable[str] = (),
    requires: Iterable[str] = (),
    requires_cuda: bool = False,
    cpu_only_reason: str = "",
    no_graph_reason: str = "",
    process_settings: str = "",
    uses_triton: bool | None = None,
    unsupported_reason: Callable[[Any, int], str | None] | None = None,
) -> Callable[[FunctionT], FunctionT]:
    """Declare the decorated function as a variant.

    The launcher reads the arguments from the text of the file. Hence all of them but `unsupported_reason` are literals.

    Args:
        summary: one line for `python -m tpbench list`. Empty: the first line of the function's docstring.
        workload: the workload whose operation the function implements.
        options: names of the workload's options that the function honours.
        requires: importable names of the packages without which the variant is skipped.
        requires_cuda: True if the variant is skipped on a CPU.
        cpu_only_reason: why the variant cannot run on GPUs. Empty if it can.
        no_graph_reason: why an iteration cannot be captured in a CUDA graph. Empty if it can.
        process_settings: settings of the whole process that the function changes, such as a switch of torch or an
            environment variable. Its jobs then share their processes with no others. Empty: none.
        uses_triton: True if the kernels run in Triton's interpreter on a CPU. None: if the file imports triton.
        unsupported_reason: `(problem, tp_size) -> str | None`. It returns why the variant cannot run a problem. The
            ranks call it, and the cell is then skipped with that reason.
    """

    def declare(function: FunctionT) -> FunctionT:
        setattr(function, REFUSAL, unsupported_reason)
        return function

    return declare


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    """Return the functions at the top level of a file, by name.

    Raises JobError in one line if there is no such file, or if it isn't Python.
    """
    return {statement.name: statement for statement in _parsed(path).body if isinstance(statement, ast.FunctionDef)}


def declaration(function: ast.FunctionDef, path: Path) -> dict[str, Any] | None:
    """Return the arguments of a function's decorator `variant`, or None without one.

    Raises JobError for an argument that isn't a literal, and for a decorator without parentheses.
    """
    call = next((node for node in function.decorator_list if _name(getattr(node, "func", node)) == "variant"), None)
    if call is None:
        return None
    if not isinstance(call, ast.Call):
        raise JobError(f"{path.name}:{call.lineno}: write @variant() with parentheses")
    named = [("summary", value) for value in call.args[:1]]
    named += [(keyword.arg or "**", keyword.value) for keyword in call.keywords]
    arguments = {}
    for name, value in named:
        try:
            if name != "unsupported_reason":  # only ranks need it
                arguments[name] = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            raise JobError(
                f"{path.name}:{value.lineno}: {name} of @variant must be a literal, because tpbench reads it without "
                "running the file"
            ) from None
    return arguments


def parsed_files(path: Path) -> dict[Path, ast.Module]:
    """Return the trees of a file and of the files beside it that it imports, directly or through others.

    Checkouts of tpbench or of packages that it uses, which may lie beside the file, too, are left out. Raises JobError
    as `functions` does.
    """
    trees = {path: _parsed(path)}
    waiting = [path]
    while waiting:
        names = {name.partition(".")[0] for node in ast.walk(trees[waiting.pop()]) for name in imported(node)}
        new = [file for name in sorted(names - _PACKAGES) for file in _beside(path, name) if file not in trees]
        trees |= {file: _parsed(file) for file in new}
        waiting += new
    return trees


def uses_triton(path: Path) -> bool:
    """Return true if the file, or a file beside it that it imports, imports triton or tpbench's kernels."""
    names = (name for tree in parsed_files(path).values() for node in ast.walk(tree) for name in imported(node))
    return any(f"{name}.".startswith(("triton.", "tpbench.kernels.")) for name in names)


def declares_workload(path: Path) -> bool:
    """Return true if the file, or a file beside it that it imports, makes a `Workload`."""
    nodes = (node for tree in parsed_files(path).values() for node in ast.walk(tree))
    return any(isinstance(node, ast.Call) and _name(node.func) == "Workload" for node in nodes)


def version(path: Path) -> str:
    """Return a hash of a file and of the files beside it that it imports."""
    digest = hashlib.sha256()
    for file in (path, *sorted(parsed_files(path).keys() - {path})):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(path.parent).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:12]


def _beside(path: Path, name: str) -> list[Path]:
    """Return the files of a module or a package of that name beside the file."""
    module, package = path.parent / f"{name}.py", path.parent / name
    return [module] if module.is_file() else sorted(package.rglob("*.py")) if package.is_dir() else []


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        raise JobError(f"{path.name}:{error.lineno or 1}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise JobError(f"{path.name} cannot be parsed as Python: {error}") from None
    except FileNotFoundError:
        raise JobError(f"there is no file {path}") from None
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from None


def _name(function: ast.expr) -> str:
    """Return the name of a function that is called, as `variant` for `variant(...)` and for `api.variant(...)`."""
    return str(getattr(function, "id", getattr(function, "attr", "")))
