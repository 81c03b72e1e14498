"""The kernels with the vocabulary sharded over real process groups."""

import itertools
import math
import os
import random
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.kernel_reference import DTYPES, LOSSES, assert_right, columns_of, far_away, make, on_ranks, reference
from tests.support.ranks import Rank, RankError, needs_cuda, ranks_here, run_on_ranks
from tpbench.kernels import entropy_loss, symmetric
from tpbench.kernels.symmetric import unavailable_reason

INF = float("inf")
EXCHANGES = ("nccl", "symmetric", "yielding") if torch.cuda.is_available() else ("nccl",)
Case = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
"""Logits and target of the whole vocabulary, and options."""
needs_2_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")


def _shard(rank: Rank, logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return the logits and the target of a rank, and the options that say where they lie."""
    columns = columns_of(rank, logits.shape[1])
    target = target[:, columns] if target.dim() == 2 else target
    place = {"group": rank.group, "vocab_start": columns.start, "vocab_size": logits.shape[1]}
    return logits[:, columns].to(rank.device), target.to(rank.device), place


def _many(rank: Rank, cases: list[Case]) -> list[Any]:
    results = []
    for logits, target, options in cases:
        result = entropy_loss(*_shard(rank, logits, target)[:2], group=rank.group, **options)
        results.append((result.loss, result.row_loss, result.grad))
    return results


def _check(world_size: int, exchange: str, cases: list[Case]) -> None:
    for _, _, options in cases:
        options["exchange"] = exchange
    shards_by_case = zip(*on_ranks(world_size, _many, cases), strict=True)
    for (logits, target, options), shards in zip(cases, shards_by_case, strict=True):
        losses, row_losses, grads = zip(*shards, strict=True)
        assert all(torch.equal(each, losses[0]) for each in losses), options
        assert all(torch.equal(each, row_losses[0]) for each in row_losses), options
        for name in ("block_cap", "grad", "exchange"):
            options.pop(name, None)
        assert_right(losses[0], row_losses[0], torch.cat(grads, 1), reference(logits, target, **options))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("world_size", sorted({ranks_here(2), ranks_here(3)}))
def test_every_loss_and_dtype(world_size: int, exchange: str) -> None:
    """Ranks exchange the same numbers for every dtype; one rank alone is tested with each loss in each dtype."""
    cases: list[Case] = []
    combinations = [(loss, torch.float32) for loss in LOSSES]
    if world_size <= 2:
        combinations += zip(LOSSES, itertools.cycle(DTYPES[1:]), strict=False)
    for index, (loss, dtype) in enumerate(combinations):
        options = {"loss": loss, "block_cap": (16, "auto")[index % 2], "logits_scale": 1.3, "z_loss": 1e-3}
        cases.append((*make(loss, dtype=dtype, vocab=101), options))
    _check(world_size, exchange, cases)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_edge_cases(world_size: int, exchange: str) -> None:
    cases: list[Case] = []
    shards = {"first": slice(0, 101 // world_size + 2), "last": slice(70, 101), "all but one column": slice(0, 100)}
    for loss in LOSSES if world_size == 2 else LOSSES[::2]:
        labels, usual = loss == "cross_entropy", {"loss": loss, "block_cap": 16}
        for shard, columns in shards.items():
            logits, target = make(loss, vocab=101)
            logits[:, columns] = -INF
            if labels:
                target[:] = 0 if shard == "last" else 100
            else:
                target[:, columns] = -INF
            cases.append((logits, target, dict(usual)))
            if not labels and columns.stop != 100:  # a weight of zero, whatever it weighs
                logits, target = make(loss, vocab=101)
                weight, other = (logits, target) if loss == "reverse_kl" else (target, logits)
                weight[:, columns] = other[:, columns.start : columns.stop : 3] = -INF
                cases.append((logits, target, dict(usual)))
        logits, target = make(loss, vocab=101)
        cases.append((logits, target.clamp(max=29) if labels else target, {"loss": loss, "vocab_size": 30}))
        cases.append((*make(loss), {"loss": loss, "grad": "in_place", "reduction": "sum", "grad_scale": 0.3}))
        cases.append((far_away(logits, 4096.0), target if labels else far_away(target, -4096.0), usual))
    logits, target = make("cross_entropy", vocab=101)
    cases.append((logits, target, {"label_smoothing": 0.2, "block_cap": 16}))
    cases.append((logits, target.clamp(max=89), {"label_smoothing": 0.2, "vocab_size": 90}))
    target = torch.cat((torch.tensor([-100, -1, 101, 10**9]), target[4:]))
    cases.append((logits, target, {}))
    cases.append((logits, target.int(), {"reduction": "none"}))
    cases.append((logits, torch.full_like(target, -100), {}))
    _check(world_size, exchange, cases)


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([("", "a 1", 0), ("", "a 1", 0)], ""),
        ([("", "a 1", 3), ("", "a 1", 3)], ""),
        ([("", "a 1", 0), ("too old", "a 1", 0)], "too old"),
        ([("", "a 1", 0), ("", "b 1", 0)], "several nodes"),
        ([("", "a 1", 0), ("", "a 2", 0)], "several nodes"),
        ([("", "a 1", 1), ("", "a 1", 0)], "unequally often before, in other groups ((1, 0))"),
    ],
)
def test_ranks_agree_on_symmetric_memory(ranks: list[tuple[str, str, int]], reason: str) -> None:
    assert (unavailable_reason(ranks) == "") == (reason == "") and reason in unavailable_reason(ranks)


def _left_alone(rank: Rank, logits: torch.Tensor, labels: torch.Tensor, exchange: str) -> tuple[bool, float, str]:
    """The first rank's second call, whose peer is dead: whether its loss is NaN, after how long, and the third call's
    error."""
    local, labels, shard = _shard(rank, logits, labels)
    shard["exchange"] = exchange
    assert entropy_loss(local, labels, **shard).loss.isfinite()  # whose wait is as long as the peer compiles
    torch.cuda.synchronize()
    symmetric.WAIT_LIMIT_S = 1.0  # a launch that yields waits for a dead rank up to three times
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    loss = entropy_loss(local, labels, **shard).loss.item()
    took = time.monotonic() - began
    with pytest.raises(RuntimeError) as raised:
        entropy_loss(local, labels, **shard)
    return math.isnan(loss), took, str(raised.value)


@needs_2_gpus
@pytest.mark.parametrize("exchange", ["symmetric", "yielding"])
def test_a_rank_whose_peer_is_killed_ends_with_an_error(exchange: str) -> None:
    with pytest.raises(RankError, match=r"rank 1: died \(exit code -9\)") as raised:
        run_on_ranks(2, _left_alone, *make("cross_entropy", vocab=101), exchange, timeout_s=60.0)
    assert raised.value.answers[0] is not None
    nan, took, error = raised.value.answers[0]
    assert nan and 0.8 < took < 30.0 and "in vain for the statistics of another rank" in error


def _captured(rank: Rank, logits: torch.Tensor, target: torch.Tensor, loss: Any, grad: str) -> list[Any]:
    """Loss and gradient of a graph's replays, of logits that change in between, and of a call without a graph."""
    local, target, shard = _shard(rank, logits, target)
    shard |= {"loss": loss, "exchange": "yielding" if len(local) == 300 else "symmetric"}
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


@needs_2_gpus
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("rows", "vocab"), [(7, 101), (300, 65536)])
def test_a_graph_over_ranks_may_be_replayed_between_other_calls(loss: Any, rows: int, vocab: int) -> None:
    for grad in ("new", "in_place"):
        by_rank = run_on_ranks(2, _captured, *make(loss, rows=rows, vocab=vocab, dtype=torch.bfloat16), loss, grad)
        for replayed, plain, same_grad in itertools.chain(*by_rank):
            assert torch.equal(replayed, plain) and same_grad
        assert [each[0] for each in by_rank[0]] == [each[0] for each in by_rank[1]]
        assert len({each[0].item() for each in by_rank[0]}) == 3


