"""Placement of ranks on nodes, and arrays of jobs with the same placement."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpbench.job import Job, parse_job
from tpbench.launcher.slurm.cluster import SlurmSettings
from tpbench.launcher.slurm.layout import ArrayPlan, Layout, layout, split_into_arrays


def job(**values: Any) -> Job:
    return parse_job({"variant": "triton_tp", "tokens": 64, "vocab": 1000, "device": "cuda", **values})


@pytest.mark.parametrize(
    ("tp_size", "dp_size", "per_node", "nodes", "ranks"),
    [
        (8, 1, 8, 1, 8),
        (2, 1, 8, 1, 2),
        (2, 4, 8, 1, 8),
        (8, 2, 8, 2, 8),
        (2, 6, 8, 2, 6),  # three replicas a node, not four and two
        (4, 5, 8, 5, 4),
        (2, 2, 2, 2, 2),
        (3, 4, 8, 2, 6),
    ],
)
def test_tensor_parallel_ranks_share_a_node_and_replicas_spread(
    tp_size: int, dp_size: int, per_node: int, nodes: int, ranks: int
) -> None:
    assert layout(job(tp_size=tp_size, dp_size=dp_size), per_node) == Layout(nodes, ranks, "cuda")


def test_the_resources_of_an_array() -> None:
    settings = SlurmSettings.parse({"partition": "p", "mem_gib": 1.5, "sbatch": {"mail-type": "END"}, "qos": "low"})
    assert Layout(2, 8, "cuda").resources(settings, timeout_s=90, parallelism=256) == {
        "nodes": 2, "ntasks_per_node": 1, "gpus_per_node": 8, "time": 12, "mem": "1536M", "partition": "p",
        "qos": "low", "array_parallelism": 256, "signal_delay_s": 90,
        "additional_parameters": {"requeue": True, "mail-type": "END"},
    }  # fmt: skip
    on_cpus = Layout(1, 2, "cpu").resources(SlurmSettings(), timeout_s=600, parallelism=256)
    assert (on_cpus["cpus_per_task"], on_cpus["time"], "gpus_per_node" in on_cpus) == (2, 20, False)


def test_an_array_that_waits_for_another_keeps_the_user_s_dependency() -> None:
    settings = SlurmSettings.parse({"sbatch": {"dependency": "singleton"}})
    resources = Layout(1, 2, "cpu").resources(settings, timeout_s=90, parallelism=1, after="7")
    assert resources["additional_parameters"] == {"requeue": True, "dependency": "singleton,afterany:7"}
    alone = Layout(1, 2, "cpu").resources(SlurmSettings(), timeout_s=90, parallelism=1)
    assert alone["additional_parameters"] == {"requeue": True}


@given(st.integers(1, 5000), st.integers(1, 1001), st.integers(1, 300))
def test_arrays_hold_all_jobs_and_share_the_parallelism(jobs: int, longest: int, most: int) -> None:
    arrays = split_into_arrays(jobs, longest, most)
    assert sum(each.size for each in arrays) == jobs
    assert max(each.size for each in arrays) <= longest
    assert len(arrays) == -(-jobs // longest)
    beginning = [each.parallelism for each in arrays if each.after is None]
    assert min(beginning) >= 1
    assert sum(beginning) == most
    for index, each in enumerate(arrays):
        if each.after is not None:
            assert (each.after < index) and (each.parallelism == arrays[each.after].parallelism)
    followed = [each.after for each in arrays if each.after is not None]
    assert len(followed) == len(set(followed))


def test_the_fewest_arrays_are_used() -> None:
    assert split_into_arrays(4, 1001, 256) == [ArrayPlan(4, 256, None)]
    assert split_into_arrays(5, 2, 3) == [ArrayPlan(2, 1, None), ArrayPlan(2, 1, None), ArrayPlan(1, 1, None)]
    assert split_into_arrays(5, 2, 2) == [ArrayPlan(2, 1, None), ArrayPlan(2, 1, None), ArrayPlan(1, 1, 0)]
