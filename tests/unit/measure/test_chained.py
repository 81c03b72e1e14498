"""The chained clock: its blocks, its copies of the inputs, and what their loop may not hide."""

import dataclasses
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.lone_rank import lone_rank
from tests.support.ranks import Rank
from tests.support.simulated_time import SimulatedTime, simulated_time
from tests.support.sleeping_sessions import Sleeper, cpu_context, run
from tpbench.measure import chained, rank_memory
from tpbench.measure.audit import Inputs
from tpbench.measure.chained import Chain, chained_run, copies_needed
from tpbench.measure.session import MeasureSettings, Verdict
from tpbench.measure.stop_rules import ClockRun

SETTINGS = MeasureSettings(time_budget_s=2.4, min_iterations=20, max_iterations=240, precision=0.01)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return lone_rank(monkeypatch)


class Copy(Sleeper):
    """A session that logs its name, with an output that names the copy and the step."""

    def __init__(self, name: str, log: list[str], time: SimulatedTime, seconds: float = 0.001) -> None:
        self.name, self.log, self.time, self.seconds = name, log, time, seconds
        self.audited_inputs = Inputs([])
        self.outputs_held = 0

    def step(self) -> None:
        self.log.append(self.name)
        self.time.sleep(self.seconds)
        self.outputs_held += 1

    def release(self) -> None:
        self.outputs_held = 0

    def restore(self) -> None:
        self.log.append(f"restore {self.name}")
        self.time.sleep(7.0)

    def check(self) -> Verdict:
        return Verdict({"loss_value": 1.0}, f"checked {self.name}")


def chain_of(*copies: Copy, iterations: int, changes: bool = False) -> Chain:
    return Chain(torch.device("cpu"), [(copy, copy.step) for copy in copies], iterations, changes)


def test_a_block_runs_back_to_back_on_the_next_copies_and_counts_by_iteration(here: Rank) -> None:
    """One of four iterations, on the second copy, takes 9 ms. All four count, and nothing between blocks does."""
    log: list[str] = []
    with simulated_time() as time:
        first, second = Copy("a", log, time), Copy("b", log, time)
        chain = chain_of(first, second, iterations=4)
        assert chain.samples(chain.step, chain.restore, 2) == pytest.approx([1.0, 1.0])
        restored = ["restore a", "restore b"]
        assert log == [*restored, *"baba", *restored, *"baba"]
        assert [copy.outputs_held for copy in (first, second)] == [1, 0]  # never two outputs at once
        assert chain.check().wrong == "checked a"
        second.seconds = 0.005
        assert chain.samples(chain.step, chain.restore, 1) == pytest.approx([3.0])
        chain.iterations = 3
        assert chain.samples(chain.step, chain.restore, 1) == pytest.approx([11 / 3])
        assert chain.check().wrong == "checked b"


def test_the_length_of_blocks_on_changing_inputs_is_not_known_before(here: Rank) -> None:
    log: list[str] = []
    with simulated_time() as time:
        chain = chain_of(*(Copy(name, log, time) for name in "abcdefgh"), iterations=8, changes=True)
        lengths = []
        for _ in range(200):
            chain.restore()
            log.clear()
            chain.step()
            lengths.append(len(log))
            assert len(set(log)) == len(log)  # each copy is used once
    assert set(lengths) == {4, 5, 6, 7, 8}


@pytest.mark.parametrize(
    ("input_bytes", "copies"), [(100, 1), (101, 1), (99, 2), (50, 2), (49, 3), (10, 10), (1, 32), (0, 32)]
)
def test_copies_hold_twice_the_cache_of_a_gpu(input_bytes: int, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=50))
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert copies_needed(input_bytes, cuda, False) == copies
    assert copies_needed(input_bytes, cuda, True) == 8
    assert copies_needed(input_bytes, cpu, False) == copies_needed(input_bytes, cpu, True) == 2


@dataclasses.dataclass
class SetUp:
    """Sets copies up, each of which takes 100 MiB."""

    time: SimulatedTime
    log: list[str]
    fails: bool = False
    copies: int = 0

    def __call__(self) -> Any:
        if self.fails:
            raise ValueError("once is enough")
        self.copies += 1
        return Copy(f"copy {self.copies}", self.log, self.time)


def made(
    here: Rank, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False, overwrites: bool = False, wanted: int = 4,
    settings: MeasureSettings = SETTINGS, step_ms: float = 1.0, free_bytes: int = 2**30,
    interleaved: bool = False,
) -> tuple[tuple[ClockRun | None, dict[str, Any]], SetUp]:  # fmt: skip
    monkeypatch.setattr(chained, "copies_needed", lambda *_: wanted)
    with simulated_time() as time:
        set_up = SetUp(time, [], fails)
        monkeypatch.setattr(rank_memory, "available_bytes", lambda _: free_bytes - set_up.copies * 100 * 2**20)
        session: Any = Copy("first", set_up.log, time)
        session.overwrites_inputs = overwrites
        found = chained_run(session, session.step, set_up, cpu_context(here), settings, step_ms, 0.25, interleaved)
    return found, set_up


