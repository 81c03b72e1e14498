"""The mutants of a source file, made by cosmic-ray: one comparison, operator, constant or condition is changed."""

from __future__ import annotations

import ast
import difflib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

KINDS = re.compile(
    r"core/(AddNot|NumberReplacer|ReplaceAndWithOr|ReplaceOrWithAnd|ReplaceTrueWithFalse|ReplaceFalseWithTrue"
    r"|ReplaceBreakWithContinue|ReplaceContinueWithBreak|ReplaceUnaryOperator_Delete_.*|ReplaceBinaryOperator_.*"
    r"|ReplaceComparisonOperator_(?!(Eq_Is|NotEq_IsNot|Is_Eq|IsNot_NotEq)$).*)"
)
"""Operators of cosmic-ray that are used. `is` in place of `==` is a change of style."""

Position = tuple[int, int]
"""A line and a column."""


@dataclass(frozen=True)
class Mutant:
    package: str
    path: str
    lines: range
    """Lines of the changed statement, or of the head of a changed block."""
    operator: str
    occurrence: int

    def code(self) -> str:
        """Return the changed source."""
        changed = mutate_code(Path(self.path).read_text(), get_operator(self.operator)(), self.occurrence)
        assert changed is not None
        return changed

    def difference(self) -> str:
        """Return the changed lines."""
        before, after = Path(self.path).read_text().splitlines(), self.code().splitlines()
        return "\n".join(list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:])


def all_mutants(package: str, source: Path) -> Iterator[Mutant]:
    """Yield a mutant for each place that can be changed. Of the changes that fit a place one is drawn."""
    for path in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
        tree, plain = get_ast_from_path(path), ast.parse(path.read_text())
        ignored = list(_equivalent(plain))
        places: dict[tuple[Position, Position], list[tuple[str, int]]] = {}
        for name in sorted(filter(KINDS.fullmatch, operator_names())):
            operator = get_operator(name)()
            positions = (position for node in ast_nodes(tree) for position in operator.mutation_positions(node))
            for occurrence, (start, end) in enumerate(positions):
                if not any(first <= start < last for first, last in ignored):
                    places.setdefault((start, end), []).append((name, occurrence))
        draw = random.Random(path.name)
        for (start, _), changes in sorted(places.items()):
            yield Mutant(package, str(path), _statement(plain, start[0]), *draw.choice(changes))


def _equivalent(tree: ast.Module) -> Iterator[tuple[Position, Position]]:
    """Yield the first and last position of each part whose mutants do the same as the code.

    Annotations are not evaluated, nor is what stands under `if TYPE_CHECKING`. An `assert` tells the type checker what
    is known. `frozen=True` and `strict=True` guard against mistakes that right code does not make.
    cosmic-ray adds 1 to a number or subtracts 1, which changes nothing if the number is above a million.
    """
    for node in ast.walk(tree):
        guards = [each.value for each in getattr(node, "keywords", ()) if each.arg in ("frozen", "strict")]
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None), *guards, node):
            large = isinstance(part, ast.Constant) and isinstance(part.value, (int, float)) and part.value > 10**6
            for_types = isinstance(part, ast.Assert) or (
                isinstance(part, ast.If) and "TYPE_CHECKING" in ast.dump(part.test)
            )
            if for_types or (isinstance(part, ast.expr) and (part is not node or large)):
                assert part.end_lineno is not None and part.end_col_offset is not None
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def _statement(tree: ast.Module, line: int) -> range:
    """Return the lines of the smallest statement around a line. Only the head of a block counts."""
    found = range(line, line + 1)
    for node in ast.walk(tree):  # outer statements come first
        if isinstance(node, ast.stmt):
            assert node.end_lineno is not None
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno
            if node.lineno <= line <= last:
                found = range(node.lineno, last + 1)
    return found
