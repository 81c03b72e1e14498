"""Wrong results, wrong sizes, counts, and the choice of schedules."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks.workloads.tp_block.test_block_variants import differences, passed
from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.tp_block import context, place, problem
from tpbench.job import JobError, parse_job, refusal
from tpbench.workloads.tp_block import WORKLOAD, autotune, bench, costs, oracle
from tpbench.workloads.tp_block.copy_engine import CopyEngineSchedule
from tpbench.workloads.tp_block.exposed_communication import Collectives
from tpbench.workloads.tp_block.prepared import prepare
from tpbench.workloads.tp_block.ring import RingSchedule
from tpbench.workloads.tp_block.schedule import NoCommunicationSchedule, SequentialSchedule
from tpbench.workloads.tp_block.symm_mem import SymmMemSchedule, TorchWorkspace

needs_ranks = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
TINY = {"tokens": 64, "hidden": 64, "ffn": 160, "heads": 8, "kv_heads": 4, "head_dim": 8}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tp_size": 8}, ["kv_heads=4 must divide by tp_size=8"]),
        ({"tp_size": 3}, ["tokens=64 must divide", "ffn=160 must divide", "heads=8 must divide", "kv_heads=4 must"]),
        ({"kv_heads": 3, "tp_size": 1}, ["heads=8 must divide by kv_heads=3"]),
        ({"dp_size": 2}, ["dp_size=2 must be 1"]),
    ],
)
def test_sizes_that_do_not_divide_are_errors_before_a_launch(changes: dict[str, int], said: list[str]) -> None:
    with pytest.raises(JobError) as raised:
        parse_job({"variant": "block_tp", "tp_size": 2, **TINY, **changes})
    for each in said:
        assert each in str(raised.value)
    assert len(str(raised.value).splitlines()) == len(said)


def test_what_a_variant_cannot_do_is_refused_with_the_reason() -> None:
    odd = {**TINY, "tokens": 8, "tp_size": 4}
    assert "tokens=8 must divide by tp_size^2=16" in str(refusal(parse_job({"variant": "block_tp_overlap", **odd})))
    assert refusal(parse_job({"variant": "block_tp", **odd})) is None
    alone = {**TINY, "tp_size": 1}
    assert refusal(parse_job({"variant": "block_no_tp", **alone})) is None
    for name in WORKLOAD.variants.keys() - {"block_no_tp"}:
        assert "block_no_tp is that" in str(refusal(parse_job({"variant": name, **alone})))
    # Heads are no matter of the bare linears.
    assert parse_job({"variant": "block_tp", **TINY, "tp_size": 8, "part": "mlp"}).problem.part == "mlp"


def test_counts_of_llama_8b() -> None:
    cell = problem(tokens=8192, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, dtype="bfloat16")
    weights = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336
    assert costs.flops(cell, 4) == 3 * (2 * 8192 * weights + 2 * 8192**2 * 4096) // 4
    matrix = 8192 * 4096 * 2
    assert costs.bytes_sent(cell, 4, 2) == (8 * matrix + 4 * 4096 * 2) * 3 // 4
    again = problem(**{**cell.__dict__, "save_gathered": False})
    assert costs.bytes_sent(again, 4, 2) - costs.bytes_sent(cell, 4, 2) == 2 * matrix * 3 // 4
    assert costs.bytes_sent(again, 4, 2, least=True) == costs.bytes_sent(cell, 4, 2)
    assert costs.bytes_sent(cell, 1, 2) == 0
    assert costs.bytes_moved(cell, 1, 2) == 2 * 2 * (weights + 2 * 4096 + 2 * 8192 * 4096)


class Counted(SequentialSchedule):
    """Knows what it handed over."""

    sent = 0

    def gather(self, shard: torch.Tensor) -> Any:
        self.sent += shard.nbytes * (self.size - 1)
        return super().gather(shard)

    def scatter(self, parts: torch.Tensor) -> torch.Tensor:
        self.sent += parts.nbytes * (self.size - 1) // self.size
        return super().scatter(parts)


def sent(here: Rank, part: str, keep: bool) -> tuple[int, int]:
    cell = problem(part=part, save_gathered=keep)
    schedule = Counted(here.group)
    passed(cell, prepare(place(here, cell), schedule))
    norms = len(cell.norms) * 2 * cell.hidden * 8 * (here.world_size - 1) // here.world_size
    return schedule.sent + norms, costs.bytes_sent(cell, here.world_size, 8)


@needs_ranks
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("part", ["block", "column", "row"])
def test_what_is_sent_is_what_is_counted(part: str, keep: bool) -> None:
    for handed_over, counted in run_on_ranks(2, sent, part, keep):
        assert handed_over == counted


def alone(here: Rank, part: str, keep: bool) -> tuple[list[str], int]:
    """The collectives of a step that are timed alone, and the bytes that the step sends."""
    cell = problem(part=part, save_gathered=keep)
    timed = Collectives(place(here, cell).inputs)
    names: list[str] = []
    with (
        mock.patch.object(timed, "gather", lambda: names.append("matrix")),
        mock.patch.object(timed, "scatter", lambda: names.append("matrix")),
        mock.patch.object(dist, "all_reduce", lambda *_, **__: names.append("norm")),
    ):
        timed.run()
    return names, costs.bytes_sent(cell, here.world_size, 8)


@needs_ranks
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("part", ["block", "column", "row"])
def test_what_is_timed_as_communication_is_what_is_counted(part: str, keep: bool) -> None:
    cell = problem()
    each = {"matrix": cell.tokens * cell.hidden * 8 // 2, "norm": 2 * cell.hidden * 8 // 2}
    for names, counted in run_on_ranks(2, alone, part, keep):
        assert sum(each[name] for name in names) == counted


def order_of_events(here: Rank) -> tuple[list[str], list[str]]:
    """What a ring does in a gather and in a scatter, in order."""
    ring, said = RingSchedule(here.group), []

    def told(name: str, of: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            said.append(name)
            made = of(*args, **options)
            return [Work(each) for each in made] if isinstance(made, list) else Work(made) if name == "reduce" else made

        return call

    class Work:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            said.append("wait")
            self.work.wait()

    rows, matrix = torch.ones(4, 3, device=here.device), torch.ones(3, 2, device=here.device)
    patched = {(dist, "batch_isend_irecv"): "send", (dist, "reduce"): "reduce", (torch, "mm"): "product"}
    with contextlib.ExitStack() as stack:
        for (module, name), word in patched.items():
            stack.enter_context(mock.patch.object(module, name, told(word, getattr(module, name))))
        ring.gather_matmul(rows, matrix)
        gathered, said[:] = list(said), []
        finish = ring.matmul_scatter(rows, matrix)
        before = list(said)
        finish()
    return gathered, before


@needs_ranks
def test_the_ring_sends_before_each_product_and_waits_after_it() -> None:
    """Results would be the same without any overlap."""
    for gathered, scattered in run_on_ranks(2, order_of_events):
        assert [name for name, _ in itertools.groupby(gathered)] == ["send", "product", "wait", "product"]
        assert scattered == ["product", "reduce"] * 4  # nobody waits before the last one is on its way


def verdicts(here: Rank) -> list[tuple[str | None, float]]:
    """Of a block that is right, of one without its communication, and of gradients that one rank lost."""
    cell = problem(dtype="float32")
    session = bench.setup(cell, WORKLOAD.variants["block_tp"], context(here))
    session.step()
    found = [session.check()]
    right = session.prepared
    session.prepared = prepare(session_place := place(here, cell), NoCommunicationSchedule(here.rank, here.world_size))
    session.step()
    found.append(session.check())
    session.prepared = right
    session.step()
    assert session_place is not None and session.prepared.x.grad is not None
    if here.rank == 1:
        session.prepared.x.grad[-1] = math.nan
    found.append(session.check())
    return [(each.wrong, each.columns["grad_error"]) for each in found]


@needs_ranks
def test_the_oracle_catches_what_is_wrong_and_all_ranks_agree() -> None:
    first, second = run_on_ranks(2, verdicts)
    assert first == second
    (right, error), (silent, _), (lost, infinite) = first
    assert right is None and error < oracle.TOLERANCE["float32"] / 4
    assert silent is not None and "output_error" in silent and "grad_error" in silent
    assert lost is not None and "grad_error (of input) inf" in lost and infinite == math.inf


def detailed(here: Rank, name: str, part: str) -> dict[str, float]:
    session = bench.setup(problem(part=part, save_gathered=False), WORKLOAD.variants[name], context(here))
    session.step()
    assert session.check().wrong is None
    found = session.details({"time_ms": 3.0, "device_ms": None, "copy_gb_per_s": 1.0})
    assert session.output is None and session.prepared.x.grad is None, "nothing of it is kept"
    return {name: value for name, value in found.items() if name.endswith(("_ms", "share", "hidden"))}


@needs_ranks
@pytest.mark.parametrize(
    ("name", "part", "directions"),
    [
        ("block_tp", "column", {"gather_hidden"}),
        ("block_tp_overlap", "row", {"scatter_hidden"}),
        ("block_auto", "mlp", {"gather_hidden", "scatter_hidden"}),
        ("block_no_tp", "block", None),
    ],
)
def test_details_are_of_what_the_part_communicates(name: str, part: str, directions: set[str] | None) -> None:
    found = run_on_ranks(2, detailed, name, part)[0]
    exposure = {"compute_ms", "communication_ms", "exposed_ms", "hidden_share"}
    always = {"forward_ms", "backward_ms", "gemm_share", "timeline_ms", "timeline_start_ms"}
    assert found.keys() == always | (set() if directions is None else exposure | directions)


def test_the_plain_schedule_is_kept_unless_another_is_clearly_faster() -> None:
    assert autotune.pick({"plain": 1.0, "ring": 0.995, "copy_engine": 1.2}) == "plain"
    assert autotune.pick({"plain": 1.0, "ring": 0.985, "copy_engine": 0.9}) == "copy_engine"


class Pretended:
    """A stopwatch by which one schedule of those tried takes less than the others: of each operation, and of a step."""

    def __init__(self, of_operation: Callable[[int], str], of_step: str, names: list[str]) -> None:
        self.of_operation, self.of_step, self.names = of_operation, of_step, names
        self.tried: list[int] = []

    def interleaved_ms(self, *timed: Any, iterations: int | None = None) -> list[list[float]]:
        for run, _ in timed:
            run()
        if iterations is None:
            best = self.names.index(self.of_operation(len(self.tried)))
        else:
            best = len(timed) - 1 if self.of_step == "mixed" else ["plain", "ring"].index(self.of_step)
        self.tried.append(len(timed))
        return [[0.5 if at == best else 1.0] * 3 for at in range(len(timed))]


def chosen(here: Rank, best_step: str) -> tuple[dict[str, str], float]:
    """What is chosen where the ring takes half the time in the MLP's operations, and the worst error of the result."""
    cell = problem()
    where = place(here, cell)
    schedules = autotune.candidates(cell, where)
    stopwatch: Any = Pretended(lambda turn: "ring" if turn >= 4 else "plain", best_step, list(schedules))
    chooser = autotune.ScheduleTuner(type(where)(cell, where.inputs, stopwatch), schedules)
    chooser.settle()
    prepared = prepare(where, chooser.plan)
    errors = differences(passed(cell, prepared), cell, where.inputs, prepared.size)
    each_once = [len(schedules)] * 2 * len(cell.linears)
    assert stopwatch.tried == [*each_once, 3], (
        "each schedule once for each operation; the step by both and by the mixture"
    )
    assert chooser.facts()["chosen"].startswith(f"qkv forward: {chooser.chosen['qkv forward']}, ")
    return chooser.chosen, max(errors.values())


