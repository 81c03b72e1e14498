"""The transformer block's problem: its fields, linears and norms, and what a step must compute, move and send."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tpbench.settings import setting
from tpbench.workloads.sizes import ITEM_BYTES

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ShardedLinear:
    """Sizes of a linear y = x W^T with W (sum(out_features), in_features), sharded over ranks."""

    name: str
    kind: Literal["column", "row"]
    """column: each rank holds a share of each part's rows of W. row: each rank holds a share of W's columns."""
    in_features: int
    out_features: tuple[int, ...]
    """Sizes of the parts that share the input, such as q, k and v. Each part is sharded by itself."""

    def rows(self, rank: int, size: int) -> list[range]:
        """Return the rows of W that a rank holds, in the order in which it holds them."""
        if self.kind == "row":
            return [range(sum(self.out_features))]
        ends = itertools.accumulate(self.out_features)
        parts = zip(ends, self.out_features, strict=True)
        return [equal_share(range(end - features, end), rank, size) for end, features in parts]

    def columns(self, rank: int, size: int) -> range:
        """Return the columns of W that a rank holds."""
        whole = range(self.in_features)
        return equal_share(whole, rank, size) if self.kind == "row" else whole

    def local_shape(self, size: int) -> tuple[int, int]:
        """Return the (rows, columns) of one rank's part of W."""
        return sum(map(len, self.rows(0, size))), len(self.columns(0, size))

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """Return a contiguous copy of a rank's part of the full W."""
        import torch

        columns = self.columns(rank, size)
        return torch.cat([full[rows.start : rows.stop, columns.start : columns.stop] for rows in self.rows(rank, size)])


def equal_share(whole: range, rank: int, size: int) -> range:
    """Return the rank-th of `size` equal parts of a range. Raise ValueError if `size` does not divide its length."""
    length, rest = divmod(len(whole), size)
    if rest:
        raise ValueError(f"{len(whole)} features cannot be shared equally by {size} ranks")
    return whole[rank * length : (rank + 1) * length]


@dataclass(frozen=True)
class TpBlock:
    """The sizes of the block, the part to measure, and the variants' options."""

    tokens: int = setting(help="length of the one causal sequence", low=1)
    hidden: int = setting(help="width of the activations between layers", low=1)
    ffn: int = setting(help="width inside the MLP", low=1)
    heads: int = setting(help="query heads", low=1)
    kv_heads: int = setting(help="key and value heads, each for heads / kv_heads queries", low=1)
    head_dim: int = setting(help="width of a head", low=1)
    part: Literal["block", "mlp", "column", "row"] = setting(
        "block", help="block (all of it), mlp, column (first linear of the MLP), row (last linear of the MLP)"
    )
    dtype: Literal["bfloat16", "float32", "float64"] = setting("bfloat16", help="dtype of activations and weights")
    seed: int = setting(0, help="seed of activations and weights", low=0, high=2**31 - 1)
    save_gathered: bool = setting(
        True, help="keep gathered inputs for the backward pass; false: gather them again", option="ignored"
    )
    signals: Literal["stream", "kernel"] = setting(
        "stream",
        help="block_copy_engine and block_fused: how ranks signal their copies; graph=true sets kernel",
        option="ignored",
        with_graph="kernel",
    )
    rotary: bool = setting(False, help="rotate queries and keys by their positions, as Llama does; layers=N sets true")
    layers: int = setting(0, help="blocks to train with AdamW; 0: one block, forward and backward only", low=0)
    steps: int = setting(10, help="measured training steps (layers=N)", low=1)
    warmup_steps: int = setting(3, help="training steps before the measured ones (layers=N)", low=0)
    learning_rate: float = setting(1e-4, help="AdamW's learning rate (layers=N)", low=0.0)
    compile: bool = setting(False, help="use torch.compile for what lies between the linears", option="ignored")
    nccl: Literal["default", "symmetric", "copy_engine"] = setting(
        "default", help="block_tp: how NCCL gathers", option="ignored"
    )

    def check(self, tp_size: int, dp_size: int) -> list[str]:
        """Return complaints about fields that do not fit together."""
        shared = {"tokens": self.tokens, "ffn": self.ffn}
        if self.part == "block":
            shared |= {"heads": self.heads, "kv_heads": self.kv_heads}
        complaints = [
            f"{name}={value} must be divisible by tp_size={tp_size}"
            for name, value in shared.items()
            if value % tp_size
        ]
        if self.heads % self.kv_heads:
            complaints.append(f"heads={self.heads} must be divisible by kv_heads={self.kv_heads}")
        if self.rotary and self.head_dim % 2:
            complaints.append(f"head_dim={self.head_dim} must be even: rotary embeddings rotate pairs of numbers")
        if self.layers and self.part != "block":
            complaints.append(f"layers={self.layers} needs part=block: a stack has whole blocks")
        if not self.layers:
            names = ("steps", "warmup_steps", "learning_rate")
            chosen = {name: value for name in names if (value := getattr(self, name)) != getattr(TpBlock, name)}
            complaints += [f"{name}={value} needs layers=N: one block is not trained" for name, value in chosen.items()]
        if dp_size != 1:
            complaints.append(f"dp_size={dp_size} must be 1: replicas of a block do not communicate")
        return complaints

    @property
    def linears(self) -> tuple[ShardedLinear, ...]:
        """The linears of the part, in the order of the forward pass."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = (
            ShardedLinear("qkv", "column", self.hidden, (queries, keys, keys)),
            ShardedLinear("out", "row", queries, (self.hidden,)),
        )
        mlp = (
            ShardedLinear("up", "column", self.hidden, (self.ffn, self.ffn)),
            ShardedLinear("down", "row", self.ffn, (self.hidden,)),
        )
        single = ShardedLinear("up", "column", self.hidden, (self.ffn,))
        return {"block": attention + mlp, "mlp": mlp, "column": (single,), "row": mlp[1:]}[self.part]

    @property
    def norms(self) -> tuple[str, ...]:
        """The RMSNorms of the part."""
        return ("attention_norm", "mlp_norm") if self.part == "block" else ()


TOLERANCE = {"bfloat16": 2.0**-4, "float32": 2.0**-14, "float64": 2.0**-38}
"""Largest accepted error of a row, as `oracle.compare` defines it.

