"""Named tuples that the host passes to the one-pass kernels, and that the kernels pass to their helpers.

Triton accepts a named tuple as one argument and compiles the same code as for its fields one by one.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Specialization(NamedTuple):
    """The constants that a one-pass kernel is compiled for. Kernels receive it as the constant `SPEC`."""

    LOSS: str
    LOGPROB: bool
    """The kernel stores log-probabilities of labels: the negative cross-entropies."""
    GRAD: bool
    """The kernel stores the gradient."""
    REDUCE: bool
    """The kernel stores the sum of the row losses."""
    COUNT: bool
    """The sum and the gradient are divided by the number of rows that count. Without REDUCE the caller counted them."""
    Z_LOSS: bool
    ROWS: int
    """Rows of a tile. A tile has the shape (ROWS, REPEATS, LANES, VECTOR)."""
    REPEATS: int
    """Vectors of a row that one thread holds."""
    LANES: int
    """Threads that share a row of a tile."""
    VECTOR: int
    """Neighbouring columns that one thread copies at once: 16 bytes if ALIGNED, else one column."""
    ROW_WARPS: int
    """Rows of a tile that warps work on side by side."""
    WARPS: int
    """Warps of a program."""
    TILES: int
    """Tiles of a program's part of a row."""
    WORLD: int
    """Ranks that exchange row states."""
    SLOTS: int
    """Parts of a row that each rank sends, a power of two. 0: the programs exchange nothing."""
    FULL: bool
    """Every column of a tile exists."""
    MASKED: bool
    """Some columns of a tile do not belong to the softmax."""
    ALIGNED: bool
    """Sizes, strides of rows and first columns are in whole vectors. Otherwise they are in columns."""
    AHEAD: int
    """Tiles of the next row that are reduced while the words of this row travel."""
    WHOLE: bool
    """A row fills the shared memory of a multiprocessor by itself."""


class Strides(NamedTuple):
    """Strides of the logits, targets and gradient. Those of rows are in vectors if ALIGNED, else all are in elements.

    The strides of labels, which have the shape (rows,), are 0 and are not used.
    """

    logits_row: Any
    logits_column: Any
    target_row: Any
    target_column: Any
    grad_row: Any
    grad_column: Any


class Scales(NamedTuple):
    """Factors of the losses and gradients."""

    k: Any
    """Logits times k are exponents of two: logits_scale * log2(e)."""
    k_t: Any
    """The same factor for target logits: k / temperature."""
    z_loss: Any
    grad_scale: Any
    loss_scale: Any


class Mailbox(NamedTuple):
    """Memory through which the programs of all ranks exchange row states (see `workspace.Workspace`)."""

    words: Any
    """int64 (2, half): the words of this rank. Each half holds (numbers, capacity, RANKS * SLOTS) words."""
    peers: Any
    """int64 (WORLD,): the addresses of all ranks' words."""
    control: Any
    """int32 (2,): the epoch, and the number of programs that are done."""
    failed: Any
    """int32 (1,): set if a wait passed its limit. It may lie in the memory of the host."""
