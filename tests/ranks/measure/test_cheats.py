"""A variant that cheats ends as wrong, and has no time. Honest variants of all kinds pass the same checks.

On a machine with one GPU there is one rank. An exchange of gradients needs two, so its tests are left out there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support import cheats
from tests.support.entropy_loss import context
from tests.support.ranks import Rank, ranks_here, run_on_ranks
from tests.support.train_step import mesh_context
from tpbench.kernels.linear import function as linear_function
from tpbench.measure import energy, stopwatch
from tpbench.measure import run as running
from tpbench.measure.guard import FunctionsReplaced, Guard
from tpbench.measure.inputs import Inputs, fingerprint
from tpbench.measure.settings import MeasureSettings
from tpbench.workloads import Variant
from tpbench.workloads.embedding_grad import WORKLOAD as EXCHANGES
from tpbench.workloads.embedding_grad import EmbeddingGrad
from tpbench.workloads.embedding_grad.bench import setup as setup_exchange
from tpbench.workloads.entropy_loss import WORKLOAD, EntropyLoss
from tpbench.workloads.entropy_loss.bench import setup
from tpbench.workloads.linear_loss.bench import setup as setup_linear
from tpbench.workloads.linear_loss.problem import WORKLOAD as LINEAR
from tpbench.workloads.linear_loss.problem import LinearLoss
from tpbench.workloads.tp_block import WORKLOAD as BLOCKS
from tpbench.workloads.tp_block import TpBlock
from tpbench.workloads.tp_block.bench import setup as setup_block
from tpbench.workloads.train_step import TrainStep
from tpbench.workloads.train_step.bench import setup as setup_training

CUDA = torch.cuda.is_available()
RANKS = ranks_here(2)
needs_two_ranks = pytest.mark.skipif(RANKS < 2, reason="needs 2 GPUs, or none")
TIMED = "the last iteration of the wall clock, after a correct first one: "
CHANGED = "with changed inputs, after a correct result with the first ones: "
TIMED_CHANGED = "timed with changed inputs, after a correct result with the first ones: "
AUDITED = ("the last iteration of the ", CHANGED, TIMED_CHANGED)
"""Which of these checks finds it first depends on the memory that a GPU's allocator reuses, and on its other work."""
ORACLE = "tpbench.workloads.entropy_loss.oracle"
LIMITS = "tpbench.workloads.entropy_loss.limits"
CHEATS: dict[str, str | tuple[str, ...]] = {
    "returns_a_stored_answer": TIMED,
    "returns_copies_of_a_stored_answer": CHANGED if CUDA else TIMED,
    "returns_early_once_it_was_checked": AUDITED if CUDA else TIMED,
    "writes_to_its_input": "the variant wrote to its inputs" if not CUDA else "",
    "prepares_a_simpler_input": "the variant wrote to its inputs",
    "leaves_work_to_a_thread": "",
    "returns_a_tensor_that_computes_when_read": "the step returned a _Lazy in place of a torch.Tensor",
    "replaces_the_clock": "replaced time.perf_counter",
    "stops_the_clock": "replaced time.perf_counter" + ("" if CUDA else "; then ZeroDivisionError: "),
    "replaces_a_comparison": "replaced torch.Tensor.abs, torch.Tensor.abs_, torch.equal",
    "replaces_the_oracle": f"replaced {ORACLE}.Oracle.compare",
    "replaces_the_code_of_the_oracle": f"replaced {ORACLE}.Oracle.compare",
    "replaces_the_module_of_the_clock": "replaced tpbench.measure.clock.time",
    "raises_the_tolerances": f"replaced {LIMITS}.GRADIENT_TOLERANCE, {LIMITS}.LOSS_TOLERANCE",
    "looks_at_its_callers": TIMED_CHANGED if CUDA else TIMED,
}
"""By name: the beginning of the reason, or one of several. Empty: any."""
ON_GPUS: dict[str, str | tuple[str, ...]] = {
    "replaces_the_events": "replaced torch.cuda.Event.elapsed_time",
    "ends_on_a_side_stream": "",
    "begins_early_on_a_side_stream": AUDITED,
    "recognises_its_input": "an iteration takes ",
}
SIZE = {"tokens": 2048, "vocab": 32768} if CUDA else {"tokens": 13, "vocab": 101}


