"""Problem of the embedding gradient: its fields, its columns of a row, and its layout in a report."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tpbench.columns import Column
from tpbench.settings import setting
from tpbench.workloads import Pivot, Study, Variant, Workload

PHASES = ("counts", "ids", "gather", "values", "merge", "reduce")
"""Phases of an iteration; each variant has some of them."""


@dataclass(frozen=True)
class EmbeddingGrad:
    """Table, tokens and their distribution over rows; then the stand-in backward and the options of variants."""

    table_rows: int = setting(help="rows of the embedding table", low=1, high=2**31 - 1)
    width: int = setting(help="columns of the embedding table", low=1)
    tokens: int = setting(help="tokens of a rank in one accumulated step", low=1)
    accumulate: int = setting(1, help="steps whose gradients are summed before they are exchanged", low=1)
    distribution: Literal["uniform", "zipf_bigram", "fixed"] = setting(
        "uniform",
        help="distribution of tokens over rows: uniform, zipf_bigram (hashed bigrams of a text), fixed (distinct rows)",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = setting("bfloat16", help="dtype of the gradient")
    seed: int = setting(0, help="seed of the inputs", low=0, high=2**31 - 1)
    overlap_ms: float = setting(
        0.0,
        help="length of a stand-in backward, after a forward of half that length; transfers run beside both",
        low=0.0,
    )
    index: Literal["none", "late", "pinned", "early", "device"] = setting(
        "none",
        help="hashed index of the stand-in forward (distribution=zipf_bigram): none, late (hashed on the CPU when the "
        "forward needs it), pinned (late, but in pinned memory), early (pinned, one step ahead), device (on the GPU)",
    )
    other_mib: float = setting(
        0.0, help="size of each other parameter whose transfers run in the same step, MiB; 0: none", low=0.0
    )
    other_count: int = setting(12, help="number of other parameters (with other_mib)", low=1)
    transfer_order: Literal["passes", "first", "between", "last"] = setting(
        "passes",
        help="transfers of other parameters: passes (all-gathers beside the forward, reduce-scatters beside the "
        "backward); or all after the backward, with the exchange first, between reduce-scatters and all-gathers, or "
        "last",
    )
    search: Literal["auto", "host", "kernel"] = setting(
        "auto",
        help="search for the touched rows: host (by numpy, before the forward), kernel (by a Triton kernel), auto "
        "(kernel on GPUs, host on CPUs)",
        option="ignored",
    )

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of one rank over all accumulated steps."""
        return self.tokens * self.accumulate

    def check(self, tp_size: int, dp_size: int) -> list[str]:
        """Return messages about fields that do not fit together."""
        complaints = []
        if tp_size != 1:
            complaints.append(f"tp_size={tp_size} must be 1: the ranks of this workload are data parallel (dp_size)")
        if dp_size < 2:
            complaints.append(f"dp_size={dp_size} must be at least 2: one rank has nothing to exchange")
        if self.index != "none" and not (self.overlap_ms and self.distribution == "zipf_bigram"):
            complaints.append(f"index={self.index} needs overlap_ms and distribution=zipf_bigram: a forward and a text")
        if self.other_mib and not self.overlap_ms:
            complaints.append(f"other_mib={self.other_mib} needs overlap_ms: the transfers are of a training step")
        if self.transfer_order != "passes" and not self.other_mib:
            complaints.append(f"transfer_order={self.transfer_order} needs other_mib: parameters to order it with")
        if self.distribution == "fixed" and self.tokens_per_rank > self.table_rows:
            complaints.append(
                f"tokens={self.tokens} x accumulate={self.accumulate} are more than table_rows={self.table_rows}: "
                "distribution=fixed has distinct rows"
            )
        return complaints


def rounded_density(row: Mapping[str, Any]) -> float | None:
    """Return the counted touched rows of a rank over table_rows, to three digits, or None without a measurement."""
    return None if row.get("density") is None else float(f"{row['density']:.3g}")


