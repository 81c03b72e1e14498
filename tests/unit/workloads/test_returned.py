"""Values of the wrong type from a variant."""

import re

import pytest
import torch

from tpbench.worker.process import location
from tpbench.workloads import Variant
from tpbench.workloads.entropy_loss.inputs import Output
from tpbench.workloads.linear_loss.inputs import Output as LinearOutput
from tpbench.workloads.step import Step, StepSession, WrongReturn, require


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
