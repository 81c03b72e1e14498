"""Formulas for the bytes that each exchange sends, from counts of rows.

In the formulas the table has N rows of d columns with b bytes an element, and W ranks own equal shares. `counts` holds
numbers of touched rows, by the rank that touched them and then the rank that owns them.
"""

from __future__ import annotations

from collections.abc import Sequence

ID_BYTES = 4
"""A row number as int32."""
COO_ID_BYTES = 8
"""A row number as int64, as torch's COO tensors hold it."""
COUNT_BYTES = 8
"""A count of rows."""
MARK_BYTES = 4
"""The mark of a pushed row."""


def dense_reduce_scatter(padded_rows: int, row_bytes: int, world_size: int) -> int:
    """Return N d b (W - 1) / W."""
    return padded_rows * row_bytes * (world_size - 1) // world_size


def dense_all_reduce(padded_rows: int, row_bytes: int, world_size: int) -> int:
    """Return twice the bytes of a reduce-scatter."""
    return 2 * dense_reduce_scatter(padded_rows, row_bytes, world_size)


def leaving(counts: Sequence[Sequence[int]]) -> list[int]:
    """Return for each rank the number of touched rows that other ranks own."""
    return [sum(row) - row[rank] for rank, row in enumerate(counts)]


def arriving(counts: Sequence[Sequence[int]]) -> list[int]:
    """Return for each rank the number of its rows that other ranks touched, once for each of them."""
    return [sum(row[rank] for row in counts) - counts[rank][rank] for rank in range(len(counts))]


def busiest(counts: Sequence[Sequence[int]]) -> int:
    """Return the most rows that any rank sends or receives: an all-to-all waits for that rank."""
    return max(*leaving(counts), *arriving(counts))


def sparse_all_to_all(counts: Sequence[Sequence[int]], row_bytes: int) -> list[int]:
    """Return for each rank: its rows that others own with their numbers, and a count for each peer."""
    return [rows * (row_bytes + ID_BYTES) + COUNT_BYTES * (len(counts) - 1) for rows in leaving(counts)]


def sparse_push(counts: Sequence[Sequence[int]], row_bytes: int) -> list[int]:
    """Return for each rank: its rows that others own with their marks."""
    return [rows * (row_bytes + MARK_BYTES) for rows in leaving(counts)]


def sparse_all_gather(counts: Sequence[Sequence[int]], row_bytes: int) -> list[int]:
    """Return for each rank, times its peers: rows padded to the rank with most, their numbers, and W counts."""
    peers = len(counts) - 1
    most = max(map(sum, counts))
    return [peers * (most * (row_bytes + COO_ID_BYTES) + COUNT_BYTES * len(counts))] * len(counts)


def sparse_all_reduce(counts: Sequence[Sequence[int]], row_bytes: int) -> list[int]:
    """Return for each rank, times its peers: its rows with their numbers."""
    return [(len(counts) - 1) * sum(row) * (row_bytes + COO_ID_BYTES) for row in counts]
