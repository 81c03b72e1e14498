"""A workload of a user's file on two ranks: the examples are right, and a planted fault is named with its place."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.ranks import Rank, RankError, ranks_here, run_on_ranks
from tests.support.sleeping_sessions import run
from tpbench.api.examples.moe import moe
from tpbench.measure.session import Context, Costs, IterationSchedule, MeasureSettings, Session, Verdict
from tpbench.workloads import Variant, Workload

RANKS = ranks_here(2)
SMALL = {"tokens": 24, "hidden": 16}
FRESH = MeasureSettings(time_budget_s=20.0, min_iterations=3, max_iterations=4, fresh=True)
KEPT = ("floor_ms", "bytes_communicated", "time_ms", "extra_ms", "place")
needs_two_ranks = pytest.mark.skipif(RANKS < 2, reason="needs 2 GPUs, or none")


def measured(here: Rank, change: Callable[[Workload, str], None] | None, case: str) -> dict[str, Any]:
    """Return status and reason of each variant of the example, or of the variant of a case."""
    workload = dataclasses.replace(moe, functions={**moe.functions}, variants={**moe.variants})
    if change:
        workload.variants.clear()
        change(workload, case)
    names = {field.name for field in dataclasses.fields(workload.problem)}
    problem = workload.problem(**{name: value for name, value in SMALL.items() if name in names})
    context = Context(here.rank, here.world_size, here.rank, here.world_size, 0, 1, here.group, here.group, here.device)
    ended = {}
    for variant in workload.variants.values():
        if not variant.requires_cuda or here.device.type == "cuda":
            outside = dataclasses.replace(variant, place=(__file__, 1))
            session = workload.set_up(problem, outside, context)
            verdict, columns = run(session, context, FRESH)
            columns = {key: columns.get(key) for key in KEPT}
            ended[variant.name] = {"wrong": verdict.wrong, **verdict.columns, **columns}
    return ended


@needs_two_ranks
def test_the_example_is_right() -> None:
    ended, other = run_on_ranks(RANKS, measured, None, "")
    assert ended.keys() == other.keys() and len(ended) >= 2
    for row in ended.values():
        assert row["wrong"] is None and row["time_ms"] > 0 and row["floor_ms"] > 0
        assert 0 <= row["output_error"] < 2.0**-6
    # This variant sends more than the costs say.
    assert ended["all_gather"]["bytes_communicated"] == (4 * SMALL["hidden"] + 8) * SMALL["tokens"]


def fault(workload: Workload, case: str) -> None:
    """Give the example one variant, or one of its functions, with a fault."""

    def prepare(problem: Any, inputs: dict[str, torch.Tensor], rank: Context) -> Callable[[], Any]:
        if case == "replaced":
            inputs["x"] = torch.zeros_like(inputs["x"])
        right, calls = moe.variants["all_to_all"].prepare(problem, inputs, rank), 0

        def step() -> Any:
            nonlocal calls
            calls += 1
            if case == "overwritten" and rank.rank == 1:
                inputs["x"].mul_(2)
            if case == "overwritten unseen":  # torch does not count this
                inputs["x"].data.clamp_(-0.5, 0.5)
            if case == "refresh":
                assert torch.equal(inputs["double"], 2 * inputs["x"])
            y = right()["y"]
            if case == "one row" and rank.rank == 1:
                y[3, 5:7] += 1
            elif case == "later" and calls > 5:
                y[0] = 0
            elif case == "unwritten":
                y.fill_(float("nan"))
            elif case == "in an input":
                return {"y": inputs["x"]}
            return {"names": {"z": y}, "shape": {"y": y[1:]}}.get(case, {"y": y})

        return step

    workload.variants["mine"] = Variant("mine", "", prepare)
    if case == "no costs":
        del workload.functions["costs"]
    if case == "check":
        reference = workload.functions.pop("reference")

        @workload.check(dict)
        def check(problem: Any, inputs: Any, output: Any, rank: Context) -> Verdict:
            error = float((output["y"].double() - reference(problem, inputs, rank)["y"]).abs().max())
            return Verdict({"output_error": error}, None if error < 0.1 else "it is wrong")

    if case == "refresh":
        make = workload.functions["inputs"]
        workload.functions["inputs"] = lambda *arguments: {**(x := make(*arguments)), "double": 2 * x["x"]}

        @workload.refresh
        def refresh(problem: Any, inputs: Any, rank: Context) -> None:
            inputs["double"].copy_(2 * inputs["x"])

    if case.startswith("details"):
        workload.columns = {"extra_ms": "time", "place": "rank"}

        @workload.details
        def details(problem: Any, inputs: Any, session: Any, rank: Context) -> dict[str, Any]:
            assert inputs is session.inputs and session.costs.bytes_moved and rank.seed == problem.seed
            session.restore()
            extra_ms = session.stopwatch.ms(session.step, session.restore) / session.columns["time_ms"]
            return {"extra_ms": extra_ms, "placed" if "wrong" in case else "place": rank.rank}

    random = {"random inputs": "inputs", "random reference": "reference"}.get(case)
    if random:
        function = workload.functions[random]

        def noisy(*arguments: Any) -> dict[str, torch.Tensor]:
            return {name: tensor + torch.rand(()) for name, tensor in function(*arguments).items()}

        workload.functions[random] = noisy


WRONG = {
    "one row": r"^output_error [\d.]+ is above 0\.0156 \(bfloat16\): "
    r"rank 1: 2 of 384 elements of y differ, most at \[3, [56]\]: expected \S+, got \S+$",
    "later": r"^the last iteration of the wall clock, after a correct first one: "
    r".* (most at \[0, \d+\]: |column \d+ of y)",
    "unwritten": r"rank 0: 384 of 384 elements .* got nan \(nan: computed, or memory that was never written\)$",
    "overwritten": "^mine overwrites its inputs",
    "overwritten unseen": "^mine overwrites its inputs",
    "replaced": "^output_error ",
    "names": r"^rank 0: the step returns the outputs z, expected y$",
    "shape": r"^rank 0: y is \(23, 16\) on \w+, expected \(24, 16\) on \w+$",
}
RAISES = {
    "in an input": "the output y of mine lies in memory of an input",
    "random inputs": "noisy computes another (x|scale|expert) when it is called twice",
    "random reference": "noisy computes another y when it is called twice",
    "details wrong": "details sets placed: no column of a workload is called placed, did you mean place",
}


@needs_two_ranks
@pytest.mark.parametrize("case", WRONG)
def test_a_fault_is_named_with_its_place(case: str) -> None:
    for ended in run_on_ranks(RANKS, measured, fault, case):
        assert re.search(WRONG[case], ended["mine"]["wrong"]), ended["mine"]["wrong"]


@needs_two_ranks
@pytest.mark.parametrize("case", RAISES)
def test_a_function_that_breaks_its_contract_raises(case: str) -> None:
    with pytest.raises(RankError, match=RAISES[case]):
        run_on_ranks(RANKS, measured, fault, case)


@needs_two_ranks
def test_a_workload_may_compare_outputs_itself() -> None:
    row = run_on_ranks(RANKS, measured, fault, "check")[0]["mine"]
    assert row["wrong"] is None and 0 < row["output_error"] < 0.1 and row["time_ms"] > 0
    assert row["bytes_communicated"] == SMALL["tokens"] * SMALL["hidden"] * 2


@needs_two_ranks
def test_inputs_that_follow_from_others_follow_their_changes() -> None:
    for ended in run_on_ranks(RANKS, measured, fault, "refresh"):
        assert ended["mine"]["wrong"] is None and ended["mine"]["time_ms"] > 0


@needs_two_ranks
def test_without_costs_there_is_no_floor() -> None:
    row = run_on_ranks(RANKS, measured, fault, "no costs")[0]["mine"]
    assert row["floor_ms"] is None and row["time_ms"] > 0 and row["wrong"] is None


@needs_two_ranks
def test_details_are_columns_of_a_correct_row() -> None:
    rows = run_on_ranks(RANKS, measured, fault, "details")
    assert [row["mine"]["place"] for row in rows] == list(range(RANKS))
    assert all(row["mine"]["extra_ms"] > 0 and row["mine"]["wrong"] is None for row in rows)


class Sums(Session):
    """Adds the ranks' numbers to a sum in each iteration."""

    schedule = IterationSchedule(warmup_iterations=1, iterations=3)
    costs = Costs(None, 8)

    def __init__(self, problem: Any, variant: Variant, rank: Context) -> None:
        self.rank, self.total = rank, torch.zeros(1)
        self.reduce = variant.prepare(problem, self.total, rank)

    def step(self) -> None:
        self.total += self.reduce(torch.full((1,), self.rank.rank + 1.0))

    def check(self) -> Verdict:
        wrong = None if float(self.total) == 4 * 3 else f"the sum is {float(self.total)}"
        return Verdict({"output_error": 0.0}, wrong)


