"""Values of the wrong type from a variant, and the scale of an error."""

import json
import math
import re
from dataclasses import make_dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.support.entropy_loss import context, problem
from tpbench.measure.session import Costs, Verdict
from tpbench.settings import setting
from tpbench.worker.rank import location
from tpbench.workloads import Variant, Workload
from tpbench.workloads.definition import definition_of
from tpbench.workloads.entropy_loss import EntropyLoss
from tpbench.workloads.entropy_loss.problem import WORKLOAD
from tpbench.workloads.operation import OperationSession, relative_errors
from tpbench.workloads.step import Step, WrongReturn, checked_columns, count

MINE = Variant("mine", "returns a tensor", lambda problem, shard: torch.ones(2))


def session_of(step, place=None):
    variant = Variant("mine", "returns this step", lambda problem, shard: step, place=place)
    return WORKLOAD.set_up(problem(), variant, context())


def test_a_session_checks_what_the_function_and_its_step_return():
    with pytest.raises(WrongReturn, match=r"^mine must return its step, a function .* or a Step, not Tensor$"):
        session_of(torch.ones(2))
    for returned, kind in ((torch.ones(2), "Tensor"), (None, "NoneType")):
        session = session_of(Step(lambda value=returned: value))
        session.step()
        message = rf"^the step of mine must return the type Output \(loss, row_loss, .*, not {kind}$"
        with pytest.raises(WrongReturn, match=message) as caught:
            session.check()
        assert re.fullmatch(r"test_returned\.py:\d+", location(caught.value))


def test_a_variant_from_outside_computes_nothing_between_steps():
    calls = []
    step = Step(lambda: lambda: calls.append("read"), release=lambda: calls.append("released"))
    session = session_of(step, place=("mine.py", 1))
    session.step()
    assert session.outputs() == []
    with pytest.raises(WrongReturn, match=r"^the step of mine must return the type Output .*, not function$"):
        session.check()
    session.release()
    assert not calls


@pytest.mark.parametrize("sent", [768.0, float("nan"), "768", -1, 10**30, True, None])
def test_bytes_sent_are_a_whole_number(sent):
    with pytest.raises(WrongReturn, match=r"^bytes_communicated of mine must be an int of at least 0, not "):
        count(sent, MINE)


@pytest.mark.parametrize(
    "step", [Step(3), Step(print, columns={}), Step(print, restore=1), Step(print, communicates_in_kernels=1)]
)
def test_parts_of_a_step_are_functions(step):
    with pytest.raises(
        WrongReturn,
        match=r"^(run|columns|restore|communicates_in_kernels) of the step of mine must be a function, not ",
    ):
        session_of(step)


@pytest.mark.parametrize("name", ["gpu_name", "time_ms", "loss_error", "loss_identical", "no_such_column", 3])
def test_a_variant_sets_no_column_that_is_measured(name):
    with pytest.raises(WrongReturn, match=rf"^mine sets {name}: no column of a variant is called {name}.*registers"):
        checked_columns({name: 1}, MINE, WORKLOAD.column_types(of_variant=True))


@pytest.mark.parametrize("value", [torch.ones(1), "many", 3.5, 10**30, True, math.nan])
def test_columns_of_a_variant_have_the_types_of_their_columns(value):
    with pytest.raises(WrongReturn, match=r"^mine sets registers: its value must be of the type int, not "):
        checked_columns({"registers": value}, MINE, WORKLOAD.column_types(of_variant=True))
    with pytest.raises(WrongReturn, match="Mapping"):
        checked_columns([], MINE, WORKLOAD.column_types(of_variant=True))
    given = {"registers": np.int32(3), "occupancy": Fraction(1, 2), "algorithm_used": None}
    stored = checked_columns(given, MINE, WORKLOAD.column_types(of_variant=True))
    assert json.dumps(stored) == '{"registers": 3, "occupancy": 0.5, "algorithm_used": null}'


@pytest.mark.parametrize("trait", [{"option": "ignored"}, {"with_graph": 1}, {"column": False}, {"in_key": 1}])
def test_traits_that_rows_would_not_carry_are_refused_in_a_users_problem(trait):
    problem_of_user = make_dataclass("Mine", [("size", int, setting(1, help="a size", **trait))], frozen=True)
    with pytest.raises(ValueError, match=r"the field size has (option|with_graph|column|in_key), .*: leave it out"):
        definition_of(Workload(problem_of_user))


def own_session(**functions):
    """A session of a workload with these functions, whose step returns a number."""
    workload = Workload(EntropyLoss, functions={"inputs": lambda problem, rank: {}, **functions}, output=float)
    variant = Variant("mine", "returns a number", lambda problem, inputs, rank: lambda: 1.0)
    return OperationSession(workload, problem(), variant, context())


@pytest.mark.parametrize("costs", [(1.0, 0), (0, "1"), (0, 0, 1e12), (-1, 0), (0, None), None])
def test_costs_are_whole_numbers(costs):
    def mine(problem, rank):
        return costs and Costs(*costs)

    with pytest.raises(
        WrongReturn, match=r"of mine must be an int of at least 0|must return tpbench\.api\.Costs"
    ) as caught:
        own_session(costs=mine)
    assert re.fullmatch(r"test_returned\.py:\d+", location(caught.value))