def _late(rank: Rank, logits: torch.Tensor, target: torch.Tensor, loss: Any) -> list[bool]:
    """Return whether this rank's programs left rows in three calls: no rank, rank 0, and rank 1 came late."""
    local, target, shard = _shard(rank, logits, target)
    shard["loss"] = loss
    right = entropy_loss(local, target, exchange="symmetric", **shard)
    launch = entropy_loss(local, target, exchange="yielding", **shard).how.relaunch
    left = launch.prepared.late_rows and symmetric.workspace(rank.group, rank.device).control[2]
    (meet, *meeting), reads, (meet_again, *again), late_rows = launch.queue
    found = []
    for late in (None, 0, 1):

        def meet_and_sleep(*arguments: Any, late: int | None = late) -> None:
            meet(*arguments)
            torch.cuda._sleep(10**9 * (late == rank.rank))  # half a second: others may have the GPU and the cores

        def look_and_meet(*arguments: Any) -> None:
            found.append(left.clone())
            meet_again(*arguments)

        launch.queue = [(meet_and_sleep, *meeting), reads, (look_and_meet, *again), late_rows]
        result = entropy_loss(local, target, exchange="yielding", **shard)
        assert torch.equal(result.row_loss, right.row_loss) and torch.equal(result.grad, right.grad)
        torch.cuda.synchronize()
    return [bool(each) for each in found]


