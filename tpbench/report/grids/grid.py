"""Grids of records: problems by variants, from which tables and plots are made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from tpbench.report.grids.records import Record, column_label, is_measurement, value_text

Key: TypeAlias = tuple[Any, ...]
_EARLIEST = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class GridRow:
    """One problem: the values of its keys, and a record for each column (None: never run)."""

    key: Key
    records: tuple[Record | None, ...]


def _newest(records: Sequence[Record | None]) -> Record | None:
    """Return the newest measurement, or the newest record if none is a measurement."""
    found = [record for record in records if record]
    return max(found, key=lambda record: (is_measurement(record), record["finished_at"] or _EARLIEST), default=None)


class GridCell(NamedTuple):
    """A record with its place in a grid."""

    key: Key
    column_index: int
    column: str
    record: Record


@dataclass(frozen=True)
class RecordGrid:
    """Records of one workload on one kind of hardware: a row for each problem, a column for each variant."""

    workload: str
    facts: dict[str, str]
    """Values that all records share, by name. They are safe to print."""
    key_names: tuple[str, ...]
    """Fields that are the keys of a row."""
    columns: tuple[str, ...]
    """Names of the columns: a variant and the options that it was run with. They are safe to print."""
    rows: tuple[GridRow, ...]
    derived: frozenset[str] = frozenset()
    """Names among `key_names` whose values follow from other fields."""
    tie_breaking_keys: frozenset[str] = frozenset()
    """Names among `key_names` that are no part of the problem. They distinguish rows of one cell."""

    @property
    def heading(self) -> str:
        """The facts as one line."""
        return heading(self.facts)

    @cached_property
    def independent(self) -> tuple[int, ...]:
        """Indices of the keys that are not derived."""
        return tuple(at for at, name in enumerate(self.key_names) if name not in self.derived)

    @cached_property
    def varying(self) -> tuple[int, ...]:
        """Indices of the independent keys in which rows differ, or all independent keys if no row differs."""
        return tuple(at for at in self.independent if len({row.key[at] for row in self.rows}) > 1) or self.independent

    @cached_property
    def problems(self) -> RecordGrid:
        """The same grid without tie-breaking keys: one row for each problem, with the newest record of each column.

        A cell that was measured again with other settings, such as a time budget, makes no other problem.
        """
        if not self.tie_breaking_keys:
            return self
        kept = [at for at, name in enumerate(self.key_names) if name not in self.tie_breaking_keys]
        groups: dict[Key, list[GridRow]] = defaultdict(list)
        for row in self.rows:
            groups[tuple(row.key[at] for at in kept)].append(row)
        rows = tuple(
            GridRow(key, tuple(map(_newest, zip(*(row.records for row in alike), strict=True))))
            for key, alike in groups.items()
        )
        names = tuple(self.key_names[at] for at in kept)
        return replace(self, key_names=names, rows=rows, tie_breaking_keys=frozenset())

    def distinguishing_keys(self, indices: Sequence[int]) -> tuple[int, ...]:
        """Return the keys that are needed to tell the rows apart.

        Leave out a key whose value is determined by a kept key, such as the layers by the model. Of two keys that
        determine each other, the one with text values is kept.
        """
        kept: list[int] = []
        for at in sorted(indices, key=lambda at: not self.has_text_values(at)):
            if not any(self.is_determined_by(at, other) for other in kept):
                kept.append(at)
        return tuple(at for at in indices if at in kept)

    def has_text_values(self, at: int) -> bool:
        """Return true if the values of a key are text."""
        return any(isinstance(row.key[at], str) for row in self.rows)

    def is_determined_by(self, at: int, other: int) -> bool:
        """Return true if each value of the key `other` has one value of the key `at`, and not by chance.

        A model has one number of layers. If each number of tokens was measured with one distribution, that is chance.
        So `other` must have text values, or the two keys must determine each other.
        """
        pairs = {(row.key[at], row.key[other]) for row in self.rows}
        implied, implying = (len({pair[part] for pair in pairs}) == len(pairs) for part in (1, 0))
        return implied and (implying or self.has_text_values(other))

    def cells(self) -> Iterator[GridCell]:
        """Iterate over the records with their places, problem by problem."""
        for row in self.rows:
            for index, (column, record) in enumerate(zip(self.columns, row.records, strict=True)):
                if record:
                    yield GridCell(row.key, index, column, record)

    def problem_text(self, key: Key, indices: Sequence[int] | None = None) -> str:
        """Return the independent keys of a row as text, or only the keys at `indices`."""
        return " ".join(
            f"{column_label(self.key_names[at])}={value_text(key[at])}" for at in indices or self.independent
        )


@dataclass(frozen=True)
class RecordGrids:
    """All rows of a frame, arranged in grids."""

    grids: tuple[RecordGrid, ...]
    records: tuple[Record, ...]
    """The arranged rows, in the order of the frame."""


def heading(facts: dict[str, str]) -> str:
    """Return facts as one line. Names and kinds stand alone, numbers with their name."""
    bare = {"workload", "device", "hardware", "loss", "dtype"}
    return ", ".join(value if name in bare else f"{name}={value}" for name, value in facts.items())
