"""CUDA graphs: which exchanges a graph can hold, and what the plan says about the others."""

import pytest

from tpbench.job import parse_job, unsupported_reason

TEXT = {"distribution": "zipf_bigram", "overlap_ms": 1.0}


@pytest.mark.parametrize(
    ("variant", "fields", "said"),
    [
        ("sparse_symmetric", {}, None),
        ("dense_reduce_scatter", {"overlap_ms": 1.0, "other_mib": 1.0}, None),
        ("sparse_symmetric", {**TEXT, "index": "early"}, "with index=early the host computes the index"),
        ("dense_reduce_scatter", {**TEXT, "index": "late"}, "with index=late the host computes the index"),
        ("sparse_all_to_all", {}, "the host decides"),
    ],
)
def test_the_plan_says_which_exchanges_a_graph_can_hold(
    variant: str, fields: dict[str, object], said: str | None
) -> None:
    size = {"table_rows": 1001, "width": 32, "tokens": 64, "tp_size": 1, "dp_size": 2}
    reason = unsupported_reason(parse_job({"variant": variant, **size, "graph": True, **fields}))
    assert reason is None if said is None else said in str(reason)
