"""The process groups of a job with several replicas of tensor-parallel ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tpbench.job import parse_job
from tpbench.worker.rank import context_of


def place_and_groups(here: Rank) -> tuple[int, int, list[list[int]]]:
    """Return this rank's places among replicas and within its replica, and the ranks of both groups."""
    sizes = {"tokens": 8, "vocab": 64, "tp_size": 2, "dp_size": 2, "device": here.device.type}
    context = context_of(parse_job({"variant": "pytorch_tp_manual", **sizes}), here.device, Path(), process_stays=False)
    members = []
    for group in (context.tp_group, context.dp_group):
        ranks = torch.zeros(4, device=here.device)
        ranks[here.rank] = 1
        dist.all_reduce(ranks, group=group)
        members.append(ranks.nonzero()[:, 0].tolist())
    return context.dp_rank, context.tp_rank, members


@pytest.mark.skipif(not enough_gpus(4), reason="needs 4 GPUs, or none")
def test_ranks_of_a_replica_are_neighbours() -> None:
    assert run_on_ranks(4, place_and_groups) == [
        (0, 0, [[0, 1], [0, 2]]), (0, 1, [[0, 1], [1, 3]]), (1, 0, [[2, 3], [0, 2]]), (1, 1, [[2, 3], [1, 3]]),
    ]  # fmt: skip