def measured(here: Rank, name: str, fresh: bool = False) -> tuple[str | None, dict[str, Any]]:
    """Measure a variant of `cheats` as a rank does, and return the reason and the columns."""
    settings = MeasureSettings(time_budget_s=20.0, min_iterations=5, max_iterations=20, fresh=fresh)
    place, guard = context(here), Guard()
    try:
        with guard.naming_replaced(), mock.patch.object(energy, "MOST_ITERATIONS", 100):
            session = setup(EntropyLoss(**SIZE), Variant(name, "", getattr(cheats, name), place=("file", 1)), place)
            verdict, columns = running.run(session, place, settings, 2.0, lambda message: None)
    except FunctionsReplaced as error:
        return str(error).removeprefix("the variant "), {}
    finally:
        replaced = guard.restored()
    return (f"replaced {', '.join(replaced)}" if replaced else verdict.wrong), columns


@pytest.mark.parametrize("name", [*CHEATS, *ON_GPUS])
def test_a_cheat_ends_as_wrong(name: str) -> None:
    if name in ON_GPUS and not CUDA:
        pytest.skip("needs a GPU")
    reason, columns = run_on_ranks(RANKS, measured, name)[0]
    assert reason is not None and reason.startswith((CHEATS | ON_GPUS)[name]), reason
    assert "time_ms" not in columns or reason.startswith("replaced ")  # the rank drops the columns then


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", ["honest", "computes_while_it_restores"])
def test_an_honest_variant_passes(name: str, fresh: bool) -> None:
    """A variant that computes in `restore` passes, because its `restore` is a part of its step."""
    reason, columns = run_on_ranks(RANKS, measured, name, fresh)[0]
    assert reason is None, reason
    assert columns["time_ms"] > 0 and columns["fresh"] is (fresh or not CUDA)


def recognised(here: Rank) -> tuple[str | None, int]:
    """The reason, and the number of answers that the variant computed beyond those of the timed iterations."""
    computed: list[None] = []
    compute = cheats.honest

    def counted(problem: EntropyLoss, shard: Any) -> Any:
        step = compute(problem, shard)
        return lambda: computed.append(None) or step()

    cheats.honest = counted  # type: ignore[assignment]
    try:
        reason, columns = measured(here, "recognises_its_input")
    finally:
        cheats.honest = compute
    return reason, len(computed) - columns["iterations"]


@pytest.mark.skipif(CUDA, reason="a GPU's clock shows it")
def test_on_a_cpu_a_variant_that_knows_its_inputs_computes_in_every_iteration() -> None:
    reason, more = run_on_ranks(RANKS, recognised)[0]
    assert reason is None and more > 0


def others(here: Rank) -> list[str | None]:
    place, reasons = context(here), []
    settings = MeasureSettings(time_budget_s=20.0, min_iterations=3, max_iterations=5, fresh=True)
    for loss in ("cross_entropy", "soft_cross_entropy", "forward_kl", "reverse_kl"):
        for name in ("pytorch_tp_manual", "pytorch_gather"):
            session: Any = setup(EntropyLoss(**SIZE, loss=loss), WORKLOAD.variants[name], place)  # type: ignore[arg-type]
            reasons.append(running.run(session, place, settings, 2.0, lambda message: None)[0].wrong)
    for loss in ("cross_entropy", "forward_kl"):
        problem = LinearLoss(tokens=16, hidden=32, vocab=102, loss=loss)  # type: ignore[arg-type]
        session = setup_linear(problem, LINEAR.variants["linear_gather"], place)
        reasons.append(running.run(session, place, settings, 2.0, lambda message: None)[0].wrong)
    return reasons


def test_variants_of_both_losses_are_right_on_fresh_inputs() -> None:
    assert run_on_ranks(RANKS, others)[0] == [None] * 10


