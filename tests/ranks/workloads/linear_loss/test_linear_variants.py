"""Every registered variant of the linear loss against the oracle: a new one needs no test of its own.

With GPUs there are as many ranks as GPUs, and at most those that a test names.
"""

import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.entropy_loss import DTYPES, check_variant, trace_only
from tests.support.linear_loss import context, problem
from tests.support.ranks import Rank, ranks_here, run_on_ranks
from tpbench.kernels import KERNEL_LOSSES
from tpbench.measure.session import Verdict
from tpbench.workloads import Variant
from tpbench.workloads.linear_loss import WORKLOAD, LinearLoss, bench
from tpbench.workloads.linear_loss.bench import costs

WIDE = {"tokens": 24, "hidden": 256, "vocab": 384}
"""Sizes that almost every peer supports."""


def _cispo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    ratio = (logprobs - old_logprobs).exp()
    return -ratio.clamp(max=5.0).detach() * advantages * logprobs, {"ratio": ratio}


def _of_sequences(logprobs: Tensor, entropy: Tensor, sequences: Tensor, mask: Tensor) -> Tensor:
    sums = logprobs.new_zeros(len(logprobs)).index_add(0, sequences, logprobs * mask)[sequences]
    return -(0.01 * sums).exp() * mask - 0.1 * entropy


def set_up(cell: LinearLoss, variant: Variant, here: Rank | None = None) -> Any:
    """Set up a session whose rate of products is not measured."""
    with mock.patch("tpbench.workloads.operation.gemm_tflops", return_value=1.0):
        return WORKLOAD.set_up(cell, variant, context(here))


def cells(name: str, tp_size: int) -> list[LinearLoss]:
    """Return the problems that a variant supports: every loss and dtype, and its options.

    A third rank matters only where ranks share rows or columns: for each loss, and with sequence_parallel=true.
    """
    variant = WORKLOAD.variants[name]
    if tp_size > 2:
        few = [problem(loss=loss, mode=mode) for loss, mode in itertools.product(KERNEL_LOSSES, ("train", "forward"))]
        few.append(problem(**WIDE))  # for those that need shards of one size
        if "sequence_parallel" in variant.options:
            few += [problem(loss=loss, sequence_parallel=True) for loss in ("cross_entropy", "reverse_kl")]
            few.append(problem(**WIDE, mode="forward", ignored=0.3, sequence_parallel=True))
        return [cell for cell in few if variant.unsupported_reason(cell, tp_size) is None]
    found = [problem(loss=loss, dtype=dtype) for loss, dtype in itertools.product(KERNEL_LOSSES, DTYPES)]
    found += [problem(loss=loss, mode="forward") for loss in KERNEL_LOSSES]
    found += [problem(loss="policy", kl_weight=0.1, ignored=0.4, temperature=1.3)]
    found += [problem(loss=loss, top_k=7) for loss in ("soft_cross_entropy", "forward_kl", "reverse_kl")]
    found += [problem(ignored=share, seed=3) for share in (0.4, 1.0)]
    found += [problem(vocab=96), problem(loss="reverse_kl", temperature=1.9)]
    found += [problem(loss=loss, temperature=0.1, dtype="float16") for loss in KERNEL_LOSSES if loss != "cross_entropy"]
    found += [problem(loss="logprob", temperature=1.9, ignored=0.4, **sizes) for sizes in ({}, WIDE)]
    found += [
        problem(**WIDE, **fields) for fields in ({}, {"ignored": 0.4}, {"mode": "forward"}, {"label_logit": 10.0})
    ]
    if name == "linear_gather":  # rows of the weight's gradient come from few logits, of up to 20
        found.append(problem(tokens=256, hidden=128, vocab=32768, seed=2))
    if name == "linear_liger_cutedsl":
        found += [problem(tokens=128, hidden=256, vocab=512, ignored=share) for share in (0.0, 0.4)]
    if "logits_gib" in variant.options:
        found += [problem(loss=loss, logits_gib=5 * 101 * 2 / 2**30) for loss in KERNEL_LOSSES]
    if "logits_dtype" in variant.options:
        exact: dict[str, Any] = {"logits_dtype": "float32", "entropy": True, "ignored": 0.3}
        found += [
            problem(loss=loss, dtype=dtype, **exact)
            for loss in ("logprob", "policy")
            for dtype in ("bfloat16", "float16")
        ]
    if "objective" in variant.options:
        objectives: list[Any] = [_cispo, _of_sequences]
        found += [problem(loss="logprob", objective=function, ignored=0.3) for function in objectives]
        found.append(problem(loss="logprob", objective=_cispo, temperature=1.3, mode="forward"))
    for option in sorted({"entropy", "sequence_parallel", "main_grad"} & variant.options):
        found += [problem(loss=loss, **{option: True}) for loss in ("cross_entropy", "reverse_kl", "policy")]
        found.append(problem(loss="forward_kl", top_k=7, **{option: True}))
        if option != "main_grad":
            found += [problem(**sizes, mode="forward", ignored=0.3, **{option: True}) for sizes in ({}, WIDE)]
    return [cell for cell in found if variant.unsupported_reason(cell, tp_size) is None]


