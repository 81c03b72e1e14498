"""CUDA graphs: which exchanges a graph can hold, and what the plan says about the others."""

from __future__ import annotations

import pytest

from tpbench.job import Job, parse_job, unsupported_reason
from tpbench.workloads.embedding_grad import WORKLOAD


def graphed(variant: str, chosen: tuple[str, ...] = (), **fields: object) -> Job:
    size = {"table_rows": 1001, "width": 32, "tokens": 64, "tp_size": 1, "dp_size": 2}
    return parse_job({"variant": variant, **size, "graph": True, **fields}, chosen=chosen)


@pytest.mark.parametrize("fields", [{}, {"overlap_ms": 1.0, "other_mib": 1.0}])
def test_a_graph_holds_the_symmetric_exchange_with_the_search_on_the_gpu(fields: dict[str, object]) -> None:
    job = graphed("sparse_symmetric", **fields)
    assert unsupported_reason(job) is None


def test_dense_exchanges_can_be_captured_and_keep_their_options() -> None:
    for variant in ("dense_reduce_scatter", "dense_all_reduce"):
        job = graphed(variant)
        assert unsupported_reason(job) is None


TEXT = {"distribution": "zipf_bigram", "overlap_ms": 1.0}


@pytest.mark.parametrize(
    ("variant", "chosen", "fields", "said"),
    [
        ("sparse_symmetric", (), {**TEXT, "index": "early"}, "with index=early the host computes the index"),
        ("dense_reduce_scatter", (), {**TEXT, "index": "late"}, "with index=late the host computes the index"),
        *((name, (), {}, "the host decides") for name in sorted(WORKLOAD.variants) if "all_to_all" in name),
        *((name, (), {}, "the host decides") for name in ("sparse_all_gather", "sparse_auto")),
    ],
)
def test_the_plan_says_why_a_graph_cannot_hold_an_exchange(
    variant: str, chosen: tuple[str, ...], fields: dict[str, object], said: str
) -> None:
    reason = unsupported_reason(graphed(variant, chosen, **fields))
    assert reason is not None and reason.startswith(f"{variant} cannot be captured in a CUDA graph: ")
    assert said in reason
