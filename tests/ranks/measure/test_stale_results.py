"""A variant that does less when it is timed ends as wrong, and has no time. Honest variants pass the same checks.

On a machine with one GPU there is one rank. An exchange of gradients needs two, so its tests are left out there.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support import cheats
from tests.support.entropy_loss import context
from tests.support.ranks import Rank, ranks_here, run_on_ranks
from tests.support.simulated_time import SimulatedTime
from tests.support.sleeping_sessions import Sleeper, cpu_context, run
from tests.support.train_step import mesh_context
from tpbench.measure import timers
from tpbench.measure.audit import SLEEP_S, Inputs, changed_inputs_reason
from tpbench.measure.session import MeasureSettings
from tpbench.workloads import Variant
from tpbench.workloads.embedding_grad import WORKLOAD as EXCHANGES
from tpbench.workloads.embedding_grad import EmbeddingGrad
from tpbench.workloads.entropy_loss import WORKLOAD, EntropyLoss
from tpbench.workloads.linear_loss.problem import WORKLOAD as LINEAR
from tpbench.workloads.linear_loss.problem import LinearLoss
from tpbench.workloads.tp_block import WORKLOAD as BLOCKS
from tpbench.workloads.tp_block import TpBlock
from tpbench.workloads.train_step import TrainStep
from tpbench.workloads.train_step.bench import TrainStepSession
from tpbench.workloads.train_step.estimates import TrainVariant

CUDA = torch.cuda.is_available()
RANKS = ranks_here(2)
needs_two_ranks = pytest.mark.skipif(RANKS < 2, reason="needs 2 GPUs, or none")
TIMED = "the last iteration of the wall clock, after a correct first one: "
CHAINED = "the last iteration of the chained clock, after a correct first one: "
CHANGED = "with changed inputs, after a correct result with the first ones: "
FRESH = MeasureSettings(time_budget_s=20.0, min_iterations=3, max_iterations=5, fresh=True)

LOSSES: dict[str, str | tuple[str, ...] | None] = {
    "honest": None,
    "computes_while_it_restores": None,
    "returns_a_stored_answer": "loss_error inf",  # a pass of its own has poisoned it before the check
    "returns_copies_of_a_stored_answer": TIMED,
    "returns_stored_answers_once_it_is_set_up_twice": CHAINED,
    "overwrites_its_input": "overwrites_its_input overwrites its inputs",
    **({"begins_early_on_a_side_stream": ("the last iteration of the ", CHANGED)} if CUDA else {}),
    **({"does_not_wait_for_its_collective": ""} if RANKS > 1 else {}),  # which guard finds it depends on the time
}
"""By name of a variant: the beginning of the reason, or one of several. Empty: any. None: it is right."""
SIZE = {"tokens": 2048, "vocab": 32768} if CUDA else {"tokens": 13, "vocab": 101}


def measured(here: Rank, names: Sequence[str], place: tuple[str, int] | None) -> dict[str, Any]:
    """Measure variants of `cheats`. Return the reason of each and its columns. `place`: None for a trusted variant."""
    settings = MeasureSettings(time_budget_s=20.0, min_iterations=5, max_iterations=20)
    results = {}
    for name in names:
        variant = Variant(name, "", getattr(cheats, name), place=place)
        again = partial(WORKLOAD.set_up, EntropyLoss(**SIZE), variant, context(here))
        verdict, columns = run(again(), context(here), settings, again=again)
        results[name] = verdict.wrong, columns
    return results


def test_variants_from_outside_are_wrong_if_they_do_less_when_they_are_timed() -> None:
    for name, (reason, columns) in run_on_ranks(RANKS, measured, list(LOSSES), ("file", 1))[0].items():
        begins = LOSSES[name]
        assert reason is None if begins is None else reason is not None and reason.startswith(begins), (name, reason)
        assert ("time_ms" in columns) == ("chained_ms" in columns) == (begins is None) and columns["fresh"] is True


def test_inputs_of_other_variants_change_once_after_the_timed_iterations() -> None:
    results = run_on_ranks(RANKS, measured, ["honest", "returns_copies_of_a_stored_answer"], None)[0]
    reason, columns = results["honest"]
    assert reason is None and columns["fresh"] is False
    assert results["returns_copies_of_a_stored_answer"][0].startswith(CHANGED)


def packaged_losses(here: Rank) -> list[str | None]:
    place, reasons = context(here), []
    for loss in ("cross_entropy", "soft_cross_entropy", "forward_kl", "reverse_kl"):
        for name in ("pytorch_tp_manual", "pytorch_gather"):
            session: Any = WORKLOAD.set_up(EntropyLoss(**SIZE, loss=loss), WORKLOAD.variants[name], place)  # type: ignore[arg-type]
            reasons.append(run(session, place, FRESH)[0].wrong)
    for loss in ("cross_entropy", "forward_kl", "policy"):
        problem = LinearLoss(tokens=16, hidden=32, vocab=102, loss=loss)  # type: ignore[arg-type]
        session = LINEAR.set_up(problem, LINEAR.variants["linear_gather"], place)
        reasons.append(run(session, place, FRESH)[0].wrong)
    return reasons


def test_variants_of_both_losses_are_right_on_fresh_inputs() -> None:
    assert run_on_ranks(RANKS, packaged_losses)[0] == [None] * 11


EXCHANGE = EmbeddingGrad(table_rows=101, width=12, tokens=10, accumulate=2, dtype="float32")
BLOCK = TpBlock(tokens=32, hidden=24, ffn=40, heads=8, kv_heads=4, head_dim=6, dtype="float32")
OTHERS: dict[str, tuple[Any, dict[str, str | None], Any, tuple[str, ...]]] = {
    "exchange": (
        EXCHANGE, {"honest_exchange": None, "exchange_with_stored_answer": TIMED},
        EXCHANGES, ("dense_reduce_scatter", "sparse_all_to_all"),
    ),
    "block": (
        BLOCK,
        {"honest_block": None, "block_with_stored_output": TIMED},
        BLOCKS, ("block_tp", "block_copy_engine", "block_symm_mem", "block_no_tp"),
    ),
}  # fmt: skip
"""Problem, variants of `cheats` with the beginning of the reason, workload, and variants of this package."""


def on_fresh_inputs(here: Rank, kind: str) -> dict[str, str | None]:
    """Return why each variant is wrong on fresh inputs. The ranks are data-parallel for an exchange."""
    problem, from_outside, workload, packaged = OTHERS[kind]
    place = context(here)
    if kind == "exchange":
        place = replace(place, tp_rank=0, tp_size=1, dp_rank=here.rank, dp_size=here.world_size)
    variants = [Variant(name, "", getattr(cheats, name), place=("file", 1)) for name in from_outside]
    variants += [workload.variants[name] for name in packaged]
    reasons = {}
    for variant in variants:
        runs_here = CUDA or variant.requires_cuda is not True
        if runs_here and not variant.unsupported_reason(problem, place.tp_size):
            settings = replace(FRESH, max_iterations=3, fresh=variant.place is None)
            with mock.patch.dict(timers.ITERATIONS, cpu=1, cuda=1):
                again = partial(workload.set_up, problem, variant, place)
                session: Any = again()
                session.details = lambda columns: {}
                verdict, columns = run(session, place, settings, again=again)
            reasons[variant.name] = verdict.wrong or columns.get("not_chained")
    return reasons


@pytest.mark.parametrize("kind", ["block", pytest.param("exchange", marks=needs_two_ranks)])
def test_variants_of_other_workloads_compute_in_every_iteration(kind: str) -> None:
    begins, reasons = OTHERS[kind][1], run_on_ranks(RANKS, on_fresh_inputs, kind)[0]
    assert len(reasons) >= len(begins) + RANKS
    for name, reason in reasons.items():
        begin = begins.get(name)
        assert reason is None if begin is None else (reason or "").startswith(begin), (name, reason)


TRAINING = {
    "model": "tiny", "architecture": "qwen3", "hidden_size": 32, "ffn_size": 64, "layers": 2, "heads": 4,
    "kv_heads": 2, "head_dim": 8, "vocab": 96, "batch_size": 2, "seq_length": 16, "learning_rate": 1e-2,
    "batches": None, "warmup_steps": 3, "steps": 4, "log_interval": 0,
}  # fmt: skip
TRAININGS = {
    "honest_training": None,
    "training_that_stores_losses": "losses of the timed steps",
    "training_without_updates": "losses of the timed steps",
}
"""Variants of the train step, with a part of the reason."""


def trained(here: Rank, fields: dict[str, Any]) -> dict[str, tuple[str | None, dict[str, Any]]]:
    """Return the reason and the columns of each variant of `TRAININGS`. Its ranks are data-parallel."""
    place = mesh_context(here, 1)
    problem = TrainStep(**{**TRAINING, **fields})
    results = {}
    for name in TRAININGS:
        with mock.patch.dict(timers.ITERATIONS, cpu=1, cuda=1):
            session = TrainStepSession(problem, TrainVariant(name, "", getattr(cheats, name), place=("file", 1)), place)
        verdict, columns = run(session, place, MeasureSettings())
        results[name] = verdict.wrong, columns | verdict.columns
    return results


@pytest.mark.parametrize(
    "fields", [{"dtype": "float32"}, {"dtype": "bfloat16", "batches": 1, "accumulate": 2}], ids=["float32", "bfloat16"]
)
def test_a_train_step_trains_in_every_timed_step(fields: dict[str, Any]) -> None:
    results = run_on_ranks(RANKS, trained, fields)[0]
    for name, part in TRAININGS.items():
        reason, columns = results[name]
        assert (reason is None) == (part is None) and (part or "") in (reason or ""), (name, reason)
        assert ("time_ms" in columns) == (part is None)
        assert len(columns["losses"]) == 7


def events(here: Rank) -> list[str | float]:
    """Return what an iteration on changed inputs does on this rank, in order. A number is a sleep in seconds."""
    seen: list[str | float] = []
    session = Sleeper(here, SimulatedTime(), 0)
    # A change may be a collective, as that of a policy loss is.
    session.audited_inputs = Inputs([], changed=lambda: seen.append("change"))
    with mock.patch.object(time, "sleep", seen.append):
        assert changed_inputs_reason(session, lambda: seen.append("step"), cpu_context(here)) is None
    return seen


def test_ranks_begin_one_after_the_other_also_if_the_change_of_the_inputs_lines_them_up() -> None:
    assert run_on_ranks(2, events) == [["change", 0, "step"], ["change", SLEEP_S, "step"]]
