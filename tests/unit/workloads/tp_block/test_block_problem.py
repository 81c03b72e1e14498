"""Sizes and options that are refused before a launch, and the counted costs."""

from __future__ import annotations

import pytest

from tests.support.tp_block import problem
from tpbench.job import JobError, parse_job, unsupported_reason
from tpbench.workloads.tp_block import WORKLOAD, limits
from tpbench.workloads.tp_block.execution import autotune
from tpbench.workloads.tp_block.execution.measurements import MachineRates

TINY = {"tokens": 64, "hidden": 64, "ffn": 160, "heads": 8, "kv_heads": 4, "head_dim": 8}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tp_size": 8}, ["kv_heads=4 must be divisible by tp_size=8"]),
        ({"tp_size": 3}, ["tokens=64 must be divisible", "ffn=160 must be", "heads=8 must be", "kv_heads=4 must be"]),
        ({"kv_heads": 3, "tp_size": 1}, ["heads=8 must be divisible by kv_heads=3"]),
        ({"dp_size": 2}, ["dp_size=2 must be 1"]),
        ({"layers": 2, "part": "mlp"}, ["layers=2 needs part=block"]),
        ({"steps": 5, "learning_rate": 0.1}, ["steps=5 needs layers=N", "learning_rate=0.1 needs layers=N"]),
        ({"rotary": True, "head_dim": 7}, ["head_dim=7 must be even"]),
    ],
)
def test_sizes_that_do_not_divide_are_errors_before_a_launch(changes: dict[str, int], said: list[str]) -> None:
    with pytest.raises(JobError) as raised:
        parse_job({"variant": "block_tp", "tp_size": 2, **TINY, **changes})
    for each in said:
        assert each in str(raised.value)
    assert len(str(raised.value).splitlines()) == len(said)


def test_unsupported_problems_have_a_reason() -> None:
    odd = {**TINY, "tokens": 8, "tp_size": 4}
    assert "tokens=8 must be divisible by tp_size^2=16" in str(
        unsupported_reason(parse_job({"variant": "block_tp_overlap", **odd}))
    )
    assert unsupported_reason(parse_job({"variant": "block_tp", **odd})) is None
    alone = {**TINY, "tp_size": 1}
    assert unsupported_reason(parse_job({"variant": "block_no_tp", **alone})) is None
    for name in WORKLOAD.variants.keys() - {"block_no_tp"}:
        assert "block_no_tp is that" in str(unsupported_reason(parse_job({"variant": name, **alone})))
    # Heads do not matter for single linears.
    assert parse_job({"variant": "block_tp", **TINY, "tp_size": 8, "part": "mlp"}).problem.part == "mlp"


def test_a_stack_is_trained_with_rotary_embeddings_for_a_fixed_number_of_steps() -> None:
    one = parse_job({"variant": "block_tp", "tp_size": 2, **TINY})
    stack = parse_job({"variant": "block_tp", "tp_size": 2, **TINY, "layers": 3})
    assert stack.problem.rotary and stack.scheduled and not one.problem.rotary and not one.scheduled
    assert not parse_job({"variant": "block_tp", "tp_size": 2, **TINY, "layers": 3}, chosen=["rotary"]).problem.rotary
    for count in (limits.flops, lambda problem, size: limits.bytes_sent(problem, size)):
        assert count(stack.problem, 2) == 3 * count(one.problem, 2)
    weights = (limits.bytes_moved(one.problem, 2) - 2 * 2 * 2 * 64 * 64 // 2) // (2 * 2)
    assert limits.bytes_moved(stack.problem, 2) == 2 * (3 * 3 * 2 * weights + 2 * 2 * 64 * 64 // 2)


def test_the_second_step_of_a_stack_is_captured_and_not_measured() -> None:
    cell = {"variant": "block_tp", "tp_size": 2, **TINY, "layers": 2, "graph": True}
    assert unsupported_reason(parse_job(cell)) is None
    assert "set warmup_steps=2 or more" in str(unsupported_reason(parse_job({**cell, "warmup_steps": 1})))


def test_counts_of_llama_8b() -> None:
    cell = problem(tokens=8192, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, dtype="bfloat16")
    weights = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336
    assert limits.flops(cell, 4) == 3 * (2 * 8192 * weights + 2 * 8192**2 * 4096) // 4
    matrix = 8192 * 4096 * 2
    assert limits.bytes_sent(cell, 4) == (8 * matrix + 4 * 4096 * 2) * 3 // 4
    again = problem(**{**cell.__dict__, "save_gathered": False})
    assert limits.bytes_sent(again, 4) - limits.bytes_sent(cell, 4) == 2 * matrix * 3 // 4
    assert limits.bytes_sent(again, 4, least=True) == limits.bytes_sent(cell, 4)
    assert limits.bytes_sent(cell, 1) == 0
    assert limits.bytes_moved(cell, 1) == 2 * 2 * (weights + 2 * 4096 + 2 * 8192 * 4096)


def test_the_plain_schedule_is_kept_unless_another_is_clearly_faster() -> None:
    assert autotune.fastest({"plain": 1.0, "ring": 0.995, "copy_engine": 1.2}) == "plain"
    assert autotune.fastest({"plain": 1.0, "ring": 0.985, "copy_engine": 0.9}) == "copy_engine"


def test_the_time_on_the_wire_is_that_of_the_bytes_at_the_bandwidth() -> None:
    assert MachineRates(1.0, 50.0).wire_ms(10**9) == pytest.approx(20.0)
    assert MachineRates(1.0, 0.0).wire_ms(0) == 0.0
