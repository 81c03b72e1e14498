"""Sizes that need no torch: bytes of elements and of collectives, and the columns of a rank."""

IGNORED = -100
"""Label of a row that does not count, as in torch."""


def shard_bounds(vocab: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """Return the columns [start, stop) of a rank. The first vocab % tp_size ranks hold one column more."""
    share, more = divmod(vocab, tp_size)
    start = tp_rank * share + min(tp_rank, more)
    return start, start + share + (tp_rank < more)


def bytes_of_all_reduce(size: int, ranks: int) -> int:
    """Return the bytes that each rank sends in an all-reduce of `size` bytes: once around the ring, and back."""
    return 2 * size * (ranks - 1) // ranks


ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