class Boasts(Sums):
    def check(self) -> Verdict:
        return Verdict({"gpu_name": "GPU9000"}, None)


def no_session(*arguments: Any) -> dict[str, int]:
    return {}


def continued(here: Rank, session: Any) -> dict[str, Any]:
    def reduce(problem: Any, inputs: torch.Tensor, rank: Context) -> Any:
        def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
            torch.distributed.all_reduce(x)
            return x

        return sum_over_ranks

    def session_of_cell(*arguments: Any) -> Any:
        return session(*arguments)

    workload = Workload(moe.problem, name="sums")
    workload.session(session_of_cell)
    context = Context(here.rank, here.world_size, here.rank, here.world_size, 0, 1, here.group, here.group, here.device)
    made = workload.set_up(workload.problem(), Variant("mine", "", reduce, place=(__file__, 1)), context)
    verdict, columns = run(made, context, FRESH)
    return {"wrong": verdict.wrong, **columns}


@pytest.mark.skipif(torch.cuda.is_available(), reason="it reduces numbers of the CPU")
def test_a_session_of_a_workload_runs_each_of_its_iterations_once() -> None:
    for row in run_on_ranks(2, continued, Sums):
        assert row["wrong"] is None and len(row["samples_ms"]) == 3 and row["bytes_communicated"] == 8
    with pytest.raises(RankError, match=r"session_of_cell must return a tpbench\.api\.Session .*, not dict"):
        run_on_ranks(2, continued, no_session)
    with pytest.raises(RankError, match="session_of_cell sets gpu_name: no column of a workload is called gpu_name"):
        run_on_ranks(2, continued, Boasts)
