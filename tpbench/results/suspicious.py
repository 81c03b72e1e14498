"""Warnings about rows that could mislead: from the future, two rows of one name, or device times that miss work."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pyarrow.compute as pc

from tpbench.results.printable import printable

_AHEAD = datetime.timedelta(days=730)
"""Difference that clocks of different machines may have. A clock that is merely wrong gives no warning."""
_TIMES = ("started_at", "finished_at")
_LONGER_WAIT, _WAIT_MS = 2.0, 0.1
"""The host may wait for the device for `_LONGER_WAIT` times the device time, and `_WAIT_MS` more. In 74 honest cells of
0.008 to 8 ms on one H200, with and without graphs, it waited at most 0.008 ms longer than the device time."""


def suspicious_rows(table: pa.Table, now: datetime.datetime | None = None) -> list[str]:
    """Return a warning about rows that are dated after `now`, about different rows with one row_id, and about rows
    whose device time misses work.

    A copy of a row is not different. `now` is the present time unless it is given.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    return [*_from_the_future(table, now), *_of_one_name(table), *_with_missed_work(table)]


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


def _with_missed_work(table: pa.Table) -> list[str]:
    """Return a warning about rows on whose GPUs work goes on for long after the end event.

    When a step returns, all its launches are queued. So an honest device is idle after the time of an iteration.
    """
    if not {"time_ms", "launch_ms", "device_ms"} <= {*table.column_names}:
        return []
    wait_ms = pc.subtract(table.column("time_ms"), table.column("launch_ms"))
    limit_ms = pc.add(pc.multiply(table.column("device_ms"), _LONGER_WAIT), _WAIT_MS)
    names = table.filter(pc.greater(wait_ms, limit_ms)).column("row_id").to_pylist()
    if not names:
        return []
    return [
        f"{_named(names)}: the device works for more than twice device_ms after a step has returned, so device_ms "
        "misses work on another stream: let that stream wait for the current one first, and the current one for it last"
    ]


def _named(names: list[str | None]) -> str:
    distinct = list(dict.fromkeys(printable(str(name)) for name in names))
    return f"row {distinct[0]}{f' and {len(distinct) - 1} more' if len(distinct) > 1 else ''}"
