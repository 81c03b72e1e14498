"""The guards against stale results: on one process, with sessions that double their inputs."""

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.lone_rank import lone_rank
from tests.support.sleeping_sessions import cpu_context
from tpbench.measure import audit as auditing
from tpbench.measure.audit import AuditedSession, Inputs, tensors_of
from tpbench.measure.session import Context, Costs, Verdict


class Doubling(AuditedSession):
    """A session whose step returns twice its inputs (3, 5)."""

    costs = Costs(bytes_moved=1, bytes_communicated=0)

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.audited_inputs = Inputs([torch.arange(1, 16).to(dtype).reshape(3, 5)])
        self.output = self.doubled()
        self.events: list[str] = []

    def doubled(self) -> Tensor:
        return self.audited_inputs.tensors[0] * 2

    def outputs(self) -> Sequence[Tensor]:
        return [self.output]

    def step(self) -> None:
        self.events.append("step")
        self.output = self.doubled()

    def restore(self) -> None:
        self.events.append("restore")

    def check(self) -> Verdict:
        self.events.append("check")
        right = torch.equal(self.output.nan_to_num(), self.doubled())
        return Verdict({}, None if right else "not twice the inputs")


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Context:
    """A context in which each change negates the first row: random signs could all be positive."""
    monkeypatch.setattr(Inputs, "draw", lambda self: {0: torch.tensor([[-1], [1], [1]])})
    return cpu_context(lone_rank(monkeypatch))


def test_only_memory_of_its_own_is_poisoned() -> None:
    session: Any = Doubling()
    number, expanded, counts = torch.ones(2), torch.ones(1).expand(4), torch.ones(3, dtype=torch.int64)
    complex_number = torch.ones(2, dtype=torch.complex64)
    session.outputs = lambda: [number, expanded, counts, complex_number]
    auditing.poison(session)
    assert number.isnan().all() and complex_number.isnan().all()
    assert torch.equal(expanded, torch.ones(4)) and torch.equal(counts, torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_session_that_computes_passes_with_changed_inputs(context: Context, dtype: torch.dtype) -> None:
    session = Doubling(dtype)
    before = session.output.clone()
    assert auditing.changed_inputs_reason(session, session.step, context) is None
    assert session.events == ["restore", "step", "check"]
    assert torch.equal(session.output[0], -before[0]) and torch.equal(session.output[1:], before[1:])


def test_a_variant_from_outside_runs_on_changed_inputs_in_two_orders_of_the_ranks(context: Context) -> None:
    session = Doubling()
    session.trusted = False
    assert auditing.changed_inputs_reason(session, session.step, context) is None
    assert session.events == ["restore", "step", "check"] * 2


def test_a_step_that_writes_nothing_is_wrong_with_changed_inputs(context: Context) -> None:
    session = Doubling()
    reason = auditing.changed_inputs_reason(session, lambda: None, context)
    assert reason == "with changed inputs, after a correct result with the first ones: not twice the inputs"
    assert session.output.isnan().all()


def test_the_step_has_the_memory_of_the_new_inputs(context: Context) -> None:
    """A cell that fills the memory must not run out of it after all its times are known."""
    session, drawn = Doubling(), list[weakref.ref[Tensor]]()

    def draw() -> dict[int, Tensor]:
        signs = torch.tensor([[-1], [1], [1]])
        drawn.append(weakref.ref(signs))
        return {0: signs}

    session.audited_inputs.draw = draw  # type: ignore[method-assign]
    alive: list[bool] = []

    def step() -> None:
        alive.append(drawn[0]() is not None)
        session.step()

    assert auditing.changed_inputs_reason(session, step, context) is None
    assert alive == [False]


def test_a_step_that_returns_before_its_output_is_complete_is_wrong(context: Context) -> None:
    session = Doubling()

    def completed() -> Verdict:
        session.output.copy_(session.doubled())
        return Verdict({}, None)

    session.check = completed  # type: ignore[method-assign]
    reason = auditing.changed_inputs_reason(session, lambda: None, context)
    assert reason == "the step returned before its output was complete: let it wait for its collectives"


def floats() -> Tensor:
    return torch.linspace(0.5, 9.0, 200, dtype=torch.float64).reshape(100, 2)


def test_a_change_negates_whole_rows_of_floating_point_tensors_only() -> None:
    rows, labels, scale = floats(), torch.arange(5), torch.tensor(2.0)
    changing, version = Inputs([labels, rows, scale]), rows._version
    drawn = changing.draw()
    assert list(drawn) == [1] and drawn[1].shape == (100, 1)
    assert set(drawn[1].flatten().tolist()) == {-1, 1} and 25 < int((drawn[1] > 0).sum()) < 75
    changing.change(drawn)
    assert torch.equal(rows, floats() * drawn[1]) and rows._version == version
    assert torch.equal(labels, torch.arange(5)) and scale == 2.0
    assert list(Inputs([torch.zeros(3, 2, dtype=torch.complex64)]).draw()) == [0]


@pytest.mark.parametrize(
    ("shape", "signs"),
    [
        ((1, 400), (1, 400)),
        ((400,), (400,)),
        ((2, 200, 3), (2, 200, 1)),
        ((2**16 * 4,), (2**16 * 4,)),
        ((0, 3), (0, 1)),
    ],
)
def test_a_random_half_changes_even_with_one_row_and_with_very_many(
    shape: tuple[int, ...], signs: tuple[int, ...]
) -> None:
    """Small first dimensions would often leave all as it is; a sign for each of 10^8 elements would take a second."""
    (drawn,) = Inputs([torch.ones(shape)]).draw().values()
    assert drawn.shape == signs
    assert not drawn.numel() or 0.4 < float((drawn > 0).double().mean()) < 0.6


def test_generated_inputs_change_to_those_of_another_seed() -> None:
    def powers(seed: int) -> list[Tensor]:
        return [float(seed) ** torch.arange(4.0), torch.tensor([-float(seed)])]

    calls: list[str] = []
    changing = Inputs(powers(3), powers, 3, lambda: calls.append("changed"))
    for seed in (3 ^ 1, 3 ^ 2):
        changing.change()
        assert all(map(torch.equal, changing.tensors, powers(seed)))
    assert calls == ["changed"] * 2


def test_the_tensors_of_a_shard_are_in_its_fields_and_in_tuples() -> None:
    @dataclasses.dataclass
    class Shard:
        one: Tensor
        rows: int
        more: tuple[Tensor, tuple[Tensor, str]]
        none: None = None

    tensors = [torch.zeros(1), torch.ones(2), torch.ones(3)]
    found = tensors_of(Shard(tensors[0], 3, (tensors[1], (tensors[2], "x"))))
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in tensors]
