"""Random labels and matrices of the losses: the same numbers at any world size and on any device.

Each number is an integer hash of (seed, stream, global row, global column), converted exactly and rounded once to the
dtype (`tpbench.workloads.hashing`). A rank makes its shard without communication.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpbench.workloads.hashing import hash_index, normal
from tpbench.workloads.sizes import IGNORED

CHUNK = {"cuda": 2**23, "cpu": 2**18}
"""Elements that are computed at once, by type of device. A chunk needs about five temporaries of 4 bytes per element:
160 MiB on a GPU, for few launches. A CPU's chunk fits into its cache."""


def labels(
    seed: int, streams: tuple[int, int], rows: range, vocab: int, ignored: float, device: torch.device
) -> Tensor:
    """Return labels (rows,) int64, uniform over the vocabulary. A share `ignored` of them is IGNORED.

    streams: those of the labels, and of the choice of rows to ignore.
    """
    of_labels, of_ignored = streams
    row = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=device)
    label = (hash_index(seed, of_labels, row) * vocab) >> 32
    return torch.where(hash_index(seed, of_ignored, row) < round(ignored * 2**32), IGNORED, label)


def normal_matrix(
    seed: int,
    streams: tuple[int, int],
    rows: range,
    columns: range,
    dtype: str,
    device: torch.device,
    scale: float = 1.0,
) -> Tensor:
    """Return (rows, columns) approximately normal numbers with standard deviation 2.31 * scale, within +-8 * scale.

    streams: those of the row indices, and of the column indices. rows, columns: parts of a larger matrix. scale: a
    power of two, which rounds nothing.
    """
    out = torch.empty(len(rows), len(columns), dtype=getattr(torch, dtype), device=device)
    row_hash = hash_index(seed, streams[0], torch.arange(rows.start, rows.stop, dtype=torch.int64, device=device))
    column_hash = hash_index(seed, streams[1], torch.arange(columns.start, columns.stop, device=device))
    step = max(1, CHUNK[device.type] // len(columns))
    for top in range(0, len(rows), step):
        chunk = normal(row_hash[top : top + step], column_hash)
        out[top : top + step] = chunk if scale == 1.0 else chunk.mul_(scale)
    return out
