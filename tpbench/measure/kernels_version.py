"""Version of the kernels that a variant runs: rows with different versions measured different code.

It is a hash of the syntax trees of the kernel modules that the variant imports, directly or through other modules of
tpbench. Comments, docstrings, the format of the code, names of modules, and other kernels don't count. Files are parsed
and never imported.
"""

import ast
import functools
import hashlib
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import tpbench

PACKAGE = Path(tpbench.__file__).parent
_MODULE = re.compile(r"tpbench(\.\w+)+")
"""A text that names a module, for `importlib`."""
_DATA = re.compile(r"[\w-]+\.json")
"""A text that names a file with choices of launches."""


@functools.cache
def kernels_version(files: tuple[Path, ...], package: Path = PACKAGE) -> str | None:
    """Return the version of the kernels that these files import, or None if they import no Triton kernel of tpbench.

    `package` is the folder of tpbench.
    """
    waiting = [file for path in files for _, file, _ in _imports(ast.parse(path.read_bytes()), package)]
    found: dict[Path, tuple[list[Path], bool, str]] = {}
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path] = _module(path, package)
            waiting += found[path][0]
    if not any(has_triton for _, has_triton, _ in found.values()):
        return None
    return _hash(sorted({digest for _, _, digest in found.values()} - {""}))[:12]


@functools.cache
def _module(path: Path, package: Path) -> tuple[list[Path], bool, str]:
    """Return the files of tpbench that a module imports, whether it imports triton, and the hash of its code.

    The hash is empty for a module that neither holds nor launches kernels. Imports count without their order and
    without the names of modules. JSON files that the module names count, too.
    """
    tree = ast.parse(path.read_bytes())
    imports = list(_imports(tree, package))
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    named = [_found(*text.rpartition(".")[::2], package)[0] for text in texts if _MODULE.fullmatch(text)]
    has_triton = any(name.split(".")[0] == "triton" for node in _statements(tree) for name in imported(node))
    digest = ""
    if has_triton or path.is_relative_to(package / "kernels"):
        modules = {alias.asname or alias.name for alias, _, is_module in imports if is_module}
        names = {(alias.name, alias.asname or "") for alias, _, is_module in imports if not is_module}
        data = [path.with_name(text) for text in sorted(texts) if _DATA.fullmatch(text)]
        tables = [json.loads(file.read_bytes()) for file in data if file.is_file()]
        digest = _hash([_plain(tree, modules), sorted(names), tables])
    return [file for _, file, _ in imports] + [file for file in named if file], has_triton, digest


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def imported(node: ast.AST) -> list[str]:
    """Return the full names of the modules that an import statement imports. Relative imports are left out."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


def _statements(node: Any) -> Iterator[ast.AST]:
    """Yield a statement and those inside, without what only a type checker sees."""
    yield node
    is_for_types = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    for inside in node.orelse if is_for_types else ast.iter_child_nodes(node):
        if not isinstance(inside, ast.expr):
            yield from _statements(inside)


def _imports(tree: ast.AST, package: Path) -> Iterator[tuple[ast.alias, Path, bool]]:
    """Yield each name that is imported from tpbench, with its file, and whether the name is a module."""
    for node in _statements(tree):
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            file, is_module = _found(str(node.module), alias.name, package)  # type: ignore[attr-defined]
            if file:
                yield alias, file, is_module


@functools.cache
def _found(module: str, name: str, package: Path) -> tuple[Path | None, bool]:
    """Return the file with what `from MODULE import NAME` imports, and whether NAME is a module.

    A package's `__init__` may import the name from another module. The file is None if tpbench doesn't have the module.
    """
    top, *parts = module.split(".")
    folder = package.joinpath(*parts)
    places = folder.with_name(f"{folder.name}.py"), folder / f"{name}.py", folder / name / "__init__.py"
    for path, is_module in zip(places, (False, True, True), strict=True):
        if top == tpbench.__name__ and path.is_file():
            return path, is_module
    start = folder / "__init__.py"
    if top != tpbench.__name__ or not start.is_file():
        return None, False
    for node in ast.walk(ast.parse(start.read_bytes())):  # with imports for type checkers: they say where a name is
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            if name == (alias.asname or alias.name):
                return _found(str(node.module), alias.name, package)  # type: ignore[attr-defined]
    return start, False


def _plain(value: Any, modules: Collection[str]) -> Any:
    """Return a part of a syntax tree as lists and dictionaries, equal for all versions of Python.

    Docstrings and imports from tpbench are left out.
    """

    def is_left_out(node: Any) -> bool:
        if isinstance(node, ast.ImportFrom):
            return (node.module or "").partition(".")[0] == tpbench.__name__
        return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)

    if isinstance(value, list):
        return [_plain(item, modules) for item in value if not is_left_out(item)]
    if isinstance(value, ast.AST):
        unused = "ctx", "kind", "type_comment"
        parts = {name: part for name, part in ast.iter_fields(value) if part not in (None, []) and name not in unused}
        if parts.get("id") in modules:
            return "module"
        return [type(value).__name__, {name: _plain(part, modules) for name, part in parts.items()}]
    return "module" if isinstance(value, str) and _MODULE.fullmatch(value) else repr(value)
