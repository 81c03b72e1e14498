"""The head's product and the entropy losses in float64 by torch's autograd: what the linear loss is tested against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.kernel_reference import TOLERANCE, reference


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
    entropy_grad: Tensor | None = None, **options: Any,
) -> LinearReference:  # fmt: skip
    """Compute with `linear_entropy_loss`'s parameters. Logits are rounded to the dtype, as products round them."""
    leaves = [each.detach().double().cpu().requires_grad_() for each in (hidden, weight, bias) if each is not None]
    logits = leaves[0] @ leaves[1].t() + (0 if bias is None else leaves[2])
    rounding = (logits.detach().to(hidden.dtype).double() - logits.detach()).nan_to_num(nan=0.0)
    x = _capped(logits + rounding, softcap)
    if isinstance(target, tuple):
        teacher, teacher_weight = (each.detach().double().cpu() for each in target)
        target = _capped((teacher @ teacher_weight.t()).to(hidden.dtype).double(), softcap)
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
