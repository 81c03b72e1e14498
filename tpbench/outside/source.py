"""The text of a user's file, which is parsed and never run: its version, and the files that it imports."""

import ast
import hashlib
from collections.abc import Collection
from pathlib import Path

from tpbench import packages
from tpbench.measure.kernels_version import imports
from tpbench.settings import JobError
from tpbench.suggestions import unknown

_PACKAGES = {"tpbench", *packages.REQUIRED, *packages.OPTIONAL}


def parsed_files(path: Path) -> dict[Path, ast.Module]:
    """Return the trees of a file and of the files beside it that it imports, directly or through others.

    Checkouts of tpbench or of packages that it uses, which may lie beside the file, too, are left out. Raises JobError
    in one line if there is no such file, or if it isn't Python.
    """
    trees = {path: _parsed(path)}
    waiting = [path]
    while waiting:
        names = {name.partition(".")[0] for name, _ in imports(trees[waiting.pop()])}
        new = [file for name in sorted(names - _PACKAGES) for file in _beside(path, name) if file not in trees]
        trees |= {file: _parsed(file) for file in new}
        waiting += new
    return trees


def uses_triton(path: Path) -> bool:
    """Return true if the file, or a file beside it that it imports, imports triton or tpbench's kernels."""
    names = (name for tree in parsed_files(path).values() for name, _ in imports(tree))
    return any(f"{name}.".startswith(("triton.", "tpbench.kernels.")) for name in names)


def version(path: Path) -> str:
    """Return a hash of a file and of the files beside it that it imports."""
    digest = hashlib.sha256()
    for file in (path, *sorted(parsed_files(path).keys() - {path})):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(path.parent).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:12]


def function(path: Path, name: str, parameters: Collection[str], one_of: Collection[str]) -> str:
    """Return PATH:NAME@VERSION of a function at a file's top level.

    Raises JobError if there is none of that name, if it needs other parameters than these, or has none of `one_of`.
    """
    path = path.resolve()
    functions = {node.name: node.args for node in parsed_files(path)[path].body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        raise JobError(unknown(f"function in {path.name}", name, functions))
    given = functions[name]
    needed = given.args[: len(given.args) - len(given.defaults)]
    needed += [each for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    for parameter in needed:
        if parameter.arg not in parameters:
            raise JobError(f"{path.name}:{name}: {unknown('parameter', parameter.arg, parameters)}")
    if not {parameter.arg for parameter in (*given.posonlyargs, *given.args, *given.kwonlyargs)} & {*one_of}:
        raise JobError(f"{path.name}:{name} must have one of the parameters {', '.join(one_of)}")
    return f"{path}:{name}@{version(path)}"


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
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from None
