"""Bytes that exchanges send, by formula, from counts of rows.

N rows, d columns, b bytes an element, W ranks; owners' shares equal.
"""

from __future__ import annotations

from collections.abc import Sequence

ID_BYTES, COO_ID_BYTES, COUNT_BYTES, MARK_BYTES = 4, 8, 8, 4
"""A row's number as int32; as int64, which torch's COO tensors have; a count; the mark of a row that was pushed."""


def dense_reduce_scatter(padded_rows: int, row_bytes: int, world_size: int) -> int:
    """N d b (W - 1) / W."""
    return padded_rows * row_bytes * (world_size - 1) // world_size


def dense_all_reduce(padded_rows: int, row_bytes: int, world_size: int) -> int:
    """Twice that."""
    return 2 * dense_reduce_scatter(padded_rows, row_bytes, world_size)


def leaving(counts: Sequence[Sequence[int]]) -> list[int]:
    """From rows by who touched and who owns them: each rank's rows that are not its own."""
    return [sum(row) - row[rank] for rank, row in enumerate(counts)]


def arriving(counts: Sequence[Sequence[int]]) -> list[int]:
    """Each rank's rows that others touched."""
    return [sum(row[rank] for row in counts) - counts[rank][rank] for rank in range(len(counts))]


def busiest(counts: Sequence[Sequence[int]]) -> int:
    """The most rows that a rank sends or receives in an all-to-all, which is what one waits for."""
    return max(*leaving(counts), *arriving(counts))


def sparse_all_to_all(counts: Sequence[Sequence[int]], row_bytes: int) -> list[int]:
    """For each rank: its rows that are not its own with their numbers, and a count for each peer."""
    return [rows * (row_bytes + ID_BYTES) + COUNT_BYTES * (len(counts) - 1) for rows in leaving(counts)]


def sparse_push(counts: Sequence[Sequence[int]], row_bytes: int) -> list[int]:
    """For each rank: its rows that are not its own with their marks."""
    return [rows * (row_bytes + MARK_BYTES) for rows in leaving(counts)]


def sparse_all_gather(counts: Sequence[Sequence[int]], row_bytes: int) -> list[int]:
    """For each rank, to each peer: as many rows as the rank with most, with their numbers, and W counts."""
    peers = len(counts) - 1
    most = max(map(sum, counts))
    return [peers * (most * (row_bytes + COO_ID_BYTES) + COUNT_BYTES * len(counts))] * len(counts)


def sparse_all_reduce(counts: Sequence[Sequence[int]], row_bytes: int) -> list[int]:
    """For each rank, to each peer: its rows with their numbers."""
    return [(len(counts) - 1) * sum(row) * (row_bytes + COO_ID_BYTES) for row in counts]