@needs_2_gpus
@pytest.mark.parametrize("loss", ["cross_entropy", "reverse_kl"])
@pytest.mark.parametrize("vocab", [65536, 151936])
def test_rows_that_a_rank_left_have_the_bits_of_the_others(loss: Any, vocab: int) -> None:
    first, second = run_on_ranks(2, _late, *make(loss, rows=2000, vocab=vocab, dtype=torch.bfloat16), loss)
    assert first[2] and second[1]  # the rank that waits leaves rows


def _groups(rank: Rank) -> tuple[bool, bool]:
    """Return whether the exchange yields by default: of a group beside groups of one rank, and beside another."""
    logits, labels = make("cross_entropy", rows=64)
    for single in (0, 1):
        torch.distributed.new_group([single])
    local, labels, _ = _shard(rank, logits, labels)
    hows = [entropy_loss(local, labels, group=rank.group).how]
    hows.append(entropy_loss(local, labels, group=torch.distributed.new_group([0, 1])).how)
    alone, other = (how.relaunch.prepared.late_rows is not None for how in hows)
    return alone, other


@needs_2_gpus
def test_the_default_yields_if_there_is_another_group() -> None:
    assert run_on_ranks(2, _groups) == [(False, True)] * 2


REFUSED: dict[str, dict[str, Any]] = {
    "'two_kernels', 'one_read' or 'auto'": {"algorithm": "two_reads"},
    "'two_kernels' over ranks is exchange='nccl'": {"algorithm": "two_kernels", "exchange": "symmetric"},
    "'one_read' over ranks is exchange='symmetric'": {"algorithm": "one_read", "exchange": "nccl"},
    "vocab_size must be at most": {"vocab_start": None, "vocab_size": 102},
    r"\[0, 52\] by rank; got .* vocab_start \[0, 0\]": {"vocab_start": 0, "vocab_size": None},
}
"""By key words of the error: options that do not fit two ranks."""


def _refused(rank: Rank, logits: torch.Tensor, labels: torch.Tensor) -> None:
    local, labels, shard = _shard(rank, logits, labels)
    for words, options in REFUSED.items():
        with pytest.raises(ValueError, match=words):
            entropy_loss(local, labels, **{**shard, **options})


def test_options_that_do_not_fit_the_ranks() -> None:
    on_ranks(2, _refused, *make("cross_entropy", vocab=101))


