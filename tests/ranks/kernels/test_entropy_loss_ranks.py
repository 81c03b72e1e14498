"""The kernels with the vocabulary sharded over real process groups."""

from __future__ import annotations

import itertools
import math
import os
import signal
import time
from typing import Any

import pytest
import torch

from tests.support.kernel_reference import DTYPES, LOSSES, assert_right, far_away, make, reference
from tests.support.ranks import Rank, RankError, enough_gpus, ranks_here, run_on_ranks
from tpbench.kernels import entropy_loss, symmetric
from tpbench.kernels.collectives import gather_values
from tpbench.kernels.symmetric import unavailable_reason

INF = float("inf")
EXCHANGES = ("nccl", "symmetric") if torch.cuda.is_available() else ("nccl",)


def _bounds(rank: Rank, vocab: int) -> tuple[int, int]:
    """Uneven: the first rank holds two columns more than its share."""
    edges = [0, *(vocab * (each + 1) // rank.world_size + 2 for each in range(rank.world_size - 1)), vocab]
    return edges[rank.rank], edges[rank.rank + 1]


def _shard(rank: Rank, logits: torch.Tensor, target: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    start, stop = _bounds(rank, logits.shape[1])
    local = logits[:, start:stop].to(rank.device)
    target = target[:, start:stop] if target.dim() == 2 else target
    result = entropy_loss(local, target.to(rank.device), group=rank.group, **options)
    assert result.grad is not None
    return result.loss, result.row_loss, result.grad


def _many(rank: Rank, cases: list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]) -> list[Any]:
    return [_shard(rank, logits, target, **options) for logits, target, options in cases]


def _check(world_size: int, exchange: str, cases: list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]) -> None:
    if not enough_gpus(world_size):
        pytest.skip(f"needs {world_size} GPUs")
    for _, _, options in cases:
        options["exchange"] = exchange
    shards_by_case = zip(*run_on_ranks(world_size, _many, cases), strict=True)
    for (logits, target, options), shards in zip(cases, shards_by_case, strict=True):
        losses, row_losses, grads = zip(*shards, strict=True)
        assert all(torch.equal(each, losses[0]) for each in losses), options
        assert all(torch.equal(each, row_losses[0]) for each in row_losses), options
        options = {
            name: value
            for name, value in options.items()
            if name not in ("block_cap", "grad", "vocab_start", "exchange")
        }
        assert_right(losses[0], row_losses[0], torch.cat(grads, 1), reference(logits, target, **options))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("world_size", sorted({ranks_here(2), ranks_here(3)}))
def test_every_loss_and_dtype(world_size: int, exchange: str) -> None:
    cases = []
    dtypes = DTYPES if world_size <= 2 else DTYPES[:1]
    for loss, dtype, block_cap in itertools.product(LOSSES, dtypes, (16, "auto")):
        options = {"loss": loss, "block_cap": block_cap, "logits_scale": 1.3, "z_loss": 1e-3}
        cases.append((*make(loss, dtype=dtype, vocab=101), options))
    _check(world_size, exchange, cases)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_edge_cases(world_size: int, exchange: str) -> None:
    cases: list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]] = []
    for loss in LOSSES:
        for shard in ("first", "last", "all but the last column"):
            logits, target = make(loss, vocab=101)
            columns = {"first": slice(0, 101 // world_size + 2), "last": slice(70, 101)}.get(shard, slice(0, 100))
            logits[:, columns] = -INF
            if loss == "cross_entropy":
                target[:] = 0 if shard == "last" else 100
            else:
                target[:, columns] = -INF
            cases.append((logits, target, {"loss": loss, "block_cap": 16}))
            if loss != "cross_entropy" and shard in ("first", "last"):  # a weight of zero, whatever it weighs
                logits, target = make(loss, vocab=101)
                weight, other = (logits, target) if loss == "reverse_kl" else (target, logits)
                weight[:, columns] = other[:, columns.start : columns.stop : 3] = -INF
                cases.append((logits, target, {"loss": loss, "block_cap": 16}))
        logits, target = make(loss, vocab=101)
        cases.append(
            (logits, target.clamp(max=29) if loss == "cross_entropy" else target, {"loss": loss, "vocab_size": 30})
        )
        cases.append((*make(loss), {"loss": loss, "grad": "in_place", "reduction": "sum", "grad_scale": 0.3}))
        logits, target = make(loss, vocab=101)
        target = target if loss == "cross_entropy" else far_away(target, -4096.0)
        cases.append((far_away(logits, 4096.0), target, {"loss": loss, "block_cap": 16}))
    cases.append((*make("cross_entropy", vocab=101), {"label_smoothing": 0.2, "block_cap": 16}))
    logits, target = make("cross_entropy", vocab=101)
    cases.append((logits, target.clamp(max=89), {"label_smoothing": 0.2, "vocab_size": 90}))
    logits, target = make("cross_entropy", vocab=101)
    target[:4] = torch.tensor([-100, -1, 101, 10**9])
    cases.append((logits, target, {}))
    cases.append((logits, target.int(), {"reduction": "none"}))
    cases.append((logits, torch.full_like(target, -100), {}))
    _check(world_size, exchange, cases)


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([("", "a", "1", 0), ("", "a", "1", 0)], ""),
        ([("", "a", "1", 3), ("", "a", "1", 3)], ""),
        ([("", "a", "1", 0), ("too old", "a", "1", 0)], "too old"),
        ([("", "a", "1", 0), ("", "b", "1", 0)], "several nodes"),
        ([("", "a", "1", 0), ("", "a", "2", 0)], "several nodes"),
        ([("", "a", "1", 1), ("", "a", "1", 0)], "unequally often before, in other groups ((1, 0))"),
    ],
)
def test_ranks_agree_on_symmetric_memory(ranks: list[tuple[str, str, str, int]], reason: str) -> None:
    assert (unavailable_reason(ranks) == "") == (reason == "") and reason in unavailable_reason(ranks)


