"""Version of the kernels that a variant runs: rows with different versions measured different code.

It is a hash of the syntax trees of the kernel modules that the variant imports, directly or through other modules of
tpbench. Comments, docstrings, the format of the code, names of modules, and other kernels don't count. Files are parsed
and never imported.
"""

import ast
import functools
import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import tpbench

PACKAGE = Path(tpbench.__file__).parent


@functools.cache
def kernels_version(files: tuple[Path, ...], package: Path = PACKAGE) -> str | None:
    """Return the version of the kernels that these files import, or None if they import no Triton kernel of tpbench.

    `package` is the folder of tpbench.
    """
    modules: dict[Path, tuple[list[Path], bool, str]] = {}
    waiting = [path for file in files for path in _module(file, package)[0]]
    while waiting:
        path = waiting.pop()
        if path not in modules:
            modules[path] = _module(path, package)
            waiting += modules[path][0]
    if not any(has_triton for _, has_triton, _ in modules.values()):
        return None
    in_kernels = package / "kernels"
    versions = {
        code for path, (_, has_triton, code) in modules.items() if has_triton or path.is_relative_to(in_kernels)
    }
    return _hash(sorted(versions))[:12]


@functools.cache
def _module(path: Path, package: Path) -> tuple[list[Path], bool, str]:
    """Return the files of tpbench that a module imports, whether it imports triton, and the hash of its code.

    JSON files that the code names belong to the code.
    """
    tree = ast.parse(path.read_bytes())
    tree.body = [node for node in tree.body if getattr(getattr(node, "test", None), "id", "") != "TYPE_CHECKING"]
    nodes = list(ast.walk(tree))
    has_triton = any(name.partition(".")[0] == "triton" for node in nodes for name in imported(node))
    sources = {
        alias: source
        for node in nodes
        for alias in (node.names if isinstance(node, ast.ImportFrom) and imported(node) else ())
        if (source := _source(imported(node)[0], alias.name, package))
    }
    modules = {alias.asname or alias.name for alias, source in sources.items() if alias.name == source.stem}
    names = sorted(f"{alias.name} {alias.asname}" for alias in sources if (alias.asname or alias.name) not in modules)
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    tables = [path.parent / text for text in sorted(texts) if text.endswith(".json")]
    contents = [json.loads(table.read_bytes()) for table in tables if table.is_file()]
    return list(sources.values()), has_triton, _hash([_code(tree, modules), names, contents])


def imported(node: ast.AST) -> list[str]:
    """Return the full names of the modules that an import statement imports. Relative imports are left out."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


@functools.cache
def _source(module: str, name: str, package: Path) -> Path | None:
    """Return the file of tpbench with what `from MODULE import NAME` imports, or None for another package."""
    top, *parts = module.split(".")
    folder = package.joinpath(*parts)
    start = folder / "__init__.py"
    for path in (folder.with_name(f"{folder.name}.py"), folder / f"{name}.py", folder / name / "__init__.py"):
        if top == tpbench.__name__ and path.is_file():
            return path
    if top != tpbench.__name__ or not start.is_file():
        return None
    for node in ast.walk(ast.parse(start.read_bytes())):  # with imports for type checkers: they say where a name is
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            if name == (alias.asname or alias.name):
                return _source(str(node.module), alias.name, package)  # type: ignore[attr-defined]
    return start


def _code(part: Any, modules: Collection[str]) -> Any:
    """Return a part of a syntax tree as lists, equal for all versions of Python.

    Docstrings and imports from tpbench are left out. `modules`: names of imported modules, which all become one word.
    """
    if isinstance(part, list):
        return [_code(item, modules) for item in part if not _is_left_out(item)]
    if not isinstance(part, ast.AST):
        return "module" if part in modules else repr(part)
    unused = "ctx", "kind", "type_comment"
    fields = [field for field in ast.iter_fields(part) if field[0] not in unused and field[1] not in (None, [])]
    return [type(part).__name__, *([name, _code(value, modules)] for name, value in fields)]


def _is_left_out(node: Any) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return any(name.partition(".")[0] == tpbench.__name__ for name in imported(node))


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
