"""The float64 oracle: the whole block again by other means, from the same inputs, and how far a result is from it.

Nothing is sampled. Each rank computes its heads and its columns of the MLP on the whole sequence in float64, with
torch's autograd, the formulas as they stand, and two plain all-reduces a sublayer: tensor parallelism without the
sharded sequence, so without a gather, a scatter, a chunk or an order that the variants have. At the largest sizes that
is some seconds and, with one head's attention at a time, memory of the order of float64 weights and activations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tpbench.workloads.tp_block.inputs import BlockInputs

EPS = 1e-5

TOLERANCE = {"bfloat16": 2.0**-4, "float32": 2.0**-14, "float64": 2.0**-38}
"""Of a row, by norm. In bf16 the dozen tensors between input and output are rounded one after the other, each by up to
2^-9 of itself and more where terms cancel: a row errs by some 2^-7, the worst of many by 2^-6. A lost or doubled
partial sum, chunk or gather is an error of the order of 1. fp32 and fp64 err by some 2^-18 and 2^-46."""


@dataclass(frozen=True)
class BlockResult:
    """What one pass of the block made on a rank, or what it should have."""

    output: Tensor
    grad_input: Tensor
    """Both as sharded between layers."""
    grads: dict[str, Tensor]
    """By each weight, this rank's part."""


@dataclass(frozen=True)
class BlockErrors:
    """How far a result is from the oracle, over all ranks: largest ||row - right|| / ||right||. A NaN makes it inf."""

    output_error: float
    grad_error: float
    """Of the gradients by the input and by every weight."""
    loss_value: float
    """Of the result: <upstream gradient, output>."""
    loss_error: float
    """|loss - right| / max(1, |right|)."""
    grad_norm: float
    """Of the result, over all weights."""
    grad_norm_error: float
    """Relative to the right norm."""
    worst: str
    """Which gradient has the largest error."""

    def complaint(self, dtype: str) -> str | None:
        """Why the result is not right, or None."""
        limit = TOLERANCE[dtype]
        checked = {
            "output_error": self.output_error,
            f"grad_error (of {self.worst})": self.grad_error,
            "loss_error": self.loss_error,
            "the relative error of grad_norm": self.grad_norm_error,
        }
        wrong = [f"{name} {value:.3g} is above {limit:.3g}" for name, value in checked.items() if not value <= limit]
        return f"{' and '.join(wrong)} ({dtype})" if wrong else None


def right(inputs: BlockInputs) -> BlockResult:
    """Collective over the tp group."""
    problem, rank, size = inputs.problem, inputs.rank, inputs.size
    weights = {name: each.to(torch.float64, copy=True).requires_grad_() for name, each in inputs.weights.items()}
    over_rows = problem.linears[0].kind == "column"
    # Rank 0 of 1 has the whole.
    x = (inputs.x(0, 1) if over_rows else inputs.x(rank, size)).double().requires_grad_()
    y = _Forward(inputs, weights).run(x)
    over_rows_out = problem.linears[-1].kind == "row"
    y.backward((inputs.grad(0, 1) if over_rows_out else inputs.grad(rank, size)).double())
    assert x.grad is not None
    return BlockResult(
        output=_own_rows(y.detach(), inputs) if over_rows_out else y.detach(),
        grad_input=_own_rows(x.grad, inputs) if over_rows else x.grad,
        grads={name: each.grad for name, each in weights.items() if each.grad is not None},
    )


def compare(inputs: BlockInputs, got: BlockResult) -> BlockErrors:
    """Collective."""
    expected = right(inputs)
    grad = inputs.grad(inputs.rank, inputs.size).double()
    errors = {"input": row_error(got.grad_input, expected.grad_input)}
    errors |= {name: row_error(got.grads.get(name), each) for name, each in expected.grads.items()}
    norms = inputs.problem.norms
    sums = [_loss(got.output, grad), _loss(expected.output, grad), _squares(got.grads, norms, inputs)]
    sums.append(_squares(expected.grads, norms, inputs))
    added = torch.tensor(sums, dtype=torch.float64)
    dist.all_reduce(added, group=inputs.group)
    found_loss, right_loss, found_square, right_square = added.tolist()
    names = list(errors)
    worst = torch.tensor([row_error(got.output, expected.output), *errors.values()], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=inputs.group)
    output_error, *grad_errors = worst.tolist()
    return BlockErrors(
        output_error=output_error,
        grad_error=max(grad_errors),
        loss_value=found_loss,
        loss_error=_or_inf(abs(found_loss - right_loss) / max(1.0, abs(right_loss))),
        grad_norm=math.sqrt(found_square),
        grad_norm_error=_or_inf(abs(math.sqrt(found_square / right_square) - 1) if right_square else math.nan),
        worst=names[grad_errors.index(max(grad_errors))],
    )