def _gathered(rank: Rank) -> list[Any]:
    return gather_values(("größer" * rank.rank, rank.rank), rank.group, rank.device)


def test_ranks_gather_values_of_any_length() -> None:
    assert set(map(str, run_on_ranks(2, _gathered))) == {str([["", 0], ["größer", 1]])}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_after_a_wait_in_vain_every_call_raises() -> None:
    logits, labels = make("cross_entropy", vocab=128, device="cuda")
    entropy_loss(logits, labels, algorithm="one_read")
    workspace = symmetric.local_workspace(logits.device)
    workspace.failed.fill_(1)  # as a kernel would
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="in vain for the statistics of another rank"):
                entropy_loss(logits, labels, algorithm="one_read")
    finally:
        workspace.failed.zero_()


def _left_alone(rank: Rank, logits: torch.Tensor, labels: torch.Tensor) -> tuple[bool, float, str]:
    """The first rank's second call, whose peer is dead: whether its loss is NaN, after how long, and the third call's
    error."""
    start, stop = _bounds(rank, logits.shape[1])
    local, labels = logits[:, start:stop].to(rank.device), labels.to(rank.device)
    shard = {"group": rank.group, "vocab_start": start, "vocab_size": logits.shape[1], "exchange": "symmetric"}
    assert entropy_loss(local, labels, **shard).loss.isfinite()  # whose wait is as long as the peer compiles
    torch.cuda.synchronize()
    symmetric.WAIT_LIMIT_S = 4.0
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    loss = entropy_loss(local, labels, **shard).loss.item()
    took = time.monotonic() - began
    try:
        entropy_loss(local, labels, **shard)
    except RuntimeError as error:
        return math.isnan(loss), took, str(error)
    return math.isnan(loss), took, ""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_a_rank_whose_peer_is_killed_ends_with_an_error() -> None:
    with pytest.raises(RankError, match=r"rank 1: died \(exit code -9\)") as raised:
        run_on_ranks(2, _left_alone, *make("cross_entropy", vocab=101), timeout_s=60.0)
    assert raised.value.answers[0] is not None
    nan, took, error = raised.value.answers[0]
    assert nan and 3.0 < took < 30.0 and "in vain for the statistics of another rank" in error


def _captured(rank: Rank, logits: torch.Tensor, target: torch.Tensor, loss: Any, grad: str) -> list[Any]:
    """Loss and gradient of a graph's replays, of logits that change in between, and of a call without a graph."""
    start, stop = _bounds(rank, logits.shape[1])
    local = logits[:, start:stop].to(rank.device)
    target = (target if loss == "cross_entropy" else target[:, start:stop]).to(rank.device)
    shard: dict[str, Any] = {
        "group": rank.group, "vocab_start": start, "vocab_size": logits.shape[1], "loss": loss, "exchange": "symmetric",
    }  # fmt: skip
    held = local.clone()
    for _ in range(2):
        entropy_loss(held.copy_(local), target, grad=grad, **shard)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = entropy_loss(held, target, grad=grad, **shard)
    found = []
    for scale in (1.0, 0.5, 1.0, 2.0):
        held.copy_(local * scale)
        graph.replay()
        plain = entropy_loss(local * scale, target, **shard)
        assert result.grad is not None and plain.grad is not None
        found.append((result.loss.clone(), plain.loss, torch.equal(result.grad, plain.grad)))
    torch.cuda.synchronize()
    return found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("rows", "vocab"), [(7, 101), (300, 65536)])
def test_a_graph_over_ranks_may_be_replayed_between_other_calls(loss: Any, rows: int, vocab: int) -> None:
    for grad in ("new", "in_place"):
        by_rank = run_on_ranks(2, _captured, *make(loss, rows=rows, vocab=vocab, dtype=torch.bfloat16), loss, grad)
        for replayed, plain, same_grad in itertools.chain(*by_rank):
            assert torch.equal(replayed, plain) and same_grad
        assert [each[0] for each in by_rank[0]] == [each[0] for each in by_rank[1]]
        assert len({each[0].item() for each in by_rank[0]}) == 3


