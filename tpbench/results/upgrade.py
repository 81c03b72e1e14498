"""Files of an older schema, made into the current one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tpbench.results.schema import SCHEMA_VERSION


@dataclass(frozen=True)
class Upgrade:
    """What changed between a version of the schema and the next. A new column needs no mention: it reads as null."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Old name to new name."""
    removed: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What the rows of the old version would have said in a new column: name to value."""


UPGRADES: dict[int, Upgrade] = {}
"""By the version that each upgrade starts from. A version without an entry differs in nothing that needs one."""


def upgrade(table: pa.Table, version: int) -> pa.Table:
    """Rows of schema `version` as rows of the current one."""
    for step in range(version, SCHEMA_VERSION):
        change = UPGRADES.get(step, Upgrade())
        table = table.select([name for name in table.column_names if name not in change.removed])
        table = table.rename_columns([change.renamed.get(name, name) for name in table.column_names])
        for name, value in change.defaults.items():
            if name not in table.column_names:
                table = table.append_column(name, pa.array([value] * len(table)))
    return table