def _beside(rank: Rank, fsdp: bool) -> bool:
    """Return true if steps with random delays, beside collectives on another stream, had other bits than one alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    generator, device = random.Random(rank.rank), rank.device
    torch.manual_seed(rank.rank)
    logits = torch.randn(4096, 65536, device=device, dtype=torch.bfloat16)
    target = torch.arange(4096, device=device) * 31
    shard: dict[str, Any] = {"group": rank.group, "vocab_start": 65536 * rank.rank, "vocab_size": 131072}
    right = entropy_loss(logits, target, exchange="yielding", **shard)
    wrong = torch.zeros((), dtype=torch.bool, device=device)
    layers = [torch.nn.Linear(4096, 4096, device=device, dtype=torch.bfloat16) for _ in range(4)]
    model, group, side = torch.nn.Sequential(*layers), dist.new_group(backend="nccl"), torch.cuda.Stream()
    for module in (*layers, model):
        fully_shard(module, mesh=init_device_mesh("cuda", (2,)))
    states, part = torch.randn(2048, 4096, device=device, dtype=torch.bfloat16), torch.ones(2**24, device=device)
    gathered = part.new_empty(2 * len(part))

    def sleep() -> None:
        torch.cuda._sleep(int(generator.random() * 2e6) * (generator.random() < 0.5))

    def call() -> None:
        sleep()
        result = entropy_loss(logits, target, exchange="yielding", **shard)
        assert result.grad is not None and right.grad is not None
        wrong.logical_or_((result.row_loss != right.row_loss).any() | (result.grad != right.grad).any())

    def communicate() -> None:
        if fsdp:
            model(states).float().square().mean().backward()
            return
        with torch.cuda.stream(side):
            sleep()
            dist.all_gather_into_tensor(gathered, part, group=group)

    for first in (communicate, call):  # a first collective, and a kernel that is loaded, may wait for the whole device
        first()
        torch.cuda.synchronize()
    for step in range(1000):
        for do in (call, communicate) if fsdp or (step + rank.rank) % 2 else (communicate, call):
            do()
        if step % 20 == 19:
            torch.cuda.synchronize()
    return bool(wrong)


@needs_2_gpus
@pytest.mark.parametrize("fsdp", [False, True])
def test_a_yielding_exchange_beside_collectives_that_start_in_another_order(fsdp: bool) -> None:
    assert run_on_ranks(2, _beside, fsdp) == [False, False]


def _uneven(
    rank: Rank, logits: torch.Tensor, target: torch.Tensor, loss: Any, held: int
) -> tuple[torch.Tensor, str]:  # fmt: skip
    """Each rank but the last holds `held` columns, or fewer. The last one holds the others."""
    stop = held * (rank.rank + 1) if rank.rank < rank.world_size - 1 else logits.shape[1]
    columns = slice(held * rank.rank, stop)
    target = target if loss == "cross_entropy" else target[:, columns]
    exchange: Any = "yielding" if held else "nccl"
    result = entropy_loss(
        logits[:, columns].to(rank.device), target.to(rank.device), loss=loss, group=rank.group, exchange=exchange
    )
    assert result.grad is not None and result.grad.shape == logits[:, columns].shape
    return result.row_loss, result.how.algorithm


@pytest.mark.parametrize(
    ("loss", "world_size", "held"),
    [("cross_entropy", 2, 0), ("soft_cross_entropy", 3, 1), ("reverse_kl", 2, 0), ("forward_kl", 4, 1)],
)
def test_one_rank_may_hold_nearly_all_columns(loss: Any, world_size: int, held: int) -> None:
    """More than places are kept for where shares are even: by two kernels then, on all ranks."""
    logits, target = make(loss, rows=3, vocab=40000)
    results = on_ranks(world_size, _uneven, logits, target, loss, held)
    assert held == 0 or {algorithm for _, algorithm in results} == {"two_kernels"}
    assert all(torch.equal(losses, results[0][0]) for losses, _ in results)
    torch.testing.assert_close(results[0][0].double(), reference(logits, target, loss=loss)[1], rtol=1e-5, atol=1e-5)


@needs_cuda
@pytest.mark.parametrize("world_size", sorted({ranks_here(2), ranks_here(4)}))
def test_long_rows_and_many(world_size: int) -> None:
    """Rows of several parts on each rank, tiles of several rows, whole vectors and not."""
    cases: list[Case] = []
    for loss, (rows, vocab) in itertools.product(LOSSES, ((40, 131072), (600, 4096), (5, 50257), (7, 151936))):
        logits, target = make(loss, rows=rows, vocab=vocab, dtype=torch.bfloat16)
        if loss == "cross_entropy":
            target[::3] = -100
        cases.append((logits, target, {"loss": loss, "z_loss": 1e-4}))
    _check(world_size, "symmetric", cases)
