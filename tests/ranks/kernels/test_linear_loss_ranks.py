"""`linear_entropy_loss` with the vocabulary, and the hidden states, sharded over real process groups."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.support.kernel_reference import DTYPES, LOSSES
from tests.support.linear_reference import assert_near, linear_reference, make_linear
from tests.support.ranks import Rank, enough_gpus, ranks_here, run_on_ranks
from tpbench.kernels import linear_entropy_loss
from tpbench.kernels.linear.statistics import bytes_of_tiles, is_supported

EXCHANGES = ("nccl", "symmetric") if torch.cuda.is_available() else ("nccl",)
Case = tuple[torch.Tensor, torch.Tensor, Any, dict[str, Any]]


def _columns(rank: Rank, vocab: int) -> slice:
    """Uneven: the first rank holds two rows of the weight more than its share."""
    edges = [0, *(vocab * (each + 1) // rank.world_size + 2 for each in range(rank.world_size - 1)), vocab]
    return slice(edges[rank.rank], edges[rank.rank + 1])


def _own_rows(rank: Rank, values: torch.Tensor, sharded: bool) -> torch.Tensor:
    return values.chunk(rank.world_size)[rank.rank] if sharded else values


def _run(rank: Rank, cases: list[Case]) -> list[Any]:
    results = []
    for hidden, weight, target, options in cases:
        columns, sharded = _columns(rank, len(weight)), bool(options.get("hidden_sharded"))
        if isinstance(target, tuple):
            own: Any = (_own_rows(rank, target[0], sharded).to(rank.device), target[1][columns].to(rank.device))
        else:
            own = (target if target.dim() == 1 else target[:, columns]).to(rank.device)
        local = {name: value.to(rank.device) if torch.is_tensor(value) else value for name, value in options.items()}
        if "bias" in local:
            local["bias"] = local["bias"][columns]
        if local.pop("main_grad", False):
            local["weight_grad"] = torch.ones(len(weight[columns]), weight.shape[1], device=rank.device)
        result = linear_entropy_loss(
            _own_rows(rank, hidden, sharded).to(rank.device), weight[columns].to(rank.device), own, group=rank.group,
            **local,
        )  # fmt: skip
        results.append(
            (
                result.loss, result.row_loss, result.entropy, result.grad_hidden, result.grad_weight,
                result.grad_bias, result.how.chunks, result.how.bytes_sent,
            )
        )  # fmt: skip
    return results


def _forward(rank: Rank, sharded: bool, dtype: torch.dtype) -> list[Any]:
    hidden, weight, target = make_linear("logprob", rows=12, vocab=101, dtype=dtype)
    target[5] = -100
    row_bytes = bytes_of_tiles(51, True) if is_supported(hidden.to(rank.device)) else 51 * dtype.itemsize
    result = linear_entropy_loss(
        _own_rows(rank, hidden, sharded).to(rank.device), weight[_columns(rank, 101)].to(rank.device),
        target.to(rank.device), loss="logprob", reduction="none", entropy=True, group=rank.group, grad=False,
        hidden_sharded=sharded, workspace_gib=5 * row_bytes / 2**30,
    )  # fmt: skip
    assert result.how.chunks == 3
    return [result.row_loss, result.entropy]


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("sharded", [False, True])
def test_log_probabilities_and_entropies_without_gradients(sharded: bool, dtype: torch.dtype) -> None:
    if not enough_gpus(2):
        pytest.skip("needs 2 GPUs")
    first, second = run_on_ranks(2, _forward, sharded, dtype)
    hidden, weight, target = make_linear("logprob", rows=12, vocab=101, dtype=dtype)
    target[5] = -100
    right = linear_reference(hidden, weight, target, loss="logprob", reduction="none")
    for ours, theirs, expected in zip(first, second, (right.row_loss, right.entropy), strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


def _check(world_size: int, cases: list[Case]) -> list[Any]:
    if not enough_gpus(world_size):
        pytest.skip(f"needs {world_size} GPUs")
    by_case = list(zip(*run_on_ranks(world_size, _run, cases), strict=True))
    for (hidden, weight, target, options), shards in zip(cases, by_case, strict=True):
        losses, rows, entropies, hiddens, weights, biases, chunks, _ = zip(*shards, strict=True)
        for same in (losses, rows, entropies if options.get("entropy") else losses):
            assert all(torch.equal(each, same[0]) for each in same), options
        assert len(set(chunks)) == 1
        ours = ("workspace_gib", "exchange", "hidden_sharded", "main_grad", "entropy", "vocab_start")
        right = linear_reference(
            hidden, weight, target, **{name: value for name, value in options.items() if name not in ours}
        )
        torch.testing.assert_close(losses[0].double(), right.loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rows[0].double(), right.row_loss, rtol=1e-5, atol=1e-5)
        if options.get("entropy"):
            torch.testing.assert_close(entropies[0].double(), right.entropy, rtol=1e-5, atol=1e-5)
        whole = torch.cat(hiddens) if options.get("hidden_sharded") else hiddens[0]
        assert_near(whole, right.grad_hidden, hidden.dtype, options)
        added = 1.0 if options.get("main_grad") else 0.0
        assert_near(torch.cat(weights).double() - added, right.grad_weight, hidden.dtype, options)
        if right.grad_bias is not None:
            assert_near(torch.cat(biases), right.grad_bias, hidden.dtype, options)
    return by_case


def gib(rows: int, columns: int, itemsize: int) -> float:
    return rows * columns * itemsize / 2**30


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("world_size", sorted({ranks_here(2), ranks_here(3)}))
def test_every_loss_dtype_and_chunk_size(world_size: int, exchange: str) -> None:
    cases: list[Case] = []
    dtypes = DTYPES if world_size <= 2 else DTYPES[:1]
    for loss, dtype, rows, sharded in itertools.product((*LOSSES, "logprob"), dtypes, (12, 5), (False, True)):
        options = {"loss": loss, "exchange": exchange, "hidden_sharded": sharded, "main_grad": rows == 5}
        options["workspace_gib"] = gib(rows, -(-101 // world_size), dtype.itemsize)
        cases.append((*make_linear(loss, rows=12, vocab=101, dtype=dtype), options))
    for case, shards in zip(cases, _check(world_size, cases), strict=True):
        assert shards[0][6] >= 3 if case[3]["main_grad"] else shards[0][6] == 1, case[3]


@pytest.mark.parametrize("world_size", sorted({ranks_here(2), ranks_here(3)}))
def test_options(world_size: int) -> None:
    """Three ranks differ from two where their numbers meet: in the reduce-scatter of sharded hidden states."""
    cases: list[Case] = []
    for sharded, loss in itertools.product((False, True) if world_size <= 2 else (True,), (*LOSSES, "logprob")):
        options: dict[str, Any] = {"loss": loss, "hidden_sharded": sharded, "workspace_gib": gib(7, 34, 4)}
        hidden, weight, target = make_linear(loss, rows=12, vocab=101)
        cases.append((hidden, weight, target, {**options, "softcap": 3.0, "bias": torch.linspace(-1, 1, 101)}))
        upstream = {"row_grad": torch.linspace(-1, 2, 12), "entropy_grad": torch.linspace(1, -2, 12)}
        cases.append((hidden, weight, target, {**options, "entropy": True, "reduction": "none", **upstream}))
        if loss in ("cross_entropy", "logprob"):
            target = target.clone()
            target[:4] = torch.tensor([-100, -1, 101, 10**9])
            smoothed = {"label_smoothing": 0.1, "z_loss": 1e-3} if loss == "cross_entropy" else {"temperature": 0.7}
            cases.append((hidden, weight, target, {**options, **smoothed}))
            cases.append((hidden, weight, torch.full_like(target, -100), options))
            cases.append((hidden, weight, target.int().clamp(max=69), {**options, "vocab_size": 70}))
        else:
            teacher, teacher_weight, _ = make_linear(loss, rows=12, vocab=101, width=24, seed=4)
            cases.append((hidden, weight, (teacher, teacher_weight), {**options, "temperature": 1.4}))
    _check(world_size, cases)


def test_bytes_sent() -> None:
    """Two of three numbers are those of the hidden states: 12 rows of 16 numbers, 4 bytes each."""
    cases: list[Case] = [
        (*make_linear(rows=12, vocab=101), {"hidden_sharded": sharded, "exchange": "nccl"}) for sharded in (False, True)
    ]
    statistics, matrix = 12 * 3 * 4, 12 * 16 * 4
    for shards in _check(2, cases):
        # An all-reduce, or an all-gather and a reduce-scatter: each rank sends two halves of the matrix.
        assert [each[7] for each in shards] == [statistics + matrix] * 2


def _empty_shard(rank: Rank) -> list[Any]:
    """All of the vocabulary is the second rank's."""
    hidden, weight, target = (each.to(rank.device) for each in make_linear(vocab=101))
    own = weight if rank.rank == 1 else weight[:0]
    result = linear_entropy_loss(hidden, own, target, group=rank.group, exchange="nccl", workspace_gib=gib(4, 51, 4))
    forward = linear_entropy_loss(
        hidden.bfloat16(), own.bfloat16(), target, group=rank.group, exchange="nccl", grad=False
    )
    return [result.row_loss, result.grad_hidden, result.grad_weight, forward.row_loss]


def test_a_rank_without_a_vocabulary() -> None:
    if not enough_gpus(2):
        pytest.skip("needs 2 GPUs")
    first, second = run_on_ranks(2, _empty_shard)
    hidden, weight, target = make_linear(vocab=101)
    right = linear_reference(hidden, weight, target)
    in_bf16 = linear_reference(hidden.bfloat16(), weight.bfloat16(), target)
    torch.testing.assert_close(second[3].double(), in_bf16.row_loss, rtol=1e-5, atol=1e-5)
    assert torch.equal(first[3], second[3])
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1]) and first[2].shape == (0, 16)
    assert_near(second[1], right.grad_hidden, torch.float32)
    assert_near(second[2], right.grad_weight, torch.float32)
