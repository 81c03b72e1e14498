"""Version of the kernels that a variant runs: rows with different versions measured different code.

It is a hash of the syntax trees of the kernel modules that the variant imports, directly or through other modules of
tpbench. Comments, docstrings, the format of the code, names of modules, and other kernels don't count. Files are parsed
and never imported.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import tpbench

PACKAGE = Path(tpbench.__file__).parent
KERNELS = "kernels"
"""Folder of the package that holds kernels and the code that launches them."""
_MODULE = re.compile(r"tpbench(\.\w+)+")
_DATA = re.compile(r"[\w-]+\.json")
_TRITON = re.compile(r"^\s*(import|from) triton\b", re.MULTILINE)
_TEXT = re.compile(rf'"({_MODULE.pattern}|{_DATA.pattern})"')
"""A text that names a module, for `importlib`, or a file with choices of launches."""


@functools.cache
def kernels_version(files: tuple[Path, ...], function: str = "", package: Path = PACKAGE) -> str | None:
    """Return the version of the kernels that these files import, or None if they import no Triton kernel of tpbench.

    With `function`, only imports in that function, and in functions of the same file that it names, count. `package` is
    the folder of tpbench.
    """
    bodies = [_body(_parsed(file), function) for file in files]
    waiting = [file for body in bodies for _, file, _ in _imports(body, package)]
    seen: set[Path] = set()
    digests: set[str] = set()
    has_triton = False
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            imports, module_has_triton, digest = _module(path, package)
            waiting += imports
            has_triton |= module_has_triton
            digests |= {digest} - {""}
    return hashlib.sha256(json.dumps(sorted(digests)).encode()).hexdigest()[:12] if has_triton else None


def _parsed(file: Path) -> ast.Module:
    """Return the syntax tree of a file, or an empty one if it cannot import kernels: an installed package may have
    thousands of files, and files that are not Python of this version."""
    content = file.read_bytes()
    try:
        return ast.parse(content if tpbench.__name__.encode() in content else b"")
    except (SyntaxError, ValueError):
        return ast.parse(b"")


def _body(tree: ast.Module, function: str) -> list[ast.stmt]:
    """Return the body of the function and of the functions of its module that it names, or the whole module."""
    functions = {node.name: node.body for node in tree.body if isinstance(node, ast.FunctionDef)}
    if function not in functions:
        return tree.body
    body: list[ast.stmt] = []
    names = {function}
    while names:
        statements = functions.pop(names.pop())
        body += statements
        nodes = (node for statement in statements for node in ast.walk(statement))
        names |= functions.keys() & {node.id for node in nodes if isinstance(node, ast.Name)}
    return body


@functools.cache
def _module(path: Path, package: Path) -> tuple[list[Path], bool, str]:
    """Return the files of tpbench that a module imports, whether it imports triton, and the hash of its code.

    The hash is empty for a module that neither holds nor launches kernels.
    """
    source = path.read_text()
    tree = ast.parse(source)
    texts = {match[1] for match in _TEXT.finditer(source)}
    named = [_found(*text.rpartition(".")[::2], package)[0] for text in texts if _MODULE.fullmatch(text)]
    imports = list(_imports(tree.body, package))
    has_triton = _TRITON.search(source) is not None
    digest = ""
    if has_triton or path.is_relative_to(package / KERNELS):
        data = [path.with_name(text) for text in sorted(texts) if _DATA.fullmatch(text)]
        digest = _digest(tree, imports, [file for file in data if file.is_file()])
    files = [file for _, file, _ in imports] + [file for file in named if file]
    return files, has_triton, digest


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield these statements and those inside, without what only a type checker sees."""
    for statement in body:
        yield statement
        test = getattr(statement, "test", None)
        is_for_types = isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"
        for name in ("orelse",) if is_for_types else ("body", "orelse", "handlers", "finalbody", "cases"):
            inside = getattr(statement, name, ())
            yield from _statements(inside if isinstance(inside, list) else ())


def _imports(body: Iterable[ast.AST], package: Path) -> Iterator[tuple[ast.alias, Path, bool]]:
    """Yield each name that is imported from tpbench, with its file, and whether the name is a module."""
    for statement in _statements(body):
        for alias in statement.names if isinstance(statement, ast.ImportFrom) else ():
            file, is_module = _found(statement.module or "", alias.name, package)  # type: ignore[attr-defined]
            if file:
                yield alias, file, is_module


@functools.cache
def _found(module: str, name: str, package: Path) -> tuple[Path | None, bool]:
    """Return the file with what `from MODULE import NAME` imports, and whether NAME is a module.

    A package's `__init__` may import the name from another module. The file is None if tpbench doesn't have the module.
    """
    top, *parts = module.split(".")
    if top != tpbench.__name__:
        return None, False
    folder = package.joinpath(*parts)
    for path, is_module in (
        (folder.parent / f"{folder.name}.py", False),
        (folder / f"{name}.py", True),
        (folder / name / "__init__.py", True),
    ):
        if path.is_file():
            return path, is_module
    start = folder / "__init__.py"
    if not start.is_file():
        return None, False
    for node in ast.walk(ast.parse(start.read_bytes())):  # with imports for type checkers: they say where a name is
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            if name == (alias.asname or alias.name):
                return _found(node.module or "", alias.name, package)  # type: ignore[attr-defined]
    return start, False


def _digest(tree: ast.Module, imports: Iterable[tuple[ast.alias, Path, bool]], data: Iterable[Path]) -> str:
    """Return a hash of a module's syntax tree and of JSON files.

    Imports of tpbench's modules count without their order and without the names of the modules.
    """
    modules, names = set(), set()
    for alias, _, is_module in imports:
        if is_module:
            modules.add(alias.asname or alias.name)
        else:
            names.add((alias.name, alias.asname or ""))
    content = [_plain(tree, modules), sorted(names), [json.loads(file.read_bytes()) for file in data]]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _plain(value: Any, modules: Collection[str]) -> Any:
    """Return a part of a syntax tree as lists and dictionaries, equal for all versions of Python."""
    if isinstance(value, list):
        return [_plain(item, modules) for item in value if not _is_left_out(item)]
    if isinstance(value, ast.AST):
        parts = {name: part for name, part in ast.iter_fields(value) if part not in (None, []) and name not in _UNUSED}
        if parts.get("id") in modules:
            return "module"
        return [type(value).__name__, {name: _plain(part, modules) for name, part in parts.items()}]
    return "module" if isinstance(value, str) and _MODULE.fullmatch(value) else repr(value)


_UNUSED = ("ctx", "kind", "type_comment")


def _is_left_out(node: Any) -> bool:
    """Return True for a docstring and for an import from tpbench."""
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] == tpbench.__name__
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
