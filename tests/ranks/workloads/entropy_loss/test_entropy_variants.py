"""Every registered variant of the entropy loss against the oracle: a new one needs no test of its own."""

import itertools
from typing import Any

import pytest
import torch

from tests.support.entropy_loss import DTYPES, LOSSES, alone, check_variant, context, problem, right_loss, trace_only
from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tpbench.measure.session import Verdict
from tpbench.workloads.entropy_loss import WORKLOAD, EntropyLoss
from tpbench.workloads.entropy_loss.bench import Oracle


def cells(name: str, tp_size: int) -> list[EntropyLoss]:
    """Return the problems that a variant supports: every loss and dtype, and its options.

    A third rank matters only where ranks share columns: for each loss.
    """
    variant = WORKLOAD.variants[name]
    dtypes = DTYPES if tp_size <= 2 else DTYPES[-1:]
    found = [problem(loss=loss, dtype=dtype) for loss, dtype in itertools.product(LOSSES, dtypes)]
    found += [problem(vocab=996, dtype=dtype) for dtype in dtypes]  # for those that need shards of one size
    if tp_size > 2:
        return [cell for cell in found if variant.unsupported_reason(cell, tp_size) is None]
    found += [problem(ignored=share, seed=3, logits_scale=scale) for share in (0.4, 1.0) for scale in (1.0, 1.3)]
    found += [problem(loss=loss, logits_scale=0.7, temperature=1.9) for loss in LOSSES[1:]]
    found += [problem(loss=loss, logits_scale=8.0, temperature=0.05) for loss in LOSSES[1:]]
    found += [problem(loss="policy", kl_weight=0.1, ignored=0.4, dtype=dtype) for dtype in dtypes]
    found += [
        problem(loss=loss, top_k=7, temperature=0.8) for loss in ("soft_cross_entropy", "forward_kl", "reverse_kl")
    ]
    if "block_cap" in variant.options:
        found.append(problem(loss="forward_kl", vocab=9000, tokens=3, block_cap=4096))
    if name == "pytorch_tp_manual":
        found += [problem(loss=loss, exchange="all_reduce") for loss in LOSSES]
    if "softcap" in variant.options:
        terms: list[dict[str, Any]] = [{"label_smoothing": 0.1}, {"z_loss": 0.02}, {"softcap": 2.0}]
        terms.append(terms[0] | terms[1] | terms[2] | {"ignored": 0.4, "logits_scale": 1.3})
        terms += [{"loss": "policy", "entropy_weight": 0.1, "ignored": 0.4}]
        terms += [{"entropy": True, "ignored": 0.4}, {"entropy": True, "loss": "reverse_kl"}]
        found += [problem(dtype=dtype, **fields) for dtype, fields in itertools.product(dtypes, terms)]
    if "autograd" in variant.options:
        found += [problem(loss=loss, autograd=True) for loss in LOSSES]
    if "compute_dtype" in variant.options:
        found += [
            problem(loss=loss, dtype=dtype, compute_dtype="logits") for loss, dtype in itertools.product(LOSSES, dtypes)
        ]
    return [cell for cell in found if variant.unsupported_reason(cell, tp_size) is None]


def run(here: Rank | None, name: str) -> list[tuple[EntropyLoss, Verdict]]:
    verdicts = []
    for cell in cells(name, here.world_size if here else 1):
        session = WORKLOAD.set_up(cell, WORKLOAD.variants[name], context(here))
        session.step()
        verdicts.append((cell, session.check()))
    return verdicts


@pytest.mark.parametrize("tp_size", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(WORKLOAD.variants))
def test_each_variant_agrees_with_the_oracle(name: str, tp_size: int) -> None:
    check_variant(WORKLOAD, name, tp_size, cells(name, tp_size), run)


@pytest.mark.parametrize("name", ["pytorch_tp_manual", "pytorch_gather"])
@pytest.mark.parametrize("loss", LOSSES)
def test_each_part_compiles_to_one_graph(loss: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace_only(monkeypatch)
    cell = problem(loss=loss, compile=True)
    if WORKLOAD.variants[name].unsupported_reason(cell, 1):
        pytest.skip("not supported")
    session = WORKLOAD.set_up(cell, WORKLOAD.variants[name], context())
    session.step()
    assert session.check().wrong is None


def _communicated(here: Rank | None, name: str, cell: EntropyLoss) -> int:
    session = WORKLOAD.set_up(cell, WORKLOAD.variants[name], context(here))
    session.step()
    session.check()
    return session.costs.bytes_communicated


@pytest.mark.parametrize(
    ("name", "loss", "sent"),
    [
        ("triton_tp", "cross_entropy", 13 * 3 * 4),
        ("triton_tp", "reverse_kl", 13 * 5 * 4),
        ("pytorch_tp_manual", "cross_entropy", 13 * 3 * 4),
        ("pytorch_tp_manual", "forward_kl", 13 * 5 * 4),
        ("pytorch_tp_manual all_reduce", "cross_entropy", 13 * 3 * 4),
        ("pytorch_gather", "cross_entropy", 13 * 51 * 2),
        ("pytorch_gather", "forward_kl", 13 * 51 * 2 * 2),
    ],
)
def test_bytes_sent(name: str, loss: str, sent: int) -> None:
    name, *exchange = name.split()
    cell = problem(loss=loss, exchange=(exchange or ["nccl" if name == "triton_tp" else "auto"])[0])
    assert _communicated(None, name, cell) == 0
    if enough_gpus(2):
        assert run_on_ranks(2, _communicated, name, cell) == [sent, sent]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize(("loss", "numbers"), [("cross_entropy", 3), ("reverse_kl", 5)])
def test_bytes_sent_through_symmetric_memory(loss: str, numbers: int) -> None:
    """A word of 8 bytes a number, for the two parts that a shard of twice the even share would have."""
    cell = problem(loss=loss, exchange="symmetric")
    assert run_on_ranks(2, _communicated, "triton_tp", cell) == [13 * numbers * 8 * 2] * 2


def test_unavoidable_bytes() -> None:
    def moved(**fields: Any) -> int | None:
        return WORKLOAD.set_up(problem(**fields), WORKLOAD.variants["pytorch_gather"], context()).costs.bytes_moved

    assert moved(loss="policy") == 2 * 13 * 101 * 2 + 13 * 16
    assert moved() == 2 * 13 * 101 * 2 + 13 * 8
    assert moved(ignored=0.4) == (8 + 13) * 101 * 2 + 13 * 8  # logits of ignored rows need not be read
    assert moved(loss="reverse_kl") == 3 * 13 * 101 * 2


def _replicas(here: Rank) -> Verdict:
    """Two replicas of one rank each, of which the second is wrong."""
    single = context(dp_rank=here.rank, dp_size=2)
    place = {"tp_group": None, "dp_group": here.group, "device": here.device}
    session = WORKLOAD.set_up(
        problem(), WORKLOAD.variants["pytorch_tp_manual"], type(single)(**{**vars(single), **place})
    )
    session.step()
    if here.rank == 1:
        assert session.output is not None
        session.output.grad[3] = 1.0
    return session.check()


def test_replicas_have_one_verdict() -> None:
    if not enough_gpus(2):
        pytest.skip("needs 2 GPUs")
    first, second = run_on_ranks(2, _replicas)
    assert first == second and "grad_error" in str(first.wrong)
    cell = problem()
    assert first.columns["loss_value"] == pytest.approx(right_loss(Oracle(cell, alone(cell))), rel=1e-9)
