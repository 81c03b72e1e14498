"""Bytes of collectives that go around a ring of ranks."""

from __future__ import annotations


def bytes_of_all_reduce(size: int, ranks: int) -> int:
    """Return the bytes that each rank sends in an all-reduce of `size` bytes: once around the ring, and back."""
    return 2 * size * (ranks - 1) // ranks