@pytest.mark.parametrize(
    ("step_ms", "changed", "iterations", "blocks"),
    [
        (0.01, {}, 10, 24),  # a 24th of the iterations
        (20.0, {}, 5, 48),  # a 24th of the time budget
        (99.0, {}, 2, 120),  # at least two
        (1.0, {"max_iterations": 1}, 1, 1),
    ],
)
def test_a_block_takes_a_round_of_the_budget(
    step_ms: float, changed: dict[str, int], iterations: int, blocks: int, here: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dataclasses.replace(SETTINGS, **changed)
    (found, columns), set_up = made(here, monkeypatch, settings=settings, step_ms=step_ms)
    assert found is not None and isinstance(found.session, Chain) and columns == {"chained_copies": 4}
    assert (found.session.most, found.settings.max_iterations, found.settings.min_iterations) == (iterations, blocks, 8)
    assert set_up.log == [f"{word}copy {copy}" for copy in (1, 2, 3) for word in ("restore ", "") * 2]  # as in passes


def test_inputs_that_are_overwritten_are_used_once_or_there_is_no_time(
    here: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found, _), _ = made(here, monkeypatch, overwrites=True)
    assert found is not None and isinstance(found.session, Chain) and found.session.most == 4
    little = 2 * 2**28 - 1  # a byte less than two copies need
    (found, columns), _ = made(here, monkeypatch, overwrites=True, free_bytes=little)
    assert found is None and "no memory for copies" in columns["not_chained"]
    (found, columns), _ = made(here, monkeypatch, free_bytes=little)
    assert found is not None and columns == {"chained_copies": 1}  # the iterations use the same inputs again


@pytest.mark.parametrize(("interleaved", "copies"), [(False, 7), (True, 4)])
def test_copies_leave_memory_for_a_set_up_and_for_interleaved_cells(
    interleaved: bool, copies: int, here: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies leave 512 MiB of 1 GiB free, for two steps, and 768 MiB beside other cells."""
    _, columns = made(here, monkeypatch, wanted=20, interleaved=interleaved)[0]
    assert columns == {"chained_copies": copies}


def test_a_variant_that_cannot_be_set_up_twice_keeps_its_other_times(
    here: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found, columns), _ = made(here, monkeypatch, fails=True)
    assert found is None
    assert columns == {"not_chained": "the variant cannot be set up twice: ValueError: once is enough"}


class Loop(Sleeper):
    """A session whose iterations take 9 ms if the host waited before, and 1 ms back to back."""

    def __init__(self, here: Rank, time: SimulatedTime, wrong: str | None = None) -> None:
        super().__init__(here, time, 0.001, wrong)
        self.audited_inputs = Inputs([])

    def restore(self) -> None:
        self.waited = True

    def step(self) -> None:
        self.time.sleep(self.seconds * (9 if self.waited else 1))
        self.waited = False


def test_a_row_has_the_chained_time_beside_the_others(here: Rank) -> None:
    with simulated_time() as time:
        _, columns = run(Loop(here, time), cpu_context(here), SETTINGS)  # type: ignore[arg-type]
    assert columns["time_ms"] == pytest.approx(18.0)  # the second rank takes twice as long
    assert columns["chained_ms"] == pytest.approx(2 * (9 + 4) / 5)  # blocks of five
    assert len(columns["chained_samples_ms"]) == 10 and columns["chained_ci_low_ms"] == columns["chained_ms"]
    assert "not_chained" not in columns
    with simulated_time() as time:
        _, columns = run(Loop(here, time), cpu_context(here), SETTINGS, interpreted=True)  # type: ignore[arg-type]
    assert "chained_ms" not in columns and columns["not_chained"] == "Triton's interpreter runs the kernels"


class Capturing(Loop):
    """A session that takes a second longer when it runs for the first and for the second time."""

    runs = 0

    def step(self) -> None:
        self.runs += 1
        self.time.sleep(1.0 if self.runs < 3 else 0.0)
        super().step()


def test_no_copy_runs_for_the_second_time_in_a_timed_block(here: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of sparse exchanges capture a graph then."""
    monkeypatch.setattr(chained, "CPU_COPIES", 8)
    with simulated_time() as time:
        session: Any = Capturing(here, time)
        _, columns = run(session, cpu_context(here), SETTINGS, again=lambda: Capturing(here, time))
    assert columns["chained_copies"] == 8 and max(columns["chained_samples_ms"]) < 100.0


class Cyclic(Loop):
    """A session that refers to itself, as those of workloads do by the function that follows a change of inputs."""

    def __init__(self, here: Rank, time: SimulatedTime) -> None:
        super().__init__(here, time)
        self.audited_inputs = Inputs([], changed=self.restore)


def test_no_copy_is_left_when_the_inputs_change_at_last(here: Rank) -> None:
    copies: list[weakref.ref[Cyclic]] = []
    alive: list[int] = []

    class First(Cyclic):
        def step(self) -> None:
            super().step()
            alive.append(sum(copy() is not None for copy in copies))

    with simulated_time() as time:

        def again() -> Cyclic:
            copy = Cyclic(here, time)
            copies.append(weakref.ref(copy))
            return copy

        first: Any = First(here, time)
        run(first, cpu_context(here), SETTINGS, again=again)
    assert max(alive) == len(copies) == 1 and alive[-1] == 0
