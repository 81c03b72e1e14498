"""Rows of a frame as plain dictionaries."""

from __future__ import annotations

from typing import Any

import pandas as pd


def plain_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return each row as a dictionary by column name. A missing value is None, in columns of every type."""
    columns = {}
    for name in frame.columns:
        column = frame[name].astype(object)
        columns[name] = column.where(column.notna(), None).tolist()
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