EXCHANGE = EmbeddingGrad(table_rows=101, width=12, tokens=10, accumulate=2, dtype="float32")
BLOCK = TpBlock(tokens=32, hidden=24, ffn=40, heads=8, kv_heads=4, head_dim=6, dtype="float32")
ELSEWHERE: dict[str, tuple[Any, Any, str | None]] = {
    "honest_exchange": (setup_exchange, EXCHANGE, None),
    "exchange_with_stored_answer": (setup_exchange, EXCHANGE, CHANGED),
    "exchange_that_writes": (setup_exchange, EXCHANGE, "the variant wrote to its inputs"),
    "honest_block": (setup_block, BLOCK, None),
    "block_with_stored_output": (setup_block, BLOCK, CHANGED),
    "block_that_returns_early": (setup_block, BLOCK, TIMED),
}
"""Variants of other workloads: the function that sets them up, the problem, and the beginning of the reason."""


def elsewhere(here: Rank, names: list[str], fresh: bool) -> list[str | None]:
    """Return why each of these variants of `ELSEWHERE` is wrong. The ranks are data-parallel for an exchange.

    `fresh`: the variants are of this package, whose results are audited only on fresh inputs.
    """
    settings = MeasureSettings(time_budget_s=20.0, min_iterations=3, max_iterations=3, fresh=fresh)
    along = context(here)
    across = replace(along, tp_rank=0, tp_size=1, dp_rank=here.rank, dp_size=here.world_size)
    reasons = []
    for name in names:
        make, problem, _ = ELSEWHERE[name]
        place = along if make is setup_block else across
        variant = Variant(name, "", getattr(cheats, name), place=None if fresh else ("file", 1))
        with mock.patch.dict(stopwatch.ITERATIONS, cpu=1, cuda=1):
            session: Any = make(problem, variant, place)
        session.details = lambda columns: {}
        reasons.append(running.run(session, place, settings, 2.0, lambda message: None)[0].wrong)
    return reasons


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("make", [pytest.param(setup_exchange, marks=needs_two_ranks), setup_block])
def test_cheats_of_other_workloads_end_as_wrong(make: Any, fresh: bool) -> None:
    begins = {name: begin for name, (setup_variant, _, begin) in ELSEWHERE.items() if setup_variant is make}
    reasons = dict(zip(begins, run_on_ranks(RANKS, elsewhere, list(begins), fresh)[0], strict=True))
    if fresh or not CUDA:  # the last timed iteration had other inputs than the first one
        begins = {name: TIMED if begin == CHANGED else begin for name, begin in begins.items()}
    assert {name: reason and reason[: len(begins[name] or "")] for name, reason in reasons.items()} == begins


PACKAGED = {
    "block": (setup_block, BLOCK, BLOCKS, ("block_tp", "block_copy_engine", "block_symm_mem", "block_no_tp")),
    "exchange": (setup_exchange, EXCHANGE, EXCHANGES, ("dense_reduce_scatter", "sparse_all_to_all")),
}


def on_fresh_inputs(here: Rank, kind: str) -> dict[str, str | None]:
    """Return why each of the package's variants is wrong on fresh inputs."""
    make, problem, workload, names = PACKAGED[kind]
    settings = MeasureSettings(time_budget_s=20.0, min_iterations=3, max_iterations=3, fresh=True)
    along = context(here)
    across = replace(along, tp_rank=0, tp_size=1, dp_rank=here.rank, dp_size=here.world_size)
    place, reasons = along if make is setup_block else across, {}
    for name in names:
        variant = workload.variants[name]
        runs_here = torch.cuda.is_available() or variant.requires_cuda is not True
        if runs_here and not variant.unsupported_reason(problem, place.tp_size):
            with mock.patch.dict(stopwatch.ITERATIONS, cpu=1, cuda=1):
                session: Any = make(problem, variant, place)
            session.details = lambda columns: {}
            reasons[name] = running.run(session, place, settings, 2.0, lambda message: None)[0].wrong
    return reasons


@pytest.mark.parametrize("kind", ["block", pytest.param("exchange", marks=needs_two_ranks)])
def test_blocks_and_exchanges_are_right_on_fresh_inputs(kind: str) -> None:
    reasons = run_on_ranks(RANKS, on_fresh_inputs, kind)[0]
    assert len(reasons) >= RANKS and not any(reasons.values()), reasons


