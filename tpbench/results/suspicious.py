"""Warnings about rows that could hide other rows: from the future, or two rows of one name."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pyarrow.compute as pc

from tpbench.results.printable import printable

_AHEAD = datetime.timedelta(days=730)
"""Difference that clocks of different machines may have. A clock that is merely wrong gives no warning."""
_TIMES = ("started_at", "finished_at")


def suspicious_rows(table: pa.Table, now: datetime.datetime | None = None) -> list[str]:
    """Return a warning about rows that are dated after `now`, and one about different rows with one row_id.

    A copy of a row is not different. `now` is the present time unless it is given.
    """
    return [*_from_the_future(table, now or datetime.datetime.now(datetime.UTC)), *_of_one_name(table)]


def _from_the_future(table: pa.Table, now: datetime.datetime) -> list[str]:
    limit = pa.scalar(now + _AHEAD, pa.timestamp("us", tz="UTC"))
    later = [pc.fill_null(pc.greater(table.column(name), limit), False) for name in _TIMES]
    names = table.filter(pc.or_(*later)).column("row_id").to_pylist()
    if not names:
        return []
    return [f"{_named(names)}: dated years ahead; of several rows of a cell the one with the latest date counts"]


def _of_one_name(table: pa.Table) -> list[str]:
    names = table.column("row_id")
    counts = pc.value_counts(names.combine_chunks())
    several = counts.field("values").filter(pc.greater(counts.field("counts"), 1)).drop_null()
    if not len(several):
        return []
    copies = table.filter(pc.is_in(names, value_set=several))
    first: dict[str, int] = {}
    firsts = [first.setdefault(name, index) for index, name in enumerate(copies.column("row_id").to_pylist())]
    expected = copies.take(pa.array(firsts))
    if expected.equals(copies):
        return []
    # NaN is not equal to itself, so the text of the values decides.
    pairs = zip(expected.to_pylist(), copies.to_pylist(), strict=True)
    different = [row["row_id"] for row, copy in pairs if repr(row) != repr(copy)]
    if not different:
        return []
    return [f"{_named(different)}: different rows with one row_id; reports may show any of them"]


def _named(names: list[str | None]) -> str:
    distinct = list(dict.fromkeys(printable(str(name)) for name in names))
    return f"row {distinct[0]}{f' and {len(distinct) - 1} more' if len(distinct) > 1 else ''}"
