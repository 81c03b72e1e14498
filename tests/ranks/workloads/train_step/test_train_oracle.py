"""The session compares a run with the oracle: errors of an implementation must show in the row."""

import contextlib
import gc
import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.sleeping_sessions import run as measure
from tests.support.train_step import batches_here, mesh_context, prepared, reset_deepspeed_groups, tiny_problem
from tpbench.measure.session import MeasureSettings
from tpbench.workloads.train_step import WORKLOAD, oracle
from tpbench.workloads.train_step.bench import TrainStepSession
from tpbench.workloads.train_step.estimates import step_flops
from tpbench.workloads.train_step.problem import PHASES
from tpbench.workloads.train_step.sharding import by_modules
from tpbench.workloads.train_step.training import fsdp
from tpbench.workloads.train_step.training.losses import local_shard

pytestmark = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")


def without_norms(model: Any, **options: Any) -> DistributedDataParallel:
    model._ddp_params_and_buffers_to_ignore = [name for name, _ in model.named_parameters() if "norm.weight" in name]
    return DistributedDataParallel(model, **options)


def measured(
    here: Rank, name: str, fields: dict[str, Any], spoil: str = "", tp_size: int = 2
) -> tuple[str | None, dict[str, Any], int]:
    """Measure a cell with a trainer that `spoil` makes wrong. Return the complaint, columns and number of updates."""
    problem = tiny_problem(**{"steps": 4, "warmup_steps": 1, "log_interval": 0, **fields})
    context = mesh_context(here, tp_size)
    reset_deepspeed_groups(here)
    with contextlib.ExitStack() as patches:
        if spoil == "norms":  # DistributedDataParallel leaves these parameters alone
            patches.enter_context(mock.patch.object(fsdp, "DistributedDataParallel", without_norms))
        if spoil == "unsummed":  # each rank of a replica keeps its share of the gradients of norms
            patches.enter_context(mock.patch.object(by_modules, "gradient_reduction", return_value=None))
        session = TrainStepSession(problem, WORKLOAD.variants[name], context)
    trainer: Any = session.trainer
    accumulate, update, count = trainer.accumulate, trainer.update, [0]

    def spoiled_accumulate(batches: Any, mark: Any) -> torch.Tensor:
        if spoil == "stop" and count[0] == oracle.STEPS:
            trainer.during_micro_batch = lambda last: trainer.model.no_sync()
        loss = accumulate(batches, mark)
        if spoil == "gradient" and here.rank == 1:
            trainer.model.model.norm.weight.grad.to_local().mul_(3)
        if spoil in ("lost", "too large") and count[0] == 0:
            named = dict(trainer.model.named_parameters())
            (found,) = (each for name, each in named.items() if name.endswith("layers.1.self_attn.q_norm.weight"))
            local_shard(found.grad).mul_(0.0 if spoil == "lost" else 1.25)
        return loss / 2 if spoil == "loss" else loss

    def spoiled_update(mark: Any) -> torch.Tensor:
        count[0] += 1
        if spoil == "unreduced" and here.rank == 1:
            for each in trainer.parameters:
                each.grad = each.grad * 0.5
        norm = update(mark)
        return norm * 1.1 if spoil == "norm" else norm * float("nan") if spoil == "nan" else norm

    trainer.accumulate, trainer.update = spoiled_accumulate, spoiled_update
    verdict, columns = measure(session, context, MeasureSettings())
    updates = count[0]
    if verdict.wrong is None:
        session.step()  # the next step is queued without waiting for the device
        assert len(session.phases.times_ms) == problem.warmup_steps + problem.steps
    return verdict.wrong, columns | verdict.columns, updates


