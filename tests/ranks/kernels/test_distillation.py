"""JSD, total variation, and losses against a teacher's top k, against float64: every option, dtype and chunk."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernel_reference import (
    DTYPES,
    assert_gradient_near,
    assert_near,
    columns_of,
    far_away,
    make,
    make_linear,
    on_ranks,
)
from tests.support.ranks import Rank, needs_cuda, ranks_here
from tpbench.kernels import EntropyLoss, LinearEntropyLoss, TopK, entropy_loss, linear_entropy_loss

LOSSES = ("soft_cross_entropy", "forward_kl", "reverse_kl")
TAILS = ("drop", "bucket")
JSD: dict[str, Any] = {"loss": "jsd", "block_cap": 32}
TOTAL_VARIATION: dict[str, Any] = {"loss": "total_variation", "block_cap": 32}
OURS = ("algorithm", "block_cap", "exchange", "workspace_gib", "hidden_sharded", "entropy")


def teacher(rows: int, vocab: int, k: int = 6, tail: str = "drop", seed: int = 5) -> TopK:
    """Log-probabilities of the k likeliest columns."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    return TopK(*logits.log_softmax(-1).topk(k), tail)  # type: ignore[arg-type]


def right(
    logits: Tensor, target: Tensor | TopK, *, loss: str, beta: float = 0.5, logits_scale: float = 1.0,
    temperature: float = 1.0, z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
    vocab_size: int | None = None, row_grad: Tensor | None = None, entropy_grad: Tensor | None = None, **ours: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the loss, the losses of rows and a scalar to differentiate, by float64 logits."""
    x = (logits if softcap is None else softcap * (logits / softcap).tanh())[:, :vocab_size] * logits_scale
    log_p, counts = x.log_softmax(-1), torch.ones(len(x), dtype=torch.bool)
    if isinstance(target, TopK):
        inside = (target.indices >= 0) & (target.indices < x.shape[1])
        counts = inside[:, 0]
        values = target.values.double().masked_fill(~inside, -torch.inf)
        log_top = log_p.gather(1, target.indices.long().clamp(0, x.shape[1] - 1)).masked_fill(~inside, -torch.inf)
        if target.tail == "bucket":
            log_q, log_p = _with_rest(values), _with_rest(log_top)
        else:
            log_q = (values * (logits_scale / temperature)).masked_fill(~counts[:, None], 0.0).log_softmax(-1)
            log_p = log_top if loss != "reverse_kl" else log_top.masked_fill(~counts[:, None], 0.0).log_softmax(-1)
    else:
        log_q = (target[:, :vocab_size].double() * (logits_scale / temperature)).log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    log_p, log_q = log_p.masked_fill(p == 0, -1e3), log_q.masked_fill(q == 0, -1e3)
    if loss == "jsd":
        mixture = (beta * q + (1 - beta) * p).masked_fill((p == 0) & (q == 0), 1.0).log()
        row_loss = (beta * q * (log_q - mixture) + (1 - beta) * p * (log_p - mixture)).sum(-1)
    elif loss == "total_variation":
        row_loss = (p - q).abs().sum(-1) / 2
    else:
        row_loss = {
            "soft_cross_entropy": -(q * log_p), "forward_kl": q * (log_q - log_p), "reverse_kl": p * (log_p - log_q),
        }[loss].sum(-1)  # fmt: skip
    row_loss = (row_loss + z_loss * x.logsumexp(-1).square()).where(counts, 0.0)
    scale = 1 / max(1, int(counts.sum())) if reduction == "mean" else 1.0
    total = (row_loss * (1.0 if row_grad is None else row_grad)).sum() * scale
    if entropy_grad is not None:
        log_p = x.log_softmax(-1)
        total = total + (-(log_p.exp() * log_p).sum(-1) * entropy_grad).where(counts, 0.0).sum()
    return row_loss.detach() if reduction == "none" else row_loss.detach().sum() * scale, row_loss.detach(), total


def _with_rest(log_p: Tensor) -> Tensor:
    rest = (1 - log_p.exp().sum(-1, keepdim=True)).clamp(min=2.0**-24)
    return torch.cat([log_p, rest.log()], -1)


def check(got: tuple[Tensor, ...], logits: Tensor, target: Tensor | TopK, options: dict[str, Any]) -> None:
    """Compare the loss, the losses of rows and the gradient."""
    leaf = logits.detach().double().cpu().requires_grad_()
    target = _moved(target, "cpu")
    *losses, total = right(leaf, target, **{name: _moved(value, "cpu") for name, value in options.items()})
    (grad,) = torch.autograd.grad(total, leaf)
    for value, expected in zip(got[:2], losses, strict=True):
        torch.testing.assert_close(value.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    assert_gradient_near(got[2], grad, logits.dtype, options)


def _moved(value: Any, device: Any) -> Any:
    if isinstance(value, TopK):
        return TopK(value.values.to(device), value.indices.to(device), value.tail)
    return value.to(device) if isinstance(value, Tensor) else value


def _run(logits: Tensor, target: Any, device: Any, **options: Any) -> tuple[Tensor, ...]:
    options = {name: _moved(value, device) for name, value in options.items()}
    result = entropy_loss(logits.to(device), _moved(target, device), **options)
    assert result.grad is not None
    return result.loss, result.row_loss, result.grad


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scales": {"logits_scale": 1.3, "z_loss": 1e-2, "reduction": "sum"},
    "padding": {"vocab_size": 70, "softcap": 5.0, "reduction": "none"},
    "upstream": {"row_grad": torch.linspace(-1, 2, 9), "entropy_grad": torch.linspace(1, -2, 9), "entropy": True},
}


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_top_k(loss: str, case: str, device: torch.device, algorithm: dict[str, Any]) -> None:
    for tail, dtype, block_cap in itertools.product(TAILS, DTYPES if case == "plain" else DTYPES[:1], (32, "auto")):
        logits, _ = make("cross_entropy", dtype=dtype)
        target = teacher(9, 100, tail=tail)
        target.indices[3] = -100  # does not count
        target.indices[4, 3:] = 100  # fewer columns
        options = {"loss": loss, "block_cap": block_cap, **OPTIONS[case], **algorithm}
        if tail == "drop":
            options["temperature"] = 0.7
        check(_run(logits, target, device, **options), logits, target, options)


@needs_cuda
@pytest.mark.parametrize("vocab", [100352, 151936])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_top_k_of_long_rows(loss: str, vocab: int) -> None:
    """Rows that programs share. One has columns of -inf, and one does not count."""
    logits, _ = make("cross_entropy", rows=100, vocab=vocab, dtype=torch.bfloat16)
    logits[1, 8:50000] = -torch.inf
    target = teacher(100, vocab, k=64, tail="bucket")
    target.indices[1], target.indices[2, 0] = torch.arange(60000, 60064), -100
    check(_run(logits, target, "cuda", loss=loss), logits, target, {"loss": loss})


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("loss", LOSSES)
def test_edges_of_a_top_k(loss: str, tail: str, device: torch.device, algorithm: dict[str, Any]) -> None:
    """Far offsets, columns of -inf, all columns, likely and unlikely ones; accumulation and overwriting."""
    logits = far_away(make("cross_entropy")[0], 1e4)
    logits[0, 50:] = logits[1, :30] = -torch.inf
    target = teacher(9, 100, tail=tail)
    target.indices[:2] = torch.arange(30, 36)
    target.indices[1, 0] = 90
    target.values[2, 4] = -torch.inf
    if loss != "reverse_kl":
        target.indices[1] = torch.arange(30, 36)
        logits[2, target.indices[2]] += 60.0 if tail == "drop" else 3.0
    logits[3, target.indices[3]] -= 200.0
    options = {"loss": loss, "block_cap": 32, **algorithm}
    if loss == "reverse_kl":
        target.values[2, 4] = -9.0
    finite, rest = (0, 1, 2, 4, 5, 6, 7, 8), (3,)
    for rows in (finite, rest):
        own, values = logits[list(rows)], TopK(target.values[list(rows)], target.indices[list(rows)], target.tail)
        check(_run(own, values, device, **options), own, values, options)
    grad = _run(logits, target, device, **options)[2]
    total = torch.ones(9, 100, device=device)
    _run(logits, target, device, grad=total, **options)
    torch.testing.assert_close(total, grad + 1)
    torch.testing.assert_close(_run(logits.clone(), target, device, grad="in_place", **options)[2], grad)
    every = TopK(*make("cross_entropy", seed=9)[0].log_softmax(-1).topk(100))
    dense = torch.empty(9, 100).scatter_(1, every.indices, every.values)
    if tail == "drop" and loss != "reverse_kl":
        logits = logits.nan_to_num(neginf=9e3)
        for got, expected in zip(
            _run(logits, every, device, **options), _run(logits, dense, device, **options), strict=True
        ):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("loss", [*({**JSD, "beta": beta} for beta in (0.1, 0.5, 0.9)), TOTAL_VARIATION], ids=str)
def test_losses_that_compare_softmaxes(loss: dict[str, Any], case: str, device: torch.device) -> None:
    for dtype in DTYPES if case == "plain" else DTYPES[:1]:
        logits, target = make("jsd", dtype=dtype, vocab=104)  # whole vectors of 16 bytes
        options = {**loss, "temperature": 0.7, **OPTIONS[case]}
        check(_run(logits, target, device, **options), logits, target, options)


@pytest.mark.parametrize("options", [JSD, TOTAL_VARIATION], ids=str)
def test_edges_of_losses_that_compare_softmaxes(options: dict[str, Any], device: torch.device) -> None:
    """The loss is finite where p or q is 0, as in whole tiles, and equal distributions have no gradient."""
    logits, target = (far_away(values, 1e4) for values in make("jsd"))
    logits[:4, 20:70] = target[2:6, 40:80] = -torch.inf
    check(_run(logits, target, device, **options), logits, target, options)
    loss, _, grad = _run(logits, logits.clone(), device, **options)
    assert loss.abs() < 1e-6 and grad.abs().max() < 1e-7
    assert _run(logits[:0], target[:0], device, **options)[0] == 0


def _cases(world_size: int) -> list[tuple[Tensor, Any, dict[str, Any]]]:
    cases: list[tuple[Tensor, Any, dict[str, Any]]] = []
    for dtype in DTYPES[::2] if world_size == 2 else DTYPES[:1]:
        logits, target = make("jsd", dtype=dtype, vocab=101)
        cases += [(logits, target, {**loss, "block_cap": 16}) for loss in ({**JSD, "beta": 0.3}, TOTAL_VARIATION)]
        for loss, tail in itertools.product(LOSSES, TAILS):
            options: dict[str, Any] = {"loss": loss, "block_cap": 16, "z_loss": 1e-2, "exchange": "nccl"}
            cases.append((logits, teacher(9, 101, tail=tail), options))
    return cases


def _on_rank(rank: Rank, cases: list[Any]) -> list[tuple[Tensor, ...]]:
    results = []
    for logits, target, options in cases:
        own = columns_of(rank, logits.shape[1])
        of_rank = target if isinstance(target, TopK) else target[:, own]
        results.append(_run(logits[:, own], of_rank, rank.device, group=rank.group, **options))
    return results


@pytest.mark.parametrize("world_size", sorted({ranks_here(2), ranks_here(3)}))
def test_over_ranks(world_size: int) -> None:
    cases = _cases(world_size)
    by_case = zip(*on_ranks(world_size, _on_rank, cases), strict=True)
    for (logits, target, options), shards in zip(cases, by_case, strict=True):
        for number in range(2):
            assert all(torch.equal(shard[number], shards[0][number]) for shard in shards), options
        check((*shards[0][:2], torch.cat([shard[2] for shard in shards], 1)), logits, target, options)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_linear_losses_and_modules(dtype: torch.dtype, device: torch.device) -> None:
    """Chunks of rows, with gradients made in forward and in backward."""
    hidden, weight, dense = make_linear("jsd", rows=12, dtype=dtype)
    targets: list[tuple[Any, dict[str, Any]]] = [
        (dense, loss) for loss in ({"loss": "jsd", "beta": 0.3}, {"loss": "total_variation"})
    ]
    targets += [(teacher(12, 100, tail=tail), {"loss": loss}) for loss, tail in itertools.product(LOSSES, TAILS)]
    for (target, options), reduction in itertools.product(targets, ("mean", "none")):
        leaves = [values.double().requires_grad_() for values in (hidden, weight)]
        logits = leaves[0] @ leaves[1].t()
        rounding = logits.detach().to(dtype).double() - logits.detach()
        loss, row_loss, total = right(logits + rounding, target, reduction=reduction, **options)
        of_logits, *grads = torch.autograd.grad(total, [logits, *leaves])
        settings = {**options, "reduction": reduction, "workspace_gib": 5 * 100 * dtype.itemsize / 2**30}
        own = [values.to(device).requires_grad_() for values in (hidden, weight)]
        got = LinearEntropyLoss(**settings)(*own, _moved(target, device))
        torch.testing.assert_close(got.double().cpu(), loss, rtol=1e-4, atol=1e-4)
        for gradient, expected in zip(torch.autograd.grad(got.sum(), own), grads, strict=True):
            assert_near(gradient, expected, dtype, options)
        with torch.no_grad():
            result = linear_entropy_loss(own[0], own[1], _moved(target, device), grad=False, **settings)
        torch.testing.assert_close(result.row_loss.double().cpu(), row_loss, rtol=1e-4, atol=1e-4)
        leaf = (logits + rounding).detach().to(device, dtype).requires_grad_()
        EntropyLoss(reduction=reduction, **options)(leaf, _moved(target, device)).sum().backward()
        assert leaf.grad is not None
        assert_near(leaf.grad, of_logits, dtype, options)
