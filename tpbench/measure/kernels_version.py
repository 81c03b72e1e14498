"""Version of the kernels that a variant runs: rows with different versions measured different code.

It is a hash of the syntax trees of the kernel modules that the variant imports, directly or through other modules of
tpbench. Comments, docstrings, the format of the code, names of modules, and other kernels don't count. Files are parsed
and never imported.
"""

import ast
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import tpbench

PACKAGE = Path(tpbench.__file__).parent


@functools.cache
def kernels_version(files: tuple[Path, ...], package: Path = PACKAGE) -> str | None:
    """Return the version of the kernels that these files import, or None if they import no Triton kernel of tpbench."""
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
    return _hash(sorted({code for path, (_, has, code) in modules.items() if has or in_kernels in path.parents}))[:12]


@functools.cache
def _module(path: Path, package: Path) -> tuple[list[Path], bool, str]:
    """Return the files of tpbench that a module imports, whether it imports triton, and a hash of its code and JSON."""
    tree = ast.parse(path.read_bytes())
    tree.body = [node for node in tree.body if getattr(getattr(node, "test", None), "id", "") != "TYPE_CHECKING"]
    nodes = list(ast.walk(tree))
    has_triton = any(name.partition(".")[0] == "triton" for node in nodes for name in imported(node))
    own = [node for node in nodes if isinstance(node, ast.ImportFrom) and _is_of_tpbench(node)]
    sources = [_source(str(node.module), alias.name, package) for node in own for alias in node.names]
    names = sorted(f"{alias.name} {alias.asname}" for node in own for alias in node.names)
    texts = {str(node.value) for node in nodes if isinstance(node, ast.Constant) and str(node.value).endswith(".json")}
    tables = [json.loads(file.read_bytes()) for text in sorted(texts) if (file := path.parent / text).is_file()]
    for node in nodes:
        if isinstance(body := getattr(node, "body", None), list):
            docstrings = [item for item in body if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)]
            node.body = [item for item in body if item not in docstrings and item not in own]  # type: ignore[attr-defined]
    return list(filter(None, sources)), has_triton, _hash([ast.unparse(tree), names, tables])


def imported(node: ast.AST) -> list[str]:
    """Return the full names of the modules that an import statement imports. Relative imports are left out."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


def _is_of_tpbench(node: ast.AST) -> bool:
    return any(name.partition(".")[0] == tpbench.__name__ for name in imported(node))


@functools.cache
def _source(module: str, name: str, package: Path) -> Path | None:
    """Return the file with what `from MODULE import NAME` imports from tpbench, or None if there is none."""
    folder = package.joinpath(*module.split(".")[1:])
    start = folder / "__init__.py"
    for path in (folder.with_name(f"{folder.name}.py"), folder / f"{name}.py", folder / name / "__init__.py"):
        if path.is_file():
            return path
    for node in ast.walk(ast.parse(start.read_bytes())) if start.is_file() else ():
        for alias in node.names if isinstance(node, ast.ImportFrom) and _is_of_tpbench(node) else ():
            if name == (alias.asname or alias.name):
                return _source(str(node.module), alias.name, package)  # type: ignore[attr-defined]
    return start if start.is_file() else None


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
