"""The rows of a chunk in QuACK's linear loss. Without torch."""

from __future__ import annotations

from tpbench.workloads.linear_loss.problem import LinearLoss


def quack_chunk_rows(problem: LinearLoss) -> int | None:
    """Return QuACK's default chunk size, or one near it with which its kernels compile. None if there is none.

    QuACK 0.6.5 raises an error if a chunk has as many rows as the hidden states have columns. It pads the rows of the
    last chunk to a multiple of 128.
    """
    for size in (4096, 8192, 2048, 1024, 512, 256, 128):
        chunks = -(-problem.tokens // size)
        last = problem.tokens - (chunks - 1) * size
        padded = -(-last // 128) * 128
        if problem.hidden != padded and (chunks == 1 or problem.hidden != size):
            return size
    return None
