"""Rows of a frame as plain dictionaries."""

from __future__ import annotations

from typing import Any

import pandas as pd


def plain_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Each row by column name, in order; what is missing is None, whatever pandas calls it in that column."""
    columns = {}
    for name in frame.columns:
        column = frame[name].astype(object)
        columns[name] = column.where(column.notna(), None).tolist()
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