In bf16 about a dozen tensors between input and output are rounded one after the other. Each rounding errs by up to
2^-9, and by more where terms cancel: a row errs by about 2^-7, the worst of many rows by 2^-6, of few tokens by 2^-5. A
lost or doubled partial sum, chunk or gather is an error of order 1. fp32 and fp64 err by about 2^-18 and 2^-46."""


def flops(problem: TpBlock, size: int) -> int:
    """Return the floating-point operations of a rank: two products in the backward pass for each in the forward pass.

    Causal attention counts half of its square. What its backward pass computes again does not count.
    """
    attention = 2 * problem.tokens**2 * problem.head_dim * problem.heads // size if problem.part == "block" else 0
    return 3 * max(1, problem.layers) * (2 * problem.tokens * linear_weights(problem, size) + attention)


def bytes_moved(problem: TpBlock, size: int) -> int:
    """Return the unavoidable bytes through the memory of one of `size` ranks.

    Input, weights and the output's gradient are read once. The output and the other gradients are written once. A
    training step reads and writes each weight and its two states of AdamW; gradients of weights need not be stored.
    """
    weights = linear_weights(problem, size) + problem.hidden * len(problem.norms)
    first, last = problem.linears[0], problem.linears[-1]
    ends = problem.tokens * (first.in_features + sum(last.out_features)) // size
    return 2 * ITEM_BYTES[problem.dtype] * ((3 * problem.layers or 1) * weights + ends)


def bytes_sent(problem: TpBlock, size: int, *, least: bool = False) -> int:
    """Return the bytes that one of `size` ranks sends.

    Each linear gathers or scatters a (tokens, hidden) matrix in the forward pass and one in the backward pass. A rank
    sends the fraction (size - 1) / size of it. Column-parallel linears without `save_gathered` gather their input
    again; `least` does not count these. All-reduces of the norms' gradients count twice their size.
    """
    again = 0 if problem.save_gathered or least else sum(linear.kind == "column" for linear in problem.linears)
    matrices = (2 * len(problem.linears) + again) * problem.tokens
    per_block = (matrices + 2 * len(problem.norms)) * problem.hidden * ITEM_BYTES[problem.dtype] * (size - 1) // size
    return max(1, problem.layers) * per_block


def linear_weights(problem: TpBlock, size: int) -> int:
    """The elements of a rank's part of all linear weights."""
    return sum(rows * columns for rows, columns in (linear.local_shape(size) for linear in problem.linears))


QUACK_ROWS = 128
"""Rows of a tile of QuACK's product."""


def unsupported_by_quack(problem: TpBlock, size: int) -> str | None:
    """Return why QuACK's overlapped all-gather cannot run the problem on `size` ranks, or None if it can."""
    if problem.dtype != "bfloat16":
        return f"QuACK's product needs bfloat16, got {problem.dtype}"
    if problem.tokens % (QUACK_ROWS * size):
        return f"QuACK's tiles need tokens that {QUACK_ROWS} * tp_size={QUACK_ROWS * size} divides"
    widths = [width for linear in problem.linears for width in linear.local_shape(size)]
    if odd := [width for width in widths if width % 8]:
        return f"QuACK's product needs widths of a rank's weights that 8 divides, got {odd[0]}"
    return None
