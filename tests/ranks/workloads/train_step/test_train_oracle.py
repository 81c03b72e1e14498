"""A row is right only beside the oracle; what an implementation gets wrong must show in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.train_step import context, forget_groups, problem
from tpbench.measure.run import run as measure
from tpbench.measure.session import Context
from tpbench.measure.settings import MeasureSettings
from tpbench.workloads.train_step import WORKLOAD, oracle
from tpbench.workloads.train_step.bench import TrainStepSession

pytestmark = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")


def measured(
    here: Rank, name: str, fields: dict[str, Any], spoil: str = "", tp_size: int = 2
) -> tuple[str | None, dict[str, Any], int]:
    """A whole cell, with an implementation that `spoil` makes wrong: verdict, columns, updates that were made."""
    cell, place = problem(**{"steps": 4, "warmup_steps": 1, "log_interval": 0, **fields}), context(here, tp_size)
    forget_groups(here)
    session = TrainStepSession(cell, WORKLOAD.variants[name], place)
    trainer: Any = session.trainer
    accumulate, update, count = trainer.accumulate, trainer.update, [0]

    def spoiled_accumulate(batches: Any, mark: Any) -> torch.Tensor:
        loss = accumulate(batches, mark)
        return loss / 2 if spoil == "loss" else loss

    def spoiled_update(mark: Any) -> torch.Tensor:
        count[0] += 1
        if spoil == "unreduced" and here.rank == 1:
            for each in trainer.parameters:
                each.grad = each.grad * 0.5
        norm = update(mark)
        return norm * 1.1 if spoil == "norm" else norm * float("nan") if spoil == "nan" else norm

    trainer.accumulate, trainer.update = spoiled_accumulate, spoiled_update
    verdict, columns = measure(session, place, MeasureSettings(), 10.0, lambda what: None)
    return verdict.wrong, columns | verdict.columns, count[0]


def test_a_cell_trains_exactly_its_steps_and_then_its_phases() -> None:
    cuda = torch.cuda.is_available()
    for wrong, columns, updates in run_on_ranks(2, measured, "fsdp_dtensor", {"phase_steps": 2}):
        assert wrong is None
        assert updates == 1 + 4 + 2 + cuda  # there one more, under the profiler
        assert len(columns["samples_ms"]) == columns["iterations"] == 4
        assert len(columns["losses"]) == len(columns["grad_norms"]) == 5
        assert columns["loss_value"] == columns["losses"][-1]
        assert columns["oracle"] == "3 steps by one process"
        assert 0 < columns["loss_error"] < 1e-5 and 0 < columns["grad_error"] < 1e-4
        assert 0.2 < (columns["forward_ms"] + columns["backward_ms"] + columns["optimizer_ms"]) / columns["time_ms"] < 5
        assert ("exposed_share" in columns) == cuda
        assert cuda or "mfu" not in columns


def test_replicas_train_on_batches_of_their_own_and_their_losses_mean_is_told() -> None:
    for wrong, columns, _ in run_on_ranks(2, measured, "fsdp", {"phase_steps": 0, "accumulate": 2}, "", 1):
        assert wrong is None and columns["loss_error"] < 1e-5 and columns["grad_error"] < 1e-4


@pytest.mark.parametrize("name", ["fsdp_dtensor", "autotp"])
@pytest.mark.parametrize("spoil", ["loss", "norm", "nan"])
def test_what_is_wrong_has_no_time(name: str, spoil: str) -> None:
    for wrong, columns, _ in run_on_ranks(2, measured, name, {}, spoil):
        assert ("loss_error" if spoil == "loss" else "grad_error") in str(wrong)
        assert "time_ms" not in columns and "tokens_per_s" not in columns


def test_gradients_that_did_not_meet_are_wrong() -> None:
    assert "grad_error" in str(run_on_ranks(2, measured, "fsdp_dtensor", {}, "unreduced")[0][0])


def test_the_same_error_of_a_norm_is_wrong_sooner_and_right_later() -> None:
    """What rounding made different grows with each update; the losses' tolerance stays."""
    right = oracle.Expected("", (9.0, 8.0, 7.0), (2.0, 2.0, 2.0))
    for step, allowed in enumerate((0.02, 0.04, 0.08)):
        for off, fine in ((allowed * 0.9, True), (allowed * 1.1, False), (float("nan"), False)):
            norms = [*right.norms]
            norms[step] *= 1 + off
            complaint = oracle.compare(right, right.losses, norms).complaint("bfloat16")
            assert (complaint is None) is fine
            assert fine or f"at step {step + 1}" in str(complaint)
        losses = [*right.losses]
        losses[step] *= 1.003
        assert "loss_error" in str(oracle.compare(right, losses, right.norms).complaint("bfloat16"))


def references(here: Rank, fields: dict[str, Any]) -> tuple[Any, Any]:
    """What the oracle says of a model that one process can hold, and of the same taken for too large."""
    cell, place = problem(**fields), context(here, here.world_size // 2)
    held = oracle.expected(cell, place)
    share, oracle.SHARE = oracle.SHARE, 0.0
    try:
        return held, oracle.expected(cell, place)
    finally:
        oracle.SHARE = share


@pytest.mark.parametrize(
    "fields", [{}, {"tied": True, "accumulate": 2}, {"dtype": "bfloat16", "architecture": "llama"}], ids=str
)
def test_a_model_too_large_to_train_is_run_forward_layer_by_layer(fields: dict[str, Any]) -> None:
    """Both are of all replicas' batches, and the same on every rank."""
    found = run_on_ranks(2, references, fields)
    assert found[0] == found[1]
    held, forward = found[0]
    assert (len(held.losses), len(held.norms)) == (3, 3)
    assert (len(forward.losses), len(forward.norms)) == (1, 0)
    assert forward.losses[0] == pytest.approx(held.losses[0], rel=1e-6)
    errors = oracle.compare(forward, [forward.losses[0] * 1.1], [])
    assert errors.grad_error is None and "loss_error 0.1" in str(errors.complaint("bfloat16"))


def test_what_is_affordable_is_what_the_page_says() -> None:
    small, large = problem(), problem(layers=400, hidden_size=8192, ffn_size=28672, heads=64, kv_heads=8, head_dim=128)
    assert oracle._affordable(small, 3, _cpu())
    assert not oracle._affordable(large, 3, _cpu())
    long = problem(batch_size=64, seq_length=8192, layers=24, hidden_size=256, ffn_size=1024)
    assert not oracle._affordable(long, 3, _cpu())


def _cpu() -> Any:
    return Context(0, 1, 0, 1, 0, 1, None, None, torch.device("cpu"))  # type: ignore[arg-type]