@needs_ranks
@pytest.mark.parametrize("best_step", ["mixed", "ring", "plain"])
def test_each_operation_has_a_schedule_of_its_own_unless_one_for_all_is_faster(best_step: str) -> None:
    for names, error in run_on_ranks(2, chosen, best_step):
        plain = {f"{linear} {way}": "plain" for linear in ("qkv", "out") for way in ("forward", "backward")}
        ring = {f"{linear} {way}": "ring" for linear in ("up", "down") for way in ("forward", "backward")}
        mixed = plain | ring
        assert names == (mixed if best_step == "mixed" else dict.fromkeys(mixed, best_step))
        assert error <= oracle.TOLERANCE["float64"]


class FakeArena:
    gib = 0.1875


class FakeFused(SymmMemSchedule):
    """Plain collectives, and torch's memory."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        SequentialSchedule.__init__(self, group)
        self.memory = TorchWorkspace(group.group_name)

    gather_matmul, matmul_scatter = SequentialSchedule.gather_matmul, SequentialSchedule.matmul_scatter


class FakeEngine(SequentialSchedule):
    """Plain collectives, and an arena's memory."""

    memory: Any = CopyEngineSchedule.memory

    def __init__(self, group: dist.ProcessGroup, arena: FakeArena) -> None:
        super().__init__(group)
        self.arena = arena