def run(here: Rank | None, name: str) -> list[tuple[LinearLoss, Verdict]]:
    verdicts = []
    for cell in cells(name, here.world_size if here else 1):
        if here is None and cell.sequence_parallel:
            continue
        session = set_up(cell, WORKLOAD.variants[name], here)
        session.restore()
        session.step()
        verdicts.append((cell, session.check()))
    return verdicts


@pytest.mark.parametrize("tp_size", sorted({1, ranks_here(2), ranks_here(3)}))
@pytest.mark.parametrize("name", sorted(WORKLOAD.variants))
def test_each_variant_agrees_with_the_oracle(name: str, tp_size: int) -> None:
    check_variant(WORKLOAD, name, tp_size, cells(name, tp_size), run)


def test_compiled_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    trace_only(monkeypatch)
    session = set_up(problem(), WORKLOAD.variants["linear_compiled"])
    session.step()
    assert session.check().wrong is None


def test_the_floor_is_the_products_and_for_training_one_pass_of_the_loss() -> None:
    cell = problem(tokens=8192, hidden=4096, vocab=131072)
    two = context(tp_size=2)
    train = costs(cell, two)
    assert train.flops == 3 * 2 * 8192 * 4096 * 65536 and train.consecutive
    assert train.bytes_moved == 2 * 2 * 8192 * 65536
    forward = costs(replace(cell, mode="forward"), two)
    assert forward.flops * 3 == train.flops and not forward.consecutive
    assert forward.bytes_moved == 2 * (8192 + 65536) * 4096
    distilled = costs(replace(cell, mode="forward", loss="reverse_kl"), two)
    assert distilled.bytes_moved == 2 * forward.bytes_moved
    teacher = costs(replace(cell, loss="reverse_kl"), two)
    assert (teacher.flops * 3, teacher.bytes_moved * 2) == (train.flops * 4, train.bytes_moved * 3)


def _details(here: Rank) -> dict[str, Any]:
    cell = problem(tokens=8, sequence_parallel=True)
    session = set_up(cell, WORKLOAD.variants["linear_tp"], here)
    session.step()
    session.check()
    return session.details({"time_ms": 1.0, "peak_gib": 1.0})


def _details_without_memory(here: Rank) -> dict[str, Any]:
    def fail(*_: Any) -> Any:
        if here.rank == 0:
            raise torch.OutOfMemoryError
        return lambda: None

    with mock.patch.object(bench, "products_of", fail):
        return _details(here)


def test_a_step_counts_if_memory_is_short_for_its_products_alone() -> None:
    assert [{*found} for found in run_on_ranks(2, _details_without_memory)] == [{"tflops", "above_outputs_gib"}] * 2


def test_the_products_are_timed_beside_the_step() -> None:
    ranks = ranks_here(2)
    first, *others = run_on_ranks(ranks, _details)
    assert all(first == other for other in others)
    assert first["products_ms"] > 0 and first["over_products"] > 0 and first["over_products_alone"] > 0
    elements = 8 // ranks * 16 + -(-101 // ranks) * 16  # of both gradients
    assert first["above_outputs_gib"] == pytest.approx(1.0 - elements * 2 / 2**30, rel=1e-3)
