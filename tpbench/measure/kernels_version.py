"""Version of the kernels that a variant runs: rows with different versions measured different code.

It is a hash of the modules of tpbench.kernels, and of other modules with kernels, that the variant imports, directly or
through other modules of tpbench. Comments, docstrings, names of modules and other kernels don't count.
"""

import ast
import functools
import hashlib
import re
from pathlib import Path

import tpbench

PACKAGE = Path(tpbench.__file__).parent


@functools.cache
def kernels_version(files: tuple[Path, ...], package: Path = PACKAGE) -> str | None:
    """Return the version of the kernels that these files import, or None if they import no Triton kernel of tpbench."""
    waiting, followed = {name for file in files for name, _ in _module(file)[0]}, set()
    codes: dict[Path, str] = {}
    while waiting:
        followed.add(name := waiting.pop())
        place = package.joinpath(*name.split(".")[1:])
        choices = [path for at in (place, place.parent) for path in (at.with_suffix(".py"), at / "__init__.py")]
        if name.startswith("tpbench.") and (path := next(filter(Path.is_file, choices), None)):
            names, codes[path] = _module(path)
            if path not in choices[:2]:  # one name of a module, whose `import OTHER as OTHER` it doesn't need
                names = {pair for pair in names if pair[1] == place.name or not pair[0].endswith(f".{pair[1]}")}
            waiting |= {full for full, _ in names} - followed
    kernels = {path for path, code in codes.items() if re.search(r"^ *@(triton|gluon)\.jit", code, re.MULTILINE)}
    counted = {code for path, code in codes.items() if path in kernels or package / "kernels" in path.parents}
    return hashlib.sha256("\n".join(sorted(counted)).encode()).hexdigest()[:12] if kernels else None


def imports(tree: ast.AST) -> set[tuple[str, str | None]]:
    """Return the full names that a module imports, each with its alias. Relative imports are left out."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names |= {(module + alias.name, alias.asname) for alias in node.names}
    return names


@functools.cache
def _module(path: Path) -> tuple[set[tuple[str, str | None]], str]:
    """Return what a module imports, and its code with the JSON of the same name beside it."""
    tree, table = ast.parse(path.read_bytes()), path.with_suffix(".json")
    code = re.sub(r"^ *from tpbench.*\n", "", ast.unparse(_WithoutDocstrings().visit(tree)), flags=re.MULTILINE)
    return imports(tree), code + (table.read_text() if table.is_file() else "")


class _WithoutDocstrings(ast.NodeTransformer):
    """Leaves out the statements that are only a text."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node
