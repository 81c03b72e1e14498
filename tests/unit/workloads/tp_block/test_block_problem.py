"""Sizes and options that are refused before a launch, counted costs, configuration, and inputs at any world size."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.command import ROOT
from tests.support.composed_jobs import composed
from tests.support.tp_block import FixedStopwatch, context, problem, unshard
from tpbench.job import key_of, parse_job, unsupported_reason
from tpbench.workloads.tp_block import WORKLOAD
from tpbench.workloads.tp_block.execution.layers import ColumnParallelLinear, RMSNorm, rotary_angles
from tpbench.workloads.tp_block.execution.prepared import BlockContext
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.problem import bytes_moved, bytes_sent, flops

TINY = {"tokens": 64, "hidden": 64, "ffn": 160, "heads": 8, "kv_heads": 4, "head_dim": 8}


@pytest.mark.parametrize(
    ("changes", "messages"),
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
def test_sizes_that_do_not_divide_are_a_reason(changes: dict[str, int], messages: list[str]) -> None:
    reasons = str(unsupported_reason(parse_job({"variant": "block_tp", "tp_size": 2, **TINY, **changes}))).split("; ")
    assert [message in reason for message, reason in zip(messages, reasons, strict=True)] == [True] * len(messages)


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
    linear = {"variant": "block_tp", "tp_size": 2, **TINY, "part": "row", "compile": True}
    assert "compile=true needs part=block or mlp" in str(WORKLOAD.unsupported_reason(parse_job(linear)))
    captured = {"variant": "block_tp", "tp_size": 2, **TINY, "layers": 2, "graph": True}
    assert unsupported_reason(parse_job(captured)) is None
    assert "set warmup_steps=2 or more" in str(unsupported_reason(parse_job({**captured, "warmup_steps": 1})))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"part": "row", "ffn": 32}, None),
        ({"tokens": 384}, "tokens that 128 * tp_size=256 divides"),
        ({"dtype": "float32"}, "needs bfloat16, got float32"),
        ({"ffn": 24}, "that 8 divides, got 12"),
    ],
)
def test_quack_refuses_problems_that_its_tiles_do_not_fit(changes: dict[str, Any], reason: str | None) -> None:
    found = unsupported_reason(parse_job({"variant": "block_quack", "tp_size": 2, **TINY, "tokens": 512, **changes}))
    assert found is None if reason is None else reason in str(found)


def test_collectives_of_nccl_on_windows_are_an_option_of_the_plain_variant_on_gpus() -> None:
    chosen = parse_job({"variant": "block_tp", "tp_size": 2, **TINY, "nccl": "copy_engine"})
    default = parse_job({"variant": "block_tp", "tp_size": 2, **TINY})
    assert chosen.key != default.key
    assert "needs a CUDA GPU" in str(WORKLOAD.unsupported_reason(replace(chosen, device="cpu")))
    older = {name: value for name, value in default.flat().items() if name != "nccl"}
    assert key_of(older) == default.key
    without = parse_job({"variant": "block_copy_engine", "tp_size": 2, **TINY, "nccl": "symmetric"})
    assert without.problem == default.problem


def test_rows_of_the_fused_block_name_the_version_of_its_kernel() -> None:
    assert parse_job({"variant": "block_fused", "tp_size": 2, **TINY}).kernels_version is not None


def test_a_stack_is_trained_with_rotary_embeddings_for_a_fixed_number_of_steps() -> None:
    one = parse_job({"variant": "block_tp", "tp_size": 2, **TINY})
    stack = parse_job({"variant": "block_tp", "tp_size": 2, **TINY, "layers": 3})
    assert stack.problem.rotary and stack.scheduled and not one.problem.rotary and not one.scheduled
    assert not parse_job({"variant": "block_tp", "tp_size": 2, **TINY, "layers": 3}, chosen=["rotary"]).problem.rotary
    for count in (flops, bytes_sent):
        assert count(stack.problem, 2) == 3 * count(one.problem, 2)
    weights = (bytes_moved(one.problem, 2) - 2 * 2 * 2 * 64 * 64 // 2) // (2 * 2)
    assert bytes_moved(stack.problem, 2) == 2 * (3 * 3 * 2 * weights + 2 * 2 * 64 * 64 // 2)


def test_counts_of_llama_8b() -> None:
    cell = problem(tokens=8192, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, dtype="bfloat16")
    weights = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336
    assert flops(cell, 4) == 3 * (2 * 8192 * weights + 2 * 8192**2 * 4096) // 4
    matrix = 8192 * 4096 * 2
    assert bytes_sent(cell, 4) == (8 * matrix + 4 * 4096 * 2) * 3 // 4
    again = problem(**{**cell.__dict__, "save_gathered": False})
    assert bytes_sent(again, 4) - bytes_sent(cell, 4) == 2 * matrix * 3 // 4
    assert bytes_sent(again, 4, least=True) == bytes_sent(cell, 4)
    assert bytes_sent(cell, 1) == 0
    assert bytes_moved(cell, 1) == 2 * 2 * (weights + 2 * 4096 + 2 * 8192 * 4096)
    rated = BlockContext(
        BlockInputs(again, context()), FixedStopwatch(), False, {"gemm_tflops": 1.0, "gather_gb_per_s": 50.0}
    )  # type: ignore[arg-type]
    assert rated.costs(4).wire_ms == pytest.approx(bytes_sent(cell, 4) / 50e6) and rated.costs(1).wire_ms == 0.0


@pytest.mark.parametrize("shape", sorted(file.stem for file in (ROOT / "conf/shape").glob("*_block_*.yaml")))
def test_shapes_fit_every_variant_at_every_measured_length(shape: str) -> None:
    values = composed("variant=block_tp", f"shape={shape}")
    for tokens in (values["tokens"], *(() if shape.startswith("tiny") else (512, 2048))):
        for name in WORKLOAD.variants:
            reason = unsupported_reason(parse_job({**values, "tokens": tokens, "variant": name}))
            assert reason is None or name == "block_quack"
    assert f"tp{values['tp_size']}" == shape.rpartition("_")[2]


@pytest.mark.parametrize("size", [2, 4])
def test_hashed_inputs_are_the_same_whole_at_any_size(size: int) -> None:
    for part in ("block", "column", "row"):
        cell = problem(part=part, dtype="bfloat16")
        inputs = BlockInputs(cell, context())
        full, shards = inputs.weights_of(0, 1), [inputs.weights_of(rank, size) for rank in range(size)]
        for linear in cell.linears:
            assert torch.equal(unshard(linear, [shard[linear.name] for shard in shards]), full[linear.name])
            assert torch.equal(linear.shard(full[linear.name], 1, size), shards[1][linear.name])
            assert 0.6 < full[linear.name].float().std() * linear.in_features**0.5 < 1.6
        for made, over_rows in ((inputs.x, part != "row"), (inputs.grad, part != "column")):
            assert torch.equal(torch.cat([made(rank, size) for rank in range(size)], 0 if over_rows else 1), made(0, 1))


def test_angles_are_those_of_llama() -> None:
    """The layers and their oracle share these."""
    angles = [[0.0, 0.0], [1.0, 500_000**-0.5], [2.0, 2 * 500_000**-0.5]]
    torch.testing.assert_close(rotary_angles(3, 4, torch.device("cpu")).tolist(), angles)


def test_without_a_group_layers_say_so() -> None:
    for layer in (lambda: ColumnParallelLinear(4, 4), lambda: RMSNorm(torch.ones(4))):
        with pytest.raises(ValueError, match="init_process_group first"):
            layer()