def _refused(rank: Rank, logits: torch.Tensor, labels: torch.Tensor) -> list[str]:
    start, stop = _bounds(rank, logits.shape[1])
    local, labels = logits[:, start:stop].to(rank.device), labels.to(rank.device)
    options: list[dict[str, Any]] = [
        {"algorithm": "two_reads"},
        {"algorithm": "two_kernels", "exchange": "symmetric"},
        {"algorithm": "one_read", "exchange": "nccl"},
    ]
    errors = []
    for each in options:
        try:
            entropy_loss(local, labels, group=rank.group, vocab_start=start, vocab_size=logits.shape[1], **each)
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_algorithms_that_do_not_go_with_the_exchange() -> None:
    if not enough_gpus(2):
        pytest.skip("needs 2 GPUs")
    for fused, cached, once in run_on_ranks(2, _refused, *make("cross_entropy", vocab=101)):
        assert "use 'two_kernels', 'one_read' or 'auto'" in fused
        assert "'two_kernels' over ranks is exchange='nccl'" in cached
        assert "'one_read' over ranks is exchange='symmetric'" in once


def _uneven(
    rank: Rank, logits: torch.Tensor, target: torch.Tensor, loss: Any, held: int
) -> tuple[torch.Tensor, str]:  # fmt: skip
    """Each rank but the last holds `held` columns, or fewer. The last one holds the others."""
    stop = held * (rank.rank + 1) if rank.rank < rank.world_size - 1 else logits.shape[1]
    columns = slice(held * rank.rank, stop)
    target = target if loss == "cross_entropy" else target[:, columns]
    exchange: Any = "auto" if held else "nccl"
    result = entropy_loss(
        logits[:, columns].to(rank.device), target.to(rank.device), loss=loss, group=rank.group, exchange=exchange
    )
    assert result.grad is not None and result.grad.shape == logits[:, columns].shape
    return result.row_loss, result.how.algorithm


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("world_size", "held"), [(2, 0), (3, 1), (4, 1)])
def test_one_rank_may_hold_nearly_all_columns(loss: Any, world_size: int, held: int) -> None:
    """More than places are kept for where shares are even: by two kernels then, on all ranks."""
    if not enough_gpus(world_size):
        pytest.skip(f"needs {world_size} GPUs")
    logits, target = make(loss, rows=3, vocab=40000)
    results = run_on_ranks(world_size, _uneven, logits, target, loss, held)
    assert held == 0 or {algorithm for _, algorithm in results} == {"two_kernels"}
    assert all(torch.equal(losses, results[0][0]) for losses, _ in results)
    torch.testing.assert_close(results[0][0].double(), reference(logits, target, loss=loss)[1], rtol=1e-5, atol=1e-5)


def _explicit(rank: Rank, logits: torch.Tensor, labels: torch.Tensor) -> list[Any]:
    start, stop = _bounds(rank, logits.shape[1])
    local = logits[:, start:stop].to(rank.device)
    labels = labels.to(rank.device)
    shard = {"group": rank.group, "vocab_start": start, "vocab_size": logits.shape[1]}
    first, second = (entropy_loss(local, labels, **each) for each in (shard, {"group": rank.group}))
    known = entropy_loss(local, labels, group=rank.group, vocab_start=start)
    assert known.grad is not None and second.grad is not None and torch.equal(known.grad, second.grad)
    none = entropy_loss(local[:0], labels[:0], **shard)
    errors = []
    for wrong in ({"vocab_size": 102}, {"vocab_start": 0}, {"vocab_start": start + rank.rank}):
        try:
            entropy_loss(local, labels, group=rank.group, **wrong)
        except ValueError as error:
            errors.append(str(error))
    return [first.loss, first.grad, second.loss, second.grad, none.loss, errors]


def test_explicit_bounds_and_no_tokens() -> None:
    if not enough_gpus(2):
        pytest.skip("needs 2 GPUs")
    for first, first_grad, second, second_grad, none, errors in run_on_ranks(
        2, _explicit, *make("cross_entropy", vocab=101)
    ):
        assert torch.equal(first, second) and torch.equal(first_grad, second_grad) and none == 0
        assert [error.split()[0] for error in errors] == ["vocab_size", "vocab_start", "vocab_start"]
        assert errors[1].endswith(": 52 on rank 1, got 0") and errors[2].endswith(": 52 on rank 1, got 53")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("world_size", sorted({ranks_here(2), ranks_here(4)}))
def test_long_rows_and_many(world_size: int) -> None:
    """Rows of several parts on each rank, tiles of several rows, whole vectors and not."""
    cases: list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]] = []
    for loss, (rows, vocab), dtype in itertools.product(LOSSES, ((40, 131072), (600, 4096), (5, 50257)), DTYPES[2:]):
        logits, target = make(loss, rows=rows, vocab=vocab, dtype=dtype)
        if loss == "cross_entropy":
            target[::3] = -100
        cases.append((logits, target, {"loss": loss, "z_loss": 1e-4}))
    _check(world_size, "symmetric", cases)