@pytest.mark.parametrize(
    "verdict", [(), ([], None), ({}, True), ({"time_ms": 1.0}, None), ({"loss_error": [[]]}, None)]
)
def test_a_check_returns_a_verdict_that_a_row_can_hold(verdict):
    session = own_session(check=lambda *given: Verdict(*verdict) if verdict else None)
    session.step()
    with pytest.raises(
        WrongReturn, match=r"must return|no column of a workload is called time_ms|must be of the type float"
    ):
        session.check()


def test_an_output_of_one_column_is_compared_with_the_size_of_all_its_rows() -> None:
    right = torch.tensor([[1.0], [1e-6], [-1.0]], dtype=torch.float64)
    errors = relative_errors(right.float() + 1e-7, right)
    assert errors.shape == right.shape and errors.max() < 2e-7
    assert torch.equal(errors.squeeze(1), relative_errors(right.squeeze(1).float() + 1e-7, right.squeeze(1)))


def complaint(got: torch.Tensor, right: torch.Tensor, **inputs: torch.Tensor) -> str | None:
    """Return why the output of a variant is wrong."""
    functions = {"inputs": lambda problem, rank: inputs, "reference": lambda problem, inputs, rank: {"y": right}}
    workload = Workload(EntropyLoss, functions=functions, tolerances={"float8_e4m3fn": 0.07})
    variant = Variant("mine", "returns this", lambda problem, inputs, rank: lambda: {"y": got})
    session = OperationSession(workload, problem(), variant, context())
    session.step()
    return session.check().wrong


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        (torch.eye(2).to_sparse(), "is torch.sparse_coo: return dense tensors with data"),
        (torch.eye(2).to_sparse_csr(), "is torch.sparse_csr: return dense tensors"),
        (torch.eye(4).to_sparse_bsr((2, 2)), "is torch.sparse_bsr: return dense tensors"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "is nested: return dense tensors"),
        (torch.ones(2, 1).expand(2, 3), r"has elements that share memory, as after expand\(\)"),
        (torch.ones(()).expand(4), "has elements that share memory"),
        (torch.ones(2, device="meta"), "is on the device meta: return dense tensors with data"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "is quantized"),
    ],
)
def test_an_input_that_cannot_change_is_named(mask: torch.Tensor, why: str) -> None:
    with pytest.raises(WrongReturn, match=f"returns mask, which {why}"):
        complaint(torch.ones(2), torch.ones(2), mask=mask)


def test_inputs_may_lie_in_a_list_or_a_dataclass() -> None:
    def session(values: object) -> OperationSession:
        functions = {"inputs": lambda problem, rank: values, "check": lambda *arguments: Verdict({}, None)}
        variant = Variant("mine", "returns this", lambda problem, inputs, rank: lambda: {"y": torch.ones(2)})
        return OperationSession(Workload(EntropyLoss, functions=functions), problem(), variant, context())

    shard = make_dataclass("Shard", [("x", torch.Tensor), ("mask", torch.Tensor)])
    for dense in ([torch.ones(2), torch.ones(3)], shard(torch.ones(2), torch.ones(3))):
        assert len(session(dense).audited_inputs.tensors) == 2
    with pytest.raises(WrongReturn, match=r"returns \[1\], which is torch\.sparse_coo"):
        session([torch.ones(2), torch.eye(2).to_sparse()])
    with pytest.raises(WrongReturn, match=r"returns mask, which is torch\.sparse_csr"):
        session(shard(torch.ones(2), torch.eye(2).to_sparse_csr()))


def test_a_reference_has_something_dense_to_compare() -> None:
    for shape in ((0,), (3, 0)):
        with pytest.raises(WrongReturn, match="must return something to compare, got no elements"):
            complaint(torch.ones(shape), torch.ones(shape))
    with pytest.raises(WrongReturn, match=r"returns y, which is torch\.sparse_csr"):
        complaint(torch.eye(2), torch.eye(2).to_sparse_csr())
    with pytest.raises(WrongReturn, match="must return something to compare"):
        own_session(reference=lambda problem, inputs, rank: {})._against_reference({})


def test_a_lost_column_of_small_elements_is_wrong() -> None:
    right = torch.randn(8, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    right[:, 5] *= 2.0**-8
    got = right.bfloat16()
    assert complaint(got, right) is None
    got[:, 5] = 0
    assert "rank 0: column 5 of y has the error " in str(complaint(got, right))


@pytest.mark.parametrize(
    ("dtype", "differing"), [("complex64", "1 of 8"), ("float8_e4m3fn", "1 of 4"), ("bfloat16", "1 of 4")]
)
def test_an_output_of_any_dtype_is_compared(dtype: str, differing: str) -> None:
    right = torch.tensor([[1.0, -2.0], [0.5, 4.0]], dtype=torch.float64)
    right = right * (1 + 2j) if dtype == "complex64" else right
    got = right.to(getattr(torch, dtype))
    assert complaint(got, right) is None
    got[1, 1] = got[1, 1].conj() if dtype == "complex64" else -4.0
    assert differing in str(complaint(got, right))


def test_an_output_is_a_plain_tensor() -> None:
    class Unfinished(torch.Tensor):
        """As what a functional collective returns."""

    with pytest.raises(WrongReturn, match="the output y of mine must be a plain tensor, not Unfinished"):
        complaint(torch.ones(2).as_subclass(Unfinished), torch.ones(2))
