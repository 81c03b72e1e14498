"""Which reference a run gets: some steps by one process, or a forward pass if that costs too much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.train_step import single_context, tiny_problem
from tpbench.workloads.train_step import TrainStep, oracle
from tpbench.workloads.train_step.oracle import compute_reference
from tpbench.workloads.train_step.reference import LaterReference, Reference

Compute = Callable[..., Reference]
GIB = 2**30


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the calls of what would train and measure. It takes 70 of 100 GiB, and all operations that are allowed."""
    calls: list[Any] = []

    def train(problem: TrainStep, steps: int, context: Any) -> torch.Tensor:
        calls.append(("train", steps, problem))
        return torch.arange(2 * steps, dtype=torch.float64).view(2, steps) + 1

    def forward(problem: TrainStep, context: Any) -> float:
        calls.append(("forward", problem))
        return 7.0

    monkeypatch.setattr(oracle, "train_first_steps", train)
    monkeypatch.setattr(oracle, "first_loss", forward)
    monkeypatch.setattr(oracle, "free_memory", lambda device: calls.append("freed"))
    monkeypatch.setattr(oracle, "estimate_memory", lambda *_: SimpleNamespace(total=70 * GIB))
    monkeypatch.setattr(oracle.rank_memory, "available_bytes", lambda device: 100 * GIB)
    monkeypatch.setattr(oracle.sizes, "step_flops", lambda problem: 2e12 / 6)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: calls.append(("broadcast", tensor.shape, src)))
    return calls


def cell(**fields: Any) -> TrainStep:
    return tiny_problem(**{"warmup_steps": 2, "steps": 6, **fields})


CONTEXT = replace(single_context(), dp_size=2)


def test_what_is_affordable_is_trained_by_rank_0(log: list[Any]) -> None:
    found = compute_reference(cell(activation_checkpointing=False, train_loss="tpbench"), CONTEXT)
    assert found == Reference("3 steps by one process", (1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    (_, steps, plain) = log[1]
    assert (steps, plain.activation_checkpointing, plain.compile, plain.train_loss) == (3, True, False, "torch")
    assert log[2] == "freed" and log[3] == ("broadcast", (2, 3), 0) and log[0] == ("broadcast", (), 0)
    assert len(log) == 4


def test_other_ranks_train_nothing(log: list[Any]) -> None:
    compute_reference(cell(), replace(CONTEXT, rank=1))
    assert [each for each in log if each[0] == "train"] == [] and ("broadcast", (2, 3), 0) in log


@pytest.mark.parametrize(("warmup", "steps", "trained"), [(0, 2, 2), (1, 1, 2), (1, 2, 3), (5, 5, 3)])
def test_a_short_run_has_a_short_reference(warmup: int, steps: int, trained: int, log: list[Any]) -> None:
    found = compute_reference(cell(warmup_steps=warmup, steps=steps), replace(CONTEXT, dp_size=1))
    assert len(found.losses) == trained and found.source.startswith(f"{trained} steps")


@pytest.mark.parametrize("much", ["memory", "operations"])
def test_what_costs_too_much_is_a_forward_pass(much: str, log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if much == "memory":
        monkeypatch.setattr(oracle.rank_memory, "available_bytes", lambda device: 100 * GIB - 2)
    else:
        monkeypatch.setattr(oracle.sizes, "step_flops", lambda problem: 2e12 / 6 + 1)
    found = compute_reference(cell(), CONTEXT)
    assert found == Reference("loss of the first step by a forward pass", (7.0,), ())
    assert [each[0] for each in log] == ["broadcast", "forward", "f"]


def test_steps_that_are_not_finite_are_replaced_by_a_forward_pass(
    log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "train_first_steps", lambda *_: torch.full((2, 3), torch.nan))
    assert compute_reference(cell(), CONTEXT).losses == (7.0,)


def test_a_gpu_may_take_as_many_operations_in_half_a_minute(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle.sizes, "step_flops", lambda problem: 3e16 / 6)
    assert oracle._affordable(cell(), 3, replace(CONTEXT, device=torch.device("cuda")))
    assert not oracle._affordable(cell(), 4, replace(CONTEXT, device=torch.device("cuda")))


def test_a_whole_run_is_trained_to_its_end(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle.sizes, "step_flops", lambda problem: 2e12 / (2 * (2 + 6)))
    found = compute_reference(cell(), CONTEXT, whole_run=True)
    assert [call[1] for call in log if call[0] == "train"] == [8]
    assert found.source == "all 8 steps by one process"
    assert found.losses == (1.0, 2.0, 3.0) and found.norms == (9.0, 10.0, 11.0)
    assert found.later == LaterReference(1.0, 2.0, (3.0, 4.0, 5.0, 6.0, 7.0, 8.0))


def test_a_reference_of_a_whole_run_that_costs_too_much_says_so(
    log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle.sizes, "step_flops", lambda problem: 2e12 / 15)
    found = compute_reference(cell(), CONTEXT, whole_run=True)
    assert found.source == "3 steps by one process; later steps are not checked" and found.later is None
    monkeypatch.setattr(oracle.sizes, "step_flops", lambda problem: 2e12)
    found = compute_reference(cell(), CONTEXT, whole_run=True)
    assert found.source == "loss of the first step by a forward pass; later steps are not checked"


def test_losses_that_updates_hardly_change_say_so(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle.sizes, "step_flops", lambda problem: 1.0)
    monkeypatch.setattr(oracle, "train_first_steps", lambda *_: torch.full((2, 8), 9.0, dtype=torch.float64))
    found = compute_reference(cell(dtype="bfloat16"), CONTEXT, whole_run=True)
    assert found.source == "all 8 steps by one process; skipped updates would not show"
