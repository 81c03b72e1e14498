"""Columns of rows, each declared once: the schema, the metrics, the units and the reports follow from it."""

import builtins
import dataclasses
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from tpbench.settings import kinds_of

_UNITS = {"gb_per_s": "GB/s", "tflops": "TFLOP/s", "_ms": "ms", "_kib": "KiB", "_mib": "MiB", "_gib": "GiB"}
"""Units by the end of a column's name."""


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a row."""

    name: str
    type: builtins.type
    """bool, int, float, str, datetime, or list for numbers. object: the type is known from a value only."""
    doc: str
    """The meaning, without the unit."""
    unit: str = ""
    """By default the unit that the name ends with."""
    better: int | None = None
    """1: more is better, -1: less is better, 0: neither. None: a report makes no table of the column."""
    percent: bool = False
    """True if the value is written as a percentage."""
    by_variant: bool = False
    """True if a variant itself may set the column. Everything else of a row is measured."""
    studies: tuple[str, ...] = ()
    """Names of the workload's studies that show the column."""

    def __post_init__(self) -> None:
        unit = next((unit for end, unit in _UNITS.items() if self.name.endswith(end)), "")
        object.__setattr__(self, "unit", self.unit or unit)


GEMM_TFLOPS = Column("gemm_tflops", float, "rate of a large square product in this dtype on this machine")
NCCL_ALGORITHM = Column(
    "nccl_algorithm", str, "what NCCL runs for an all-gather of the step's size: its kernel, or copy engine"
)
"""Columns of several workloads."""


def declared(columns: Iterable[Column] | Mapping[str, str]) -> tuple[Column, ...]:
    """Return columns that a workload declares as such, or in a user's file only by name and meaning."""
    if isinstance(columns, Mapping):
        return tuple(Column(str(name), object, str(meaning)) for name, meaning in columns.items())
    return tuple(columns)


def columns_of_fields(cls: type, *, typed: bool = True) -> list[Column]:
    """Return the columns of the fields of a settings dataclass. Fields with `column=False` have none."""
    hints = typing.get_type_hints(cls) if typed else {}  # fields of a user's problem may change their types
    return [
        Column(field.name, type_of_hint(hints[field.name]) if typed else object, field.metadata["help"])
        for field in dataclasses.fields(cls)
        if field.metadata["column"]
    ]


def type_of_hint(hint: Any) -> type:
    """Return the type of a column for a field's type hint. A choice between words and numbers is text."""
    kinds = kinds_of(hint) - {type(None)}
    if typing.get_origin(hint) is typing.Literal:
        kinds = {type(choice) for choice in typing.get_args(hint)}
    kind = kinds.pop() if len(kinds) == 1 else str
    return kind if kind in (bool, int, float) else str
