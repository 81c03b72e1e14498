"""The entropy losses in float64 by torch's autograd, on the whole vocabulary: what the kernels are tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LOSSES = ("cross_entropy", "soft_cross_entropy", "reverse_kl", "forward_kl")
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
    """The loss, the rows' losses and the gradient, float64 on the CPU, with `entropy_loss`'s parameters."""
    leaf = logits.detach().double().cpu().requires_grad_()
    target = target.detach().cpu()
    vocab = leaf.shape[1] if vocab_size is None else vocab_size
    rows = torch.arange(len(leaf))
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
    row_loss = torch.zeros(len(leaf), dtype=torch.float64).index_put((rows,), counted)
    total = row_loss.sum() / (max(1, len(rows)) if reduction == "mean" else 1)
    total.backward()
    assert leaf.grad is not None
    return (row_loss if reduction == "none" else total).detach(), row_loss.detach(), leaf.grad * grad_scale


def assert_right(loss: Tensor, row_loss: Tensor, grad: Tensor, right: tuple[Tensor, Tensor, Tensor]) -> None:
    """Losses within fp32's reach of `right`, and the gradient, row by row, within its dtype's."""
    torch.testing.assert_close(loss.double().cpu(), right[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(row_loss.double().cpu(), right[1], rtol=1e-5, atol=1e-5)
    got = grad.double().cpu()
    # Two differences are no errors: what a subnormal cannot express, and the fp32 rounding of p - 1 for p close to 1.
    slack = torch.finfo(grad.dtype).smallest_normal * torch.finfo(grad.dtype).eps / 2 + 2.0**-23 / max(1, len(grad))
    error = ((got - right[2]).abs() - slack).clamp(min=0).norm(dim=-1)
    assert (error <= TOLERANCE[grad.dtype] * right[2].norm(dim=-1)).all(), error / right[2].norm(dim=-1)
    assert (got[right[2].norm(dim=-1) == 0].abs() <= slack).all()


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


def far_away(values: Tensor, by: float) -> Tensor:
    """Moved by a common offset, after rounding to what a number of that size in fp32 can say too."""
    return (values * 64).round() / 64 + by
