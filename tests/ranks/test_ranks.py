"""The groups that other tests run on: failures must be told, and must not hang."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import Rank, RankError, run_on_ranks
from tpbench.comm.collectives import gather_objects


def _sum(here: Rank, value: int) -> torch.Tensor:
    total = torch.tensor([value + here.rank], device=here.device)
    dist.all_reduce(total, group=here.group)
    return total


def _fail(here: Rank, how: str) -> None:
    if here.rank == 1:
        if how == "raises":
            raise KeyError("planted")
        if how == "dies":
            os._exit(3)
        time.sleep(60)
    dist.barrier(group=here.group)


def test_results_come_in_rank_order() -> None:
    assert [int(each) for each in run_on_ranks(2, _sum, 20)] == [41, 41]


@pytest.mark.parametrize(
    ("how", "says"),
    [("raises", "planted"), ("dies", r"rank 1: died \(exit code 3\)"), ("hangs", "rank 1: did not answer")],
)
def test_a_failure_is_told_and_the_next_call_works(how: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.ranks.GRACE_S", 0.5)
    with pytest.raises(RankError, match=says):
        run_on_ranks(2, _fail, how, timeout_s=2.0 if how == "hangs" else 60.0)
    assert [int(each) for each in run_on_ranks(2, _sum, 0)] == [1, 1]


def _gather(here: Rank) -> list[object]:
    with pytest.raises(TypeError, match="JSON"):  # it would have to be unpickled
        gather_objects(object(), here.group)
    return gather_objects(("x" * here.rank, None, [here.rank, 0.5]), here.group)


def test_python_values_are_gathered_without_pickle() -> None:
    expected = [["", None, [0, 0.5]], ["x", None, [1, 0.5]]]
    assert run_on_ranks(2, _gather) == [expected, expected]
