"""Values of the wrong type from a variant."""

import re

import pytest
import torch

from tests.support.entropy_loss import context, problem
from tpbench.worker.process import location
from tpbench.workloads import Variant
from tpbench.workloads.entropy_loss.inputs import Output
from tpbench.workloads.entropy_loss.problem import WORKLOAD
from tpbench.workloads.step import Step, WrongReturn, bytes_sent, checked_columns, require


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


def session_of(step):
    variant = Variant("mine", "returns this step", lambda problem, shard: step)
    return WORKLOAD.set_up(problem(), variant, context())


def test_a_session_checks_what_the_function_and_its_step_return():
    with pytest.raises(WrongReturn, match=r"^mine must return its step, a function .* or a Step, not Tensor$"):
        session_of(torch.ones(2))
    session = session_of(Step(lambda: torch.ones(2)))
    with pytest.raises(RuntimeError, match="run step"):
        session.check()
    session.step()
    with pytest.raises(
        WrongReturn, match=r"^the step of mine must return the type Output \(loss, row_loss, .*, not Tensor$"
    ):
        session.check()


@pytest.mark.parametrize("sent", [768.0, float("nan"), "768", -1, 10**30, True, None])
def test_bytes_sent_are_a_whole_number(sent):
    with pytest.raises(WrongReturn, match=r"^bytes_communicated of mine must be an int of at least 0, not "):
        bytes_sent(sent, MINE)


@pytest.mark.parametrize("step", [Step(3), Step(print, columns={}), Step(print, restore=1)])
def test_parts_of_a_step_are_functions(step):
    with pytest.raises(WrongReturn, match=r"^(run|columns|restore) of the step of mine must be a function, not "):
        session_of(step)


MEASURED = ("gpu_name", "host", "git_commit", "kernels_version", "variant", "time_ms", "device_ms", "loss_error", "key",
            "tokens", "no_such_column", 3)  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_a_variant_sets_no_column_that_is_measured(name):
    with pytest.raises(WrongReturn, match=rf"^mine sets {name}: no column of a variant is called {name}.*registers"):
        checked_columns({name: 1}, MINE, WORKLOAD.variant_columns)


@pytest.mark.parametrize(("columns", "message"), [([], "Mapping"), ({"registers": torch.ones(1)}, "must be a number")])
def test_columns_of_a_variant_are_plain_values(columns, message):
    with pytest.raises(WrongReturn, match=message):
        checked_columns(columns, MINE, WORKLOAD.variant_columns)
    assert checked_columns({"registers": 3, "algorithm_used": None}, MINE, WORKLOAD.variant_columns)["registers"] == 3
