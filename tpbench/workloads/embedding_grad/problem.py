"""The embedding gradient's problem: its fields and what a row and a report say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tpbench.settings import setting
from tpbench.workloads import Option, Pivot, Study, Workload

PHASES = ("counts", "ids", "gather", "values", "merge", "reduce")
"""What an iteration consists of; a variant has some of them."""

Distribution = Literal["uniform", "zipf", "bigram", "fixed", "one_owner", "one_rank", "none"]


@dataclass(frozen=True)
class EmbeddingGrad:
    """The problem: table, tokens and how they fall on rows; then the stand-in backward and the variants' options."""

    table_rows: int = setting(help="rows of the embedding table", low=1, high=2**31 - 1)
    width: int = setting(help="columns of the embedding table", low=1)
    tokens: int = setting(help="tokens of a rank in one accumulated step", low=1)
    accumulate: int = setting(1, help="steps whose gradients add up before they are exchanged", low=1)
    distribution: Distribution = setting("uniform", help="how tokens fall on rows")
    duplicates: float = setting(0.0, help="share of tokens on a row that has one (distribution=fixed)", low=0, high=1)
    dtype: Literal["bfloat16", "float16", "float32"] = setting("bfloat16", help="dtype of the gradient")
    seed: int = setting(0, help="seed of the inputs", low=0, high=2**31 - 1)
    overlap_ms: float = setting(
        0.0,
        help="length of a stand-in backward, after a forward of half of it, beside which transfers may run",
        low=0.0,
    )
    transfers: Literal["early", "late", "beside"] = setting(
        "early",
        help="transfers beside the stand-in: what needs no gradient, none (nor does the host begin), or all (the "
        "gradient is ready)",
    )
    merge: Literal["triton", "index_add"] = setting("triton", help="how received rows are added to the owner's")
    pinned: bool = setting(True, help="row numbers go to the GPU through pinned memory, asynchronously")

    @property
    def tokens_a_rank(self) -> int:
        """Tokens of one rank over all accumulated steps."""
        return self.tokens * self.accumulate

    @property
    def distinct_fixed(self) -> int:
        """Distinct rows of one rank under distribution=fixed."""
        return round(self.tokens_a_rank * (1.0 - self.duplicates))

    def check(self, tp_size: int, dp_size: int) -> list[str]:
        """What is wrong with the fields taken together."""
        complaints = []
        if tp_size != 1:
            complaints.append(f"tp_size={tp_size} must be 1: the ranks of this workload are data parallel (dp_size)")
        if dp_size < 2:
            complaints.append(f"dp_size={dp_size} must be at least 2: one rank has nothing to exchange")
        if self.transfers != "early" and not self.overlap_ms:
            complaints.append(
                f"transfers={self.transfers} needs overlap_ms: without a stand-in there is no early or late"
            )
        if self.duplicates and self.distribution != "fixed":
            complaints.append(f"duplicates={self.duplicates} needs distribution=fixed")
        if self.distribution == "fixed" and not 1 <= self.distinct_fixed <= self.table_rows:
            complaints.append(
                f"tokens={self.tokens} accumulate={self.accumulate} duplicates={self.duplicates} make "
                f"{self.distinct_fixed} distinct rows, not between 1 and table_rows={self.table_rows}"
            )
        return complaints


def expected_density(row: Mapping[str, Any]) -> float | None:
    """Touched rows of a rank over table_rows, to three digits: by the distribution where it says, else as counted."""
    rows, tokens = row["table_rows"], row["tokens"] * row["accumulate"]
    if row["distribution"] == "uniform":
        return float(f"{1 - (1 - 1 / rows) ** tokens:.3g}")
    if row["distribution"] == "fixed":
        return float(f"{round(tokens * (1 - row['duplicates'])) / rows:.3g}")
    return None if row.get("density") is None else float(f"{row['density']:.3g}")


WORKLOAD = Workload(
    name="embedding_grad",
    summary="mean over data-parallel ranks of a sparsely touched embedding gradient, sharded over owners",
    problem=EmbeddingGrad,
    headline=("table_rows", "width", "tokens"),
    columns={
        "table_rows": "rows of the embedding table",
        "width": "columns of the embedding table",
        "accumulate": "steps whose gradients add up before they are exchanged",
        "distribution": "how tokens fall on rows",
        "duplicates": "share of tokens on a row that has one (distribution=fixed)",
        "seed": "seed of the inputs",
        "overlap_ms": "length asked for of the stand-in backward, after a forward of half of it, ms",
        "transfers": "which transfers run beside the stand-in",
        "merge": "how received rows are added to the owner's",
        "pinned": "whether row numbers go to the GPU through pinned memory",
        "density": "distinct rows that a rank touched over table_rows, mean over ranks",
        "duplicate_rate": "share of tokens whose row had one already, mean over ranks",
        "grad_norm": "norm of the right mean gradient, all owners' together",
        "rank_bytes_sent": "bytes that each rank handed to collectives for its peers, by count",
        "rank_bytes_received": "bytes that each rank's peers handed to collectives for it, by count",
        "workspace_gib": "memory shared with peers that the variant keeps between iterations, GiB",
        "chosen": "dense or sparse: what the variant did",
        "all_to_all_gb_per_s": "bandwidth of a large all-to-all on this machine, bytes that a rank sends",
        "reduce_scatter_gb_per_s": "bandwidth of the dense reduce-scatter on this machine, bytes that a rank sends",
        "latency_ms": "time of an all-to-all of one row a peer on this machine",
        "upload_gb_per_s": "bandwidth of a copy of row numbers from pinned memory to the GPU (null on a CPU)",
        "crossover_density": "density above which the variant goes dense, as calibrated (sparse_auto)",
        "predicted_crossover": "density at which sparse and dense should take equal time, by the formula",
        "exchange_gb_per_s": "bytes that the busiest rank sent over the time of an iteration",
        "stand_in_ms": "the stand-in forward and backward alone, as measured, ms",
        "exposed_ms": "an iteration's time beyond the stand-in's, ms",
        "early_wall_ms": "wall time of the phases that need no gradient, which a backward pass can hide, ms",
        "late_wall_ms": "wall time of the phases that need the gradient, ms",
        **{f"{phase}_ms": f"the phase {phase} alone: device time on GPUs but for counts, ms" for phase in PHASES},
    },
    options=(
        Option("merge", neutral="triton", drop=True),
        Option("pinned", neutral=True, drop=True),
        Option("transfers", neutral="early", drop=True),
    ),
    metrics={
        "exposed_ms": -1,
        "early_wall_ms": -1,
        "late_wall_ms": -1,
        "exchange_gb_per_s": 1,
        "workspace_gib": -1,
        "predicted_crossover": 0,
        **{f"{phase}_ms": -1 for phase in PHASES},
    },
    pivot=Pivot(
        rows=("table_rows", "width", "dp_size", "density"),
        sections=("dtype", "overlap_ms"),
        derived={"density": expected_density},
    ),
    studies={
        "crossover": Study(
            "up to which density of touched rows is a sparse exchange faster?",
            module="tpbench.workloads.embedding_grad.crossover_study",
        )
    },
    forgets=True,
)