TRAINING = {
    "model": "tiny", "architecture": "qwen3", "hidden_size": 32, "ffn_size": 64, "layers": 2, "heads": 4,
    "kv_heads": 2, "head_dim": 8, "vocab": 96, "batch_size": 2, "seq_length": 16, "learning_rate": 1e-2,
    "warmup_steps": 3, "steps": 4, "log_interval": 0,
}  # fmt: skip
TRAININGS = {
    "honest_training": None,
    "training_that_stores_losses": "losses of the timed steps",
    "training_that_knows_all_losses": "losses of the changed batches",
    "training_without_updates": "losses of the timed steps",
    "training_that_returns_early": "losses of the timed steps",
    "training_that_writes_to_its_batches": "the variant wrote to its inputs",
    "training_that_computes_when_read": "the step returned a _Lazy in place of a torch.Tensor",
}
"""Variants of the train step, with a part of the reason."""


def trained(here: Rank, fields: dict[str, Any]) -> dict[str, tuple[str | None, dict[str, Any]]]:
    """Return the reason and the columns of each variant of `TRAININGS`. Its ranks are data-parallel."""
    place = mesh_context(here, 1)
    problem = TrainStep(**{**TRAINING, **fields})
    results = {}
    for name in TRAININGS:
        with mock.patch.dict(stopwatch.ITERATIONS, cpu=1, cuda=1):
            session = setup_training(problem, Variant(name, "", getattr(cheats, name), place=("file", 1)), place)
        verdict, columns = running.run(session, place, MeasureSettings(), 2.0, lambda message: None)
        results[name] = verdict.wrong, columns | verdict.columns
    return results


@pytest.mark.parametrize(
    "fields", [{"dtype": "float32"}, {"dtype": "bfloat16", "batches": 1, "accumulate": 2}], ids=["float32", "bfloat16"]
)
def test_cheats_of_the_train_step_end_as_wrong(fields: dict[str, Any]) -> None:
    results = run_on_ranks(RANKS, trained, fields)[0]
    for name, part in TRAININGS.items():
        reason, columns = results[name]
        assert (reason is None) == (part is None) and (part or "") in (reason or ""), (name, reason)
        assert ("time_ms" in columns) == (part is None)
        assert columns["oracle"] == "7 steps and 3 on changed batches by one process"
        assert len(columns["losses"]) == 7


def changed(here: Rank) -> list[Any]:
    torch.manual_seed(0)
    floats, labels = torch.randn(40, 3), torch.arange(5)
    before, version = floats.clone(), floats._version
    inputs = Inputs([floats, labels])
    inputs.remember()
    inputs.change()
    inputs.change()
    after, fingerprints = floats.clone(), (fingerprint(floats), fingerprint(floats.flip(0)), fingerprint(before))
    inputs.undo()
    same = torch.equal(floats, before) and inputs.unchanged() and floats._version == version
    labels[0], labels[1] = 1, 0
    return [after, same, inputs.unchanged(), len(set(fingerprints))]


def test_a_change_negates_the_same_rows_on_all_ranks_and_can_be_undone() -> None:
    one, other = run_on_ranks(2, changed)
    assert torch.equal(one[0], other[0])
    assert one[1:] == [True, False, 3]


def test_the_guard_restores_the_code_that_a_decorator_wraps() -> None:
    guard, wrapped = Guard(), vars(linear_function.linear_entropy_loss)["__wrapped__"]
    code = wrapped.__code__
    wrapped.__code__ = (lambda *inputs, **options: None).__code__
    assert "tpbench.kernels.linear.function.linear_entropy_loss" in guard.restored()
    assert wrapped.__code__ is code and guard.restored() == []


def test_the_guard_names_a_replaced_function_and_no_other_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first import of torch._dynamo replaces torch.manual_seed, and each new process group counts up."""
    guard = Guard()
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_group_count", 7)
    assert guard.restored() == []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda one, other: True)
    assert guard.restored() == ["torch.equal"] and torch.equal is equal