def test_a_cell_trains_exactly_its_steps_and_times_their_phases() -> None:
    cuda = torch.cuda.is_available()
    for wrong, columns, updates in run_on_ranks(2, measured, "fsdp_dtensor", {}):
        assert wrong is None
        assert updates > 5 if cuda else updates == 1 + 4  # on a GPU, a trace needs more
        assert len(columns["samples_ms"]) == columns["iterations"] == 4
        assert len(columns["losses"]) == len(columns["grad_norms"]) == 5
        assert columns["loss_value"] == columns["losses"][-1]
        assert columns["oracle"] == "3 steps by one process"
        assert columns["loss_error"] < 1e-5 and columns["grad_error"] < 1e-4
        phases_ms = [columns[f"step_{phase}_ms"] for phase in PHASES]
        for total_ms, *parts_ms in zip(columns["samples_ms"], *phases_ms, strict=True):
            assert all(part_ms > 0 for part_ms in parts_ms) and sum(parts_ms) <= total_ms
        assert sum(columns[f"{phase}_ms"] for phase in PHASES) <= columns["time_ms"]
        held, peaks = columns["iteration_held_gib"], columns["iteration_peak_gib"]
        assert len(held) == len(peaks) == 4 and columns["peak_gib"] == max(peaks)
        assert all(low <= high for low, high in zip(held, peaks, strict=True)), (held, peaks)
        assert ("communication_share" in columns) == cuda
        assert cuda or "mfu" not in columns


SPOILED = {
    (
        "fsdp_dtensor",
        "loss",
    ): r"rank 0: loss_error 0\.5 is above 0\.0001 \(float32\): the loss of step 1 is [\d.]+, expected",
    ("fsdp_dtensor", "gradient"): r"rank 1: grad_error .*the gradient norm of step 1 is [\d.]+, expected [\d.]+",
    ("fsdp_dtensor", "unreduced"): "rank 0: grad_error .*the gradient norm of step 1 is",
    ("ddp", "norms"): r"rank 0: the replicas' weights differ, the first in model\.layers\.0\..*norm\.weight: reduce",
    ("fsdp_dtensor", "lost"): r"rank 0: the gradient norm of .*\.1\.self_attn\.q_norm\.weight in step 1 is 0,",
    ("fsdp_dtensor", "unsummed"): r"rank 0: the gradient norm of .*norm\.weight in step 1 is",
    ("ddp", "too large"): r"rank 0: the gradient norm of model\.layers\.1\.self_attn\.q_norm\.weight in step 1 is",
    ("ddp", "stop"): "rank 0: the replicas' weights differ, the first in model",
    ("autotp", "norm"): "rank 0: grad_error .*the gradient norm of step 1 is",
    ("autotp", "nan"): "rank 0: grad_error inf is above .*the gradient norm of step 1 is nan",
}


@pytest.mark.parametrize(("name", "spoil"), SPOILED)
def test_a_wrong_cell_has_no_time_and_says_where(name: str, spoil: str) -> None:
    fields: dict[str, Any] = {"dtype": "bfloat16"} if name == "ddp" else {}
    tp_size = 1 if name == "ddp" else 2
    fields |= {"learning_rate": 1e-4} if spoil == "unsummed" else {}  # losses and norms of later steps hardly change
    for wrong, columns, _ in run_on_ranks(2, measured, name, fields, spoil, tp_size):
        assert re.match(SPOILED[name, spoil], str(wrong)), wrong
        assert "time_ms" not in columns and "tokens_per_s" not in columns


def gradient_errors(here: Rank, name: str, tp_size: int, fields: dict[str, Any]) -> tuple[int, str | None]:
    """Return how many of the first step's gradients are compared, and what is wrong with them."""
    problem, context = tiny_problem(**fields), mesh_context(here, tp_size)
    reference = oracle.compute_reference(problem, context)
    trainer = prepared(name, problem, context)
    trainer.accumulate(batches_here(problem, context, 0))
    norms = oracle.gradient_norms(trainer, reference.of_parameters, context)
    return len(norms), reference.gradient_complaint(norms, float(trainer.update()), problem.dtype)


@pytest.mark.parametrize(
    ("ranks", "name", "tp_size", "fields"),
    [
        (2, "autotp", 2, {"dtype": "bfloat16"}), (2, "autotp", 1, {"zero_stage": 0}), (2, "dtensor_tp", 2, {}),
        (2, "fsdp", 1, {"dtype": "bfloat16"}), (2, "ddp", 1, {}),
        pytest.param(4, "fsdp_dtensor", 2, {}, marks=pytest.mark.skipif(not enough_gpus(4), reason="needs 4 GPUs")),
    ],
    ids=str,
)  # fmt: skip
def test_the_first_gradient_of_every_parameter_is_compared(
    ranks: int, name: str, tp_size: int, fields: dict[str, Any]
) -> None:
    parameters = 2 * 11 + 3  # two layers have 22, and the embedding, the last norm and the head have one each
    assert {*run_on_ranks(ranks, gradient_errors, name, tp_size, fields)} == {(parameters, None)}


