"""The losses in float64 by torch's autograd, on the whole vocabulary: what the kernels are tested against."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.ranks import Rank, enough_gpus, run_on_ranks

LOSSES = ("cross_entropy", "soft_cross_entropy", "reverse_kl", "forward_kl")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ALGORITHMS: dict[str, dict[str, str]] = {
    "two_reads": {"algorithm": "two_reads"}, "two_kernels": {"algorithm": "two_kernels"},
}  # fmt: skip
"""Options of `entropy_loss` on one rank that choose each algorithm."""
if torch.cuda.is_available():
    ALGORITHMS["one_read where it fits"] = {"exchange": "symmetric"}
TOLERANCE = {torch.float32: 2.0**-16, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Relative error of a gradient's row that is allowed, by norm: twice the rounding error of the dtype."""


def reference(
    logits: Tensor, target: Tensor, *, loss: str = "cross_entropy", vocab_size: int | None = None,
    reduction: str = "mean", ignore_index: int = -100, logits_scale: float = 1.0, temperature: float = 1.0,
    label_smoothing: float = 0.0, z_loss: float = 0.0, grad_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss, the rows' losses and the gradient in float64, on the CPU, with the parameters of `entropy_loss`."""
    leaf = logits.detach().double().requires_grad_()
    target = target.detach().to(leaf.device)
    vocab = leaf.shape[1] if vocab_size is None else vocab_size
    rows = torch.arange(len(leaf), device=leaf.device)
    if loss == "cross_entropy":
        rows = rows[(target != ignore_index) & (target >= 0) & (target < vocab)]
    x = leaf[rows, :vocab] * logits_scale
    if loss == "cross_entropy":
        counted = F.cross_entropy(x, target[rows].long(), reduction="none", label_smoothing=label_smoothing)
    else:
        log_p = x.log_softmax(-1)
        log_q = (target[:, :vocab].double() * (logits_scale / temperature)).log_softmax(-1)
        weight = (log_p if loss == "reverse_kl" else log_q).exp()
        # Twice masked: autograd multiplies the zero of the branch not taken by its infinity.
        log_p, log_q = log_p.masked_fill(weight == 0, 0.0), log_q.masked_fill(weight == 0, 0.0)
        value = {"soft_cross_entropy": -log_p, "reverse_kl": log_p - log_q, "forward_kl": log_q - log_p}[loss]
        counted = (weight.masked_fill(weight == 0, 0.0) * value).sum(-1)
    counted = counted + z_loss * x.logsumexp(-1).square()
    row_loss = torch.zeros_like(leaf[:, 0]).index_put((rows,), counted)
    total = row_loss.sum() / (max(1, len(rows)) if reduction == "mean" else 1)
    total.backward()
    assert leaf.grad is not None
    result = row_loss if reduction == "none" else total
    return result.detach().cpu(), row_loss.detach().cpu(), (leaf.grad * grad_scale).cpu()


def assert_right(loss: Tensor, row_loss: Tensor, grad: Tensor, right: tuple[Tensor, Tensor, Tensor]) -> None:
    """Losses within fp32's reach of `right`, and the gradient, row by row, within its dtype's."""
    torch.testing.assert_close(loss.double().cpu(), right[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(row_loss.double().cpu(), right[1], rtol=1e-5, atol=1e-5)
    got = grad.double().cpu()
    # Two differences are allowed: what a subnormal cannot express, and the fp32 rounding of p - 1 for p close to 1.
    slack = torch.finfo(grad.dtype).smallest_normal * torch.finfo(grad.dtype).eps / 2 + 2.0**-23 / max(1, len(grad))
    error = ((got - right[2]).abs() - slack).clamp(min=0).norm(dim=-1)
    assert (error <= TOLERANCE[grad.dtype] * right[2].norm(dim=-1)).all(), error / right[2].norm(dim=-1)
    assert (got[right[2].norm(dim=-1) == 0].abs() <= slack).all()


def assert_gradient_near(got: Tensor, right: Tensor, dtype: torch.dtype, what: Any) -> None:
    """Each row's error is within its dtype's. Terms of a row may cancel: then it is relative to the largest rows."""
    norm, error = right.norm(dim=-1), (got.double().cpu() - right).norm(dim=-1)
    slack = 2.0**-20 * norm.max() + right.shape[1] ** 0.5 * torch.finfo(dtype).smallest_normal
    assert (error <= TOLERANCE[dtype] * norm + slack).all(), (error / norm, what)


def make(
    loss: str, rows: int = 9, vocab: int = 100, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Logits and target."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * 2).to(dtype)
    if loss == "cross_entropy":
        target = torch.randint(vocab, (rows,), generator=generator)
    else:
        target = (torch.randn(rows, vocab, generator=generator) * 2).to(dtype)
    return logits.to(device), target.to(device)


def columns_of(rank: Rank, vocab: int) -> slice:
    """Return the columns of a rank. They are uneven: the first rank holds two more than its share."""
    edges = [0, *(vocab * (each + 1) // rank.world_size + 2 for each in range(rank.world_size - 1)), vocab]
    return slice(edges[rank.rank], edges[rank.rank + 1])


def on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return the results of `function(Rank, *arguments)`. Skip the test if ranks lack GPUs. One rank has no group."""
    if not enough_gpus(world_size):
        pytest.skip(f"needs {world_size} GPUs")
    if world_size == 1:
        return [function(Rank(0, 1, None, DEVICE), *arguments)]  # type: ignore[arg-type]
    return run_on_ranks(world_size, function, *arguments)


def on_device(options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return options whose tensors are on a device."""
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in options.items()}


def far_away(values: Tensor, by: float) -> Tensor:
    """Moved by a common offset, after rounding to what a number of that size in fp32 can say too."""
    return (values * 64).round() / 64 + by


@dataclass(frozen=True)
class LinearReference:
    """Float64 results on the CPU for the whole vocabulary."""

    loss: Tensor
    row_loss: Tensor
    entropy: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor
    grad_bias: Tensor | None


def linear_reference(
    hidden: Tensor, weight: Tensor, target: Any, *, bias: Tensor | None = None, softcap: float | None = None,
    loss: str = "cross_entropy", temperature: float = 1.0, row_grad: Tensor | None = None,
    entropy_grad: Tensor | None = None, logits_dtype: str | None = None, **options: Any,
) -> LinearReference:  # fmt: skip
    """Compute with `linear_entropy_loss`'s parameters. Logits are rounded to the dtype, as products round them."""
    dtype = torch.float32 if logits_dtype else hidden.dtype
    leaves = [each.detach().double().cpu().requires_grad_() for each in (hidden, weight, bias) if each is not None]
    logits = leaves[0] @ leaves[1].t() + (0 if bias is None else leaves[2])
    rounding = (logits.detach().to(dtype).double() - logits.detach()).nan_to_num(nan=0.0)
    x = _capped(logits + rounding, softcap)
    if isinstance(target, tuple):
        teacher, teacher_weight = (each.detach().double().cpu() for each in target)
        target = _capped((teacher @ teacher_weight.t()).to(dtype).double(), softcap)
    vocab = options.get("vocab_size") or x.shape[1]
    scale = options.get("logits_scale", 1.0) / (temperature if loss == "logprob" else 1.0)
    log_p = (x[:, :vocab] * scale).log_softmax(-1)
    counts = torch.ones(len(x), dtype=torch.bool)
    if loss in ("cross_entropy", "logprob"):
        target = target.cpu().long()
        counts = (target != options.get("ignore_index", -100)) & (target >= 0) & (target < vocab)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1).where(counts, torch.tensor(0.0))
    if loss == "logprob":
        reduction = options.get("reduction", "mean")
        label = target.where(counts, torch.tensor(0))[:, None]
        rows = log_p.gather(1, label)[:, 0].where(counts, torch.tensor(0.0).double())
        factor = 1 / max(1, int(counts.sum())) if reduction == "mean" else 1.0
        total, of_rows = rows.sum() * factor, torch.full((len(x),), factor, dtype=torch.float64)
        (of_x,) = _gradient(rows, of_rows if row_grad is None else of_rows * row_grad.double().cpu(), x)
        right = (rows if reduction == "none" else total).detach(), rows.detach(), of_x * options.get("grad_scale", 1.0)
    else:
        right = reference(x.detach(), target, loss=loss, temperature=temperature, **options)
        if row_grad is not None:
            right = right[0], right[1], right[2] * row_grad.double().cpu()[:, None]
    of_x = right[2]
    if entropy_grad is not None:
        of_x = of_x + _gradient(entropy, entropy_grad.double().cpu(), x)[0] * options.get("grad_scale", 1.0)
    grads = torch.autograd.grad(x, leaves, of_x)
    return LinearReference(right[0], right[1], entropy.detach(), *grads[:2], grads[2] if bias is not None else None)


def _gradient(values: Tensor, upstream: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(values, x, upstream, retain_graph=True)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def assert_near(got: Tensor, right: Tensor, dtype: torch.dtype, what: Any = None) -> None:
    """The error by norm is within rounding of the logits' gradient and of the result: four units of the dtype."""
    got, right = got.double().cpu(), right.double()
    assert got.shape == right.shape, (what, got.shape, right.shape)
    assert got.isfinite().all(), what
    slack = torch.finfo(dtype).smallest_normal * right.numel() ** 0.5
    error = (got - right).norm()
    assert error <= 2 * TOLERANCE[dtype] * right.norm() + slack, (what, float(error), float(right.norm()))


def make_linear(
    loss: str = "cross_entropy", rows: int = 9, width: int = 16, vocab: int = 100,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Hidden states, weight and target."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    weight = (torch.randn(vocab, width, generator=generator) * 0.5).to(dtype)
    if loss in ("cross_entropy", "logprob"):
        return hidden, weight, torch.randint(vocab, (rows,), generator=generator)
    return hidden, weight, (torch.randn(rows, vocab, generator=generator) * 2).to(dtype)


@dataclass(frozen=True)
class PolicyReference:
    """The policy loss in float64 on the CPU. The total has a graph."""

    loss: Tensor
    row_loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    clipped: Tensor
    objective: Tensor
    """The value that is differentiated: the total, with the upstream gradients of rows."""


def policy_reference(
    logits: Tensor, target: Tensor, *, old_logprobs: Tensor, advantages: Tensor, clip: tuple[float, float] = (0.2, 0.2),
    ref_logprobs: Tensor | None = None, kl_weight: float = 0.0, entropy_weight: float = 0.0,
    row_weight: Tensor | None = None, vocab_size: int | None = None, reduction: str = "mean", ignore_index: int = -100,
    logits_scale: float = 1.0, temperature: float | Tensor = 1.0, z_loss: float = 0.0, softcap: float | None = None,
    row_grad: Tensor | None = None, entropy_grad: Tensor | None = None,
) -> PolicyReference:  # fmt: skip
    """Compute the policy loss of float64 logits with `entropy_loss`'s parameters, as torch's recipe does."""
    vocab = vocab_size or logits.shape[1]
    counts = (target != ignore_index) & (target >= 0) & (target < vocab)
    if row_weight is not None:
        counts &= row_weight != 0
    of_rows = temperature.double()[counts][:, None] if isinstance(temperature, Tensor) else temperature
    x = _capped(logits[counts, :vocab], softcap) * (logits_scale / of_rows)

    def of_counted(values: Tensor | None) -> Tensor:
        return torch.ones(len(logits)).double()[counts] if values is None else values.double()[counts]

    def in_rows(values: Tensor) -> Tensor:
        return torch.zeros(len(logits), dtype=values.dtype).index_put((counts.nonzero()[:, 0],), values)

    log_p = x.log_softmax(-1)
    logp = log_p.gather(1, target[counts].long()[:, None])[:, 0]
    zero = log_p == -torch.inf
    entropy = -(log_p.masked_fill(zero, 0.0).exp() * log_p.masked_fill(zero, 0.0)).masked_fill(zero, 0.0).sum(-1)
    weight, advantage = of_counted(row_weight), of_counted(advantages)
    ratio = (logp - of_counted(old_logprobs)).exp()
    bounded = ratio.clamp(1 - clip[0], 1 + clip[1])
    loss = -torch.minimum(ratio * advantage, bounded * advantage)
    if kl_weight:
        difference = of_counted(ref_logprobs) - logp
        loss = loss + kl_weight * (difference.exp() - difference - 1)
    loss = loss - entropy_weight * entropy + z_loss * x.logsumexp(-1).square()
    loss = weight * loss
    scale = 1.0
    if reduction == "mean":
        scale = 0.0 if weight.sum() == 0 else 1.0 / weight.sum().item()
    objective = (loss * of_counted(row_grad)).sum() * scale
    if entropy_grad is not None:
        objective = objective + (entropy * of_counted(entropy_grad)).sum()
    row_loss = in_rows(loss)
    total = row_loss if reduction == "none" else row_loss.sum() * scale
    clipped = in_rows(bounded * advantage < ratio * advantage)
    return PolicyReference(
        *(each.detach() for each in (total, row_loss, in_rows(logp), in_rows(entropy), clipped)), objective
    )


def make_policy(rows: int, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """Return log-probabilities, advantages and weights of rows, for loss="policy"."""
    generator = torch.Generator().manual_seed(seed)
    old, ref, advantages, weight = torch.randn(4, rows, generator=generator)
    return {
        "loss": "policy", "old_logprobs": old - 6, "advantages": advantages, "ref_logprobs": ref - 6,
        "row_weight": weight.abs() * (weight > -1), "kl_weight": 0.1, **changes,
    }  # fmt: skip