@dataclass(frozen=True)
class ExchangeVariant(Variant):
    """A variant of the embedding gradient."""

    is_dense: bool = False
    """True if it sends the whole table: the baseline of exchanges that send touched rows."""


WORKLOAD = Workload(
    name="embedding_grad",
    summary="mean over data-parallel ranks of a sparsely touched embedding gradient, sharded over owners",
    problem=EmbeddingGrad,
    variant_class=ExchangeVariant,
    headline=("table_rows", "width", "tokens"),
    columns=(
        Column("density", float, "distinct rows that a rank touched, divided by table_rows, mean over ranks"),
        Column("grad_norm", float, "norm of the correct mean gradient, over all owners"),
        Column("rank_bytes_sent", list, "bytes that each rank sent to its peers, as counted, by rank"),
        Column("rank_bytes_received", list, "bytes that each rank received from its peers, as counted, by rank"),
        Column("workspace_gib", float, "memory shared with peers that the variant keeps", better=-1, by_variant=True),
        Column("all_to_all_gb_per_s", float, "bandwidth of a large all-to-all here, bytes that a rank sends"),
        Column("reduce_scatter_gb_per_s", float, "bandwidth of the dense reduce-scatter here, bytes that a rank sends"),
        Column("link_gb_per_s", float, "bandwidth of the fastest of these collectives, which the floor assumes"),
        Column("latency_ms", float, "time of an all-to-all of one row a peer on this machine"),
        Column("exchange_gb_per_s", float, "bytes that the busiest rank sent over an iteration's time", better=1),
        Column("stand_in_ms", float, "measured time of the stand-in forward and backward alone"),
        Column("others_ms", float, "measured time of an iteration without the exchange (with other_mib)"),
        Column("index_ms", float, "wall time until the GPU has a step's index, computed alone (with index)", better=-1),
        Column("exposed_ms", float, "an iteration's time minus others_ms (stand_in_ms without other_mib)", better=-1),
        *(
            Column(f"{phase}_ms", float, f"{phase} alone, by device time except for counts", better=-1)
            for phase in PHASES
        ),
    ),
    pivot=Pivot(
        rows=("table_rows", "width", "dp_size", "density"),
        sections=("dtype", "overlap_ms"),
        derived={"density": rounded_density},
    ),
    studies={
        "crossover": Study(
            "up to which density of touched rows is a sparse exchange faster than dense_reduce_scatter?",
            module="tpbench.workloads.embedding_grad.crossover",
        ),
        "ablation": Study(
            "what do the exchange, the index and the order of transfers each add to a training step, and what is sent?",
            module="tpbench.workloads.embedding_grad.ablation",
        ),
    },
)


def _host_work(problem: EmbeddingGrad) -> str:
    on_host = problem.index not in ("none", "device")
    return f"with index={problem.index} the host computes the index" if on_host else ""


WORKLOAD.variant_of(
    "dense_reduce_scatter",
    "exchanges.by_collectives.DenseReduceScatter",
    "reduce_scatter_tensor of the whole table",
    no_graph_reason=_host_work,
    is_dense=True,
)
WORKLOAD.variant_of(
    "sparse_all_to_all",
    "exchanges.by_collectives.SparseAllToAll",
    "touched rows to their owners by all-to-alls, for whose sizes the host waits",
    options={"search"},
    requires=("triton",),
    no_graph_reason="the host decides in each iteration how many rows go to which rank",
    uses_triton=True,
)
WORKLOAD.variant_of(
    "sparse_symmetric",
    "exchanges.symmetric.SparseSymmetric",
    "touched rows into their owners' memory by one kernel over NVLink; one node",
    requires_cuda=True,
    requires=("triton",),
    no_graph_reason=_host_work,
    uses_triton=True,
)


def is_dense(name: str) -> bool:
    """Return true for a variant that sends the whole table. One that this package doesn't have counts as sparse."""
    return getattr(WORKLOAD.variants.get(name), "is_dense", False)


DENSE = next(filter(is_dense, WORKLOAD.variants))
"""Name of the baseline."""