def held(here: Rank, best: list[str]) -> tuple[float | None, bool]:
    """The memory that a mixture of schedules reports, and whether the arena is still there."""
    cell = problem()
    where = place(here, cell)
    arena = FakeArena()
    schedules = {
        "plain": SequentialSchedule(here.group),
        "symm_mem": FakeFused(here.group),
        "copy_engine": FakeEngine(here.group, arena),
        "copy_engine_merged": FakeEngine(here.group, arena),
    }
    there = weakref.ref(arena)
    stopwatch: Any = Pretended(lambda turn: best[turn % len(best)], "mixed", list(schedules))
    chooser = autotune.ScheduleTuner(type(where)(cell, where.inputs, stopwatch), schedules)
    del arena, schedules
    library: Any = importlib.import_module("torch.distributed._symmetric_memory")
    workspace = torch.zeros(2**20, dtype=torch.uint8).expand(64, -1)  # nbytes as of 64 MiB
    with mock.patch.dict(library._group_name_to_workspace_tensor, {here.group.group_name: workspace}):
        chooser.settle()
        assert set(chooser.chosen.values()) == set(best)
        passed(cell, prepare(where, chooser.plan))
        return chooser.facts().get("workspace_gib"), there() is not None


@needs_ranks
@pytest.mark.parametrize(
    ("best", "gib", "arena"),
    [
        (["plain"], 0.0625, False),
        (["symm_mem"], 0.0625, False),
        (["copy_engine", "copy_engine_merged"], 0.25, True),
        (["symm_mem", "copy_engine"], 0.25, True),
    ],
)
def test_memory_of_what_was_tried_goes_or_is_reported(best: list[str], gib: float, arena: bool) -> None:
    assert run_on_ranks(2, held, best) == [(gib, arena)] * 2
