"""CUDA graphs: which exchanges a graph can hold, and what the plan says about the others."""

from __future__ import annotations

import pytest

from tpbench.job import Job, parse_job, unsupported_reason


def graphed(variant: str, **fields: object) -> Job:
    size = {"table_rows": 1001, "width": 32, "tokens": 64, "tp_size": 1, "dp_size": 2}
    return parse_job({"variant": variant, **size, "graph": True, **fields})


@pytest.mark.parametrize("variant", ["sparse_symmetric", "dense_reduce_scatter"])
@pytest.mark.parametrize("fields", [{}, {"overlap_ms": 1.0, "other_mib": 1.0}])
def test_a_graph_holds_dense_exchanges_and_the_symmetric_one(variant: str, fields: dict[str, object]) -> None:
    assert unsupported_reason(graphed(variant, **fields)) is None


TEXT = {"distribution": "zipf_bigram", "overlap_ms": 1.0}


@pytest.mark.parametrize(
    ("variant", "fields", "said"),
    [
        ("sparse_symmetric", {**TEXT, "index": "early"}, "with index=early the host computes the index"),
        ("dense_reduce_scatter", {**TEXT, "index": "late"}, "with index=late the host computes the index"),
        ("sparse_all_to_all", {}, "the host decides"),
    ],
)
def test_the_plan_says_why_a_graph_cannot_hold_an_exchange(variant: str, fields: dict[str, object], said: str) -> None:
    reason = unsupported_reason(graphed(variant, **fields))
    assert reason is not None and reason.startswith(f"{variant} cannot be captured in a CUDA graph: ")
    assert said in reason