def tensors_left(here: Rank, name: str, tp_size: int, fields: dict[str, Any]) -> int:
    """Return the bytes of all tensors of this process after a cell, beyond those before it."""

    def held() -> int:
        gc.collect()
        tensors = (each for each in gc.get_objects() if isinstance(each, torch.Tensor) and not each.is_meta)
        storages = (local_shard(each).untyped_storage() for each in tensors)
        # Compilations of other tests leave fake tensors, whose storage has no memory.
        return sum({each.data_ptr(): each.nbytes() for each in storages if each.device.type != "meta"}.values())

    measured(here, name, fields, "", tp_size)  # packages keep some tensors from their first use on
    before = held()
    measured(here, name, fields, "", tp_size)
    return held() - before


@pytest.mark.parametrize(
    ("name", "tp_size", "train_loss"),
    [("fsdp_dtensor", 2, "tpbench_linear"), ("dtensor_tp", 2, "tpbench_linear"), ("ddp", 1, "tpbench")],
)
def test_a_cell_leaves_no_tensor_to_the_next_one(name: str, tp_size: int, train_loss: str) -> None:
    """With reuse=true, cells share their processes."""
    assert run_on_ranks(2, tensors_left, name, tp_size, {"train_loss": train_loss}) == [0, 0]


def references(here: Rank, fields: dict[str, Any]) -> list[oracle.Reference]:
    """Return the references of a model that one process can train, and whose memory, operations or losses it cannot."""
    problem, context = tiny_problem(**fields), mesh_context(here, here.world_size // 2)
    made = [oracle.compute_reference(problem, context)]
    for limit in ({"MEMORY_SHARE": 0.0}, {"MAX_FLOPS": {here.device.type: 1.0}}):
        with mock.patch.multiple(oracle, **limit):
            made.append(oracle.compute_reference(problem, context))
    return [*made, oracle.compute_reference(replace(problem, learning_rate=1e38), context)]


@pytest.mark.parametrize(
    "fields", [{"tied": True, "accumulate": 2}, {"dtype": "bfloat16", "architecture": "llama"}], ids=str
)
def test_a_model_too_large_to_train_gets_a_forward_pass(fields: dict[str, Any]) -> None:
    """The references use the batches of all replicas and are the same on every rank."""
    on_ranks = run_on_ranks(2, references, fields)
    assert on_ranks[0] == on_ranks[1]
    trained, forward, *others = on_ranks[0]
    assert (len(trained.losses), len(trained.norms)) == (3, 3)
    assert (len(forward.losses), len(forward.norms)) == (1, 0) and others == [forward, forward]
    assert forward.losses[0] == pytest.approx(trained.losses[0], rel=1e-6)
    assert forward.errors([forward.losses[0]], [])["grad_error"] is None
    assert "loss_error 0.1" in str(forward.complaint([forward.losses[0] * 1.1], [], "bfloat16"))


def references_of_all_steps(here: Rank) -> list[oracle.Reference]:
    """Return the references of a variant from outside, if all steps, the first ones, or none can be trained."""
    problem, context = tiny_problem(warmup_steps=1, steps=4), mesh_context(here, 1)
    made = []
    for steps in (5, 3, 2):
        most = step_flops(problem) * here.world_size * steps
        with mock.patch.dict(oracle.MAX_FLOPS, {here.device.type: most}):
            made.append(oracle.compute_reference(problem, context, whole_run=True))
    return [*made, oracle.compute_reference(replace(problem, learning_rate=0.0, batches=1), context, whole_run=True)]


def test_a_variant_from_outside_is_compared_with_the_whole_run() -> None:
    every, first, none, constant = run_on_ranks(2, references_of_all_steps)[1]
    assert (every.source, len(every.losses), every.timed_from) == ("all 5 steps by one process", 5, 1)
    assert first.source == "3 steps by one process; later steps are not checked"
    assert none.source == "loss of the first step by a forward pass; later steps are not checked"
    assert constant.source == "all 5 steps by one process; skipped updates would not show"
