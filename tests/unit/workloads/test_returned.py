"""Values of the wrong type from a variant."""

import json
import math
import re
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tpbench.measure.session import Costs, Verdict
from tpbench.worker.process import location
from tpbench.workloads import Variant
from tpbench.workloads.differences import malformed
from tpbench.workloads.entropy_loss.inputs import Output
from tpbench.workloads.entropy_loss.problem import WORKLOAD
from tpbench.workloads.linear_loss.inputs import Output as LinearOutput
from tpbench.workloads.operation import counted_costs, require_verdict
from tpbench.workloads.step import Step, StepSession, WrongReturn, checked_columns, require


def prepare(problem, shard):
    return torch.ones(2)


MINE = Variant("mine", "returns a tensor", prepare)


def test_a_tensor_in_place_of_an_output():
    with pytest.raises(WrongReturn) as caught:
        require(prepare(None, None), Output, MINE, "the step")
    assert str(caught.value) == (
        "the step of mine must return the type Output (loss, row_loss, grad, grad_factor), not Tensor"
    )
    assert re.fullmatch(r"test_returned\.py:\d+", location(caught.value))


def test_nothing_in_place_of_a_step():
    with pytest.raises(TypeError, match=r"^the function of mine must return the type Step \(run, .*\), not NoneType$"):
        require(None, Step, MINE, "the function")


def test_the_right_type_passes():
    step = Step(lambda: None)
    assert require(step, Step, MINE, "the function") is step


@pytest.mark.parametrize("output", [Output, LinearOutput])
def test_sessions_check_what_the_function_and_its_step_return(output):
    with pytest.raises(WrongReturn, match=r"^the function of mine must return the type Step "):
        StepSession(MINE, torch.ones(2), output)
    session = StepSession(MINE, Step(lambda: torch.ones(2)), output)
    with pytest.raises(RuntimeError, match="run step"):
        session.take_output()
    session.step()
    with pytest.raises(
        WrongReturn, match=r"^the step of mine must return the type Output \(loss, row_loss, .*, not Tensor$"
    ):
        session.take_output()


@pytest.mark.parametrize("sent", [768.0, float("nan"), "768", -1, 10**30, True, None, lambda: 768.0])
def test_bytes_sent_are_a_whole_number(sent):
    session = StepSession(MINE, Step(lambda: None, bytes_communicated=sent), Output)
    with pytest.raises(WrongReturn, match=r"^bytes_communicated of mine must be an int of at least 0, not "):
        _ = session.bytes_communicated


@pytest.mark.parametrize(
    "step", [Step(3), Step(print, columns={}), Step(print, restore=1), Step(print, communicates_in_kernels=1)]
)
def test_parts_of_a_step_are_functions(step):
    with pytest.raises(
        WrongReturn,
        match=r"^(run|columns|restore|communicates_in_kernels) of the step of mine must be a function, not ",
    ):
        StepSession(MINE, step, Output)


MEASURED = ("gpu_name", "host", "git_commit", "kernels_version", "variant", "time_ms", "device_ms", "loss_error", "key",
            "tokens", "no_such_column", 3)  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_a_variant_sets_no_column_that_is_measured(name):
    with pytest.raises(WrongReturn, match=rf"^mine sets {name}: no column of a variant is called {name}.*registers"):
        checked_columns(lambda: {name: 1}, MINE, WORKLOAD)


@pytest.mark.parametrize("value", [torch.ones(1), "many", 3.5, 10**30, True, math.nan])
def test_columns_of_a_variant_have_the_types_of_their_columns(value):
    with pytest.raises(WrongReturn, match=r"^mine sets registers: it must be of type int, not "):
        checked_columns(lambda: {"registers": value}, MINE, WORKLOAD)
    for columns in ([], list, {}):
        with pytest.raises(WrongReturn, match=r"Mapping|must be a function"):
            checked_columns(columns, MINE, WORKLOAD)
    stored = checked_columns(
        lambda: {"registers": np.int32(3), "occupancy": Fraction(1, 2), "algorithm_used": None}, MINE, WORKLOAD
    )
    assert json.dumps(stored) == '{"registers": 3, "occupancy": 0.5, "algorithm_used": null}'


def costs(problem, rank):
    return COSTS[problem]


COSTS = [Costs(1.0, 0), Costs(0, "1"), Costs(0, 0, flops=1e12), Costs(-1, 0), Costs(0, None), None]


@pytest.mark.parametrize("index", range(len(COSTS)))
def test_costs_are_whole_numbers(index):
    with pytest.raises(
        WrongReturn, match=r"of costs must be an int of at least 0|must return tpbench.api.Costs"
    ) as caught:
        counted_costs(SimpleNamespace(functions={"costs": costs}), index, None)
    assert re.fullmatch(r"test_returned\.py:\d+", location(caught.value))


@pytest.mark.parametrize(
    "verdict",
    [None, Verdict([], None), Verdict({}, True), Verdict({"time_ms": 1.0}, None), Verdict({"loss_error": "a"}, None)],
)
def test_a_check_returns_a_verdict_that_a_row_can_hold(verdict):
    with pytest.raises(WrongReturn, match=r"must return tpbench\.api\.Verdict|may set the columns|must be a float"):
        require_verdict(verdict, costs)


@pytest.mark.parametrize("value", [torch.eye(2).to_sparse(), torch.eye(2) * 1j, torch.eye(2, device="meta"), 1.0])
def test_an_output_of_another_kind_is_named(value):
    assert re.fullmatch(
        r"grad is .*(torch\.sparse_coo|torch\.complex64|meta|of the type float).*, expected \(2, 2\) on cpu",
        malformed("grad", value, (2, 2), None, torch.device("cpu")) or "",
    )