def own_part(whole: BlockResult, inputs: BlockInputs) -> BlockResult:
    """This rank's part of a result that is whole on every rank."""
    first, last = inputs.problem.linears[0], inputs.problem.linears[-1]

    def own(tensor: Tensor, over_rows: bool) -> Tensor:
        return tensor.chunk(inputs.size, dim=0 if over_rows else 1)[inputs.rank]

    linears = {each.name: each for each in inputs.problem.linears}
    return BlockResult(
        output=own(whole.output, last.kind == "row"),
        grad_input=own(whole.grad_input, first.kind == "column"),
        grads={
            name: linears[name].local(each, inputs.rank, inputs.size) if name in linears else each
            for name, each in whole.grads.items()
        },
    )


def row_error(got: Tensor | None, expected: Tensor) -> float:
    """Largest ||row - right|| / ||right||; inf for a NaN, another shape, or nothing."""
    if got is None or got.shape != expected.shape:
        return math.inf
    norm = torch.linalg.vector_norm
    error = norm(got.double() - expected, dim=-1) / norm(expected, dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    return float(error.nan_to_num(nan=math.inf).max())


class _Forward:
    """The forward pass on the whole sequence."""

    def __init__(self, inputs: BlockInputs, weights: dict[str, Tensor]) -> None:
        self.problem, self.group, self.size, self.weights = inputs.problem, inputs.group, inputs.size, weights

    def run(self, x: Tensor) -> Tensor:
        part = self.problem.part
        if part == "column":
            return _Enter.apply(x, self.group) @ self.weights["up"].t()
        if part == "row":
            return _Leave.apply(x @ self.weights["down"].t(), self.group)
        if part == "mlp":
            return self.mlp(x)
        x = x + self.attention(self.norm(x, "attention_norm"))
        return x + self.mlp(self.norm(x, "mlp_norm"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.weights[name]

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = (_Enter.apply(x, self.group) @ self.weights["up"].t()).chunk(2, dim=-1)
        return _Leave.apply((gate * torch.sigmoid(gate) * up) @ self.weights["down"].t(), self.group)

    def attention(self, x: Tensor) -> Tensor:
        problem, size = self.problem, self.size
        heads, kv_heads = problem.heads // size, problem.kv_heads // size
        product = _Enter.apply(x, self.group) @ self.weights["qkv"].t()
        columns = product.split(problem.head_dim, dim=-1)
        made = []
        for head in range(heads):
            key = heads + head // (heads // kv_heads)
            made.append(_Head.apply(columns[head], columns[key], columns[key + kv_heads]))
        return _Leave.apply(torch.cat(made, dim=-1) @ self.weights["out"].t(), self.group)


def _head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one head: each (rows, head_dim)."""
    later = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu_(1)
    scores = (q @ k.t() / math.sqrt(q.shape[1])).masked_fill(later, -math.inf)
    return functional.softmax(scores, dim=-1) @ v


class _Head(torch.autograd.Function):
    """The same, its (rows, rows) matrices made again for the backward pass: those of all heads would not fit."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return _head(q, k, v)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        inputs = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            return torch.autograd.grad(_head(*inputs), inputs, grads[0])


class _Enter(torch.autograd.Function):
    """Where a tensor that is whole on every rank meets a share of the columns: the gradient's parts are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _added(grads[0], ctx.group), None


class _Leave(torch.autograd.Function):
    """Where each rank's part of a sum becomes the sum on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _added(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def _added(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _own_rows(whole: Tensor, inputs: BlockInputs) -> Tensor:
    return whole.chunk(inputs.size)[inputs.rank]


def _loss(output: Tensor, grad: Tensor) -> float:
    return float((output.double() * grad).sum()) if output.shape == grad.shape else math.nan


def _squares(grads: dict[str, Tensor], norms: tuple[str, ...], inputs: BlockInputs) -> float:
    """This rank's part of the gradients' squared norm: norms are whole on every rank and count on the first."""
    counted = [each for name, each in grads.items() if name not in norms or inputs.rank == 0]
    return math.fsum(float(each.double().square().sum()) for each in counted)


def _or_inf(value: float) -> float:
    return math.inf if math.isnan(value) else value
