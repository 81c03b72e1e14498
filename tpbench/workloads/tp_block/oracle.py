"""The float64 oracle of a block, and the comparison of a result with it.

Nothing is sampled. Each rank computes its heads and its columns of the MLP on the whole sequence in float64, with
torch's autograd, the plain formulas, and two all-reduces for each of attention and MLP. This is tensor parallelism
without a sharded sequence: no gather, scatter, chunk or order that the variants have.

At the largest sizes this takes some seconds. Attention runs one head at a time, so that the memory is of the order of
float64 weights and activations.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tpbench.comm.collectives import exchanged, gather_objects
from tpbench.comm.parallel_linears import sum_over_ranks, with_summed_gradient
from tpbench.measure.session import Verdict
from tpbench.workloads.differences import Compared, Comparison
from tpbench.workloads.hashing import CHUNK
from tpbench.workloads.tp_block.execution.layers import rotary_angles
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.problem import TOLERANCE

EPS = 1e-5
"""Epsilon of the RMSNorms."""


@dataclass(frozen=True)
class BlockResult:
    """The result of one forward and backward pass on a rank. Tensors are sharded as between layers."""

    output: Tensor
    grad_input: Tensor
    grads: dict[str, Tensor]
    """The gradient of this rank's part of each weight, by name."""

    def named(self) -> dict[str, Tensor]:
        """Return all tensors with names for messages."""
        grads = {"input": self.grad_input, **self.grads}
        return {"output": self.output, **{f"the gradient of {name}": grad for name, grad in grads.items()}}


def expected_result(inputs: BlockInputs) -> BlockResult:
    """Return the right result of this rank, in float64. Collective over the tp group."""
    problem, rank, size = inputs.problem, inputs.rank, inputs.size
    weights = {name: part.to(torch.float64, copy=True).requires_grad_() for name, part in inputs.weights.items()}
    over_rows = problem.linears[0].kind == "column"
    # Rank 0 of 1 has the whole sequence.
    x = (inputs.x(0, 1) if over_rows else inputs.x(rank, size)).double().requires_grad_()
    y = forward_pass(inputs, weights, x)
    over_rows_out = problem.linears[-1].kind == "row"
    y.backward((inputs.grad(0, 1) if over_rows_out else inputs.grad(rank, size)).double())
    assert x.grad is not None
    return BlockResult(
        output=y.detach().chunk(size)[rank] if over_rows_out else y.detach(),
        grad_input=x.grad.chunk(size)[rank] if over_rows else x.grad,
        grads={name: part.grad for name, part in weights.items() if part.grad is not None},
    )


def own_part(whole: BlockResult, inputs: BlockInputs) -> BlockResult:
    """Return this rank's part of a result that is whole on every rank."""

    def shard(tensor: Tensor, over_rows: bool) -> Tensor:
        return tensor.chunk(inputs.size, dim=0 if over_rows else 1)[inputs.rank]

    linears = {linear.name: linear for linear in inputs.problem.linears}
    return BlockResult(
        output=shard(whole.output, inputs.problem.linears[-1].kind == "row"),
        grad_input=shard(whole.grad_input, inputs.problem.linears[0].kind == "column"),
        grads={
            name: linears[name].shard(grad, inputs.rank, inputs.size) if name in linears else grad
            for name, grad in whole.grads.items()
        },
    )


def forward_pass(inputs: BlockInputs, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the output of the whole x (tokens, hidden), or of a rank's columns of it for part=row. Collective."""
    problem, group = inputs.problem, inputs.group

    def column(x: Tensor, name: str) -> Tensor:
        return with_summed_gradient(x, group) @ weights[name].t()

    def row(x: Tensor, name: str) -> Tensor:
        # The backward pass of a sum of partial products is the identity.
        return exchanged(x @ weights[name].t(), group, sum_over_ranks, lambda gradient, _: gradient)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weights[name]

    def mlp(x: Tensor) -> Tensor:
        gate, up = column(x, "up").chunk(2, dim=-1)
        return row(gate * torch.sigmoid(gate) * up, "down")

    def attention(x: Tensor) -> Tensor:
        heads, kv_heads = problem.heads // inputs.size, problem.kv_heads // inputs.size
        columns = column(x, "qkv").split(problem.head_dim, dim=-1)
        rotated = [_rotated(head) if problem.rotary else head for head in columns[: heads + kv_heads]]
        outputs = []
        for head in range(heads):
            key = heads + head // (heads // kv_heads)
            # The (rows, rows) matrices of all heads would not fit: the backward pass computes them again.
            outputs.append(checkpoint(_head, rotated[head], rotated[key], columns[key + kv_heads], use_reentrant=False))
        return row(torch.cat(outputs, dim=-1), "out")

    if problem.part == "column":
        return column(x, "up")
    if problem.part == "row":
        return row(x, "down")
    if problem.part == "mlp":
        return mlp(x)
    x = x + attention(norm(x, "attention_norm"))
    return x + mlp(norm(x, "mlp_norm"))


def _rotated(x: Tensor) -> Tensor:
    """The rotary embedding of one head (rows, head_dim), by products of complex numbers."""
    points = torch.complex(*x.chunk(2, dim=-1))
    angles = rotary_angles(len(x), x.shape[1], x.device)
    rotated = points * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((rotated.real, rotated.imag), dim=-1)


def _head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one head. q, k, v and the result: (rows, head_dim)."""
    later = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu_(1)
    scores = (q @ k.t() / math.sqrt(q.shape[1])).masked_fill(later, -math.inf)
    return functional.softmax(scores, dim=-1) @ v


def compare(inputs: BlockInputs, result: BlockResult) -> Verdict:
    """Compare a result with the oracle's. Collective over the tp group, with the same verdict on every rank.

    An error of a tensor is that of its rows (`Comparison.matrix`). What is lost in a row's norm is judged without a
    column (`judge_parts`). The loss is compared, too. The norm of all gradients is right if their rows are.
    """
    expected, dtype = expected_result(inputs), inputs.problem.dtype
    upstream = inputs.grad(inputs.rank, inputs.size).double()
    losses = [_loss(each.output, upstream) for each in (result, expected)]
    sums = torch.tensor([*losses, squared_norm(result.grads, inputs)], dtype=torch.float64)
    dist.all_reduce(sums, group=inputs.group)
    loss, expected_loss, square = sums.tolist()
    right, got = expected.named(), result.named()
    outputs = {
        name: Compared(got.get(name), tuple(tensor.shape), None, "output_error" if name == "output" else "grad_error")
        for name, tensor in right.items()
    }
    limits = dict.fromkeys(("output_error", "grad_error"), TOLERANCE[dtype])
    comparison = Comparison(outputs, limits, partial(gather_objects, group=inputs.group), inputs.device, dtype)
    for name in comparison.got:
        comparison.matrix(name, right[name], 0.0)
        judge_parts(comparison, name, right[name], TOLERANCE[dtype], inputs.problem.tokens)
    verdict = comparison.verdict()
    loss_error = abs(loss - expected_loss) / max(1.0, abs(expected_loss))
    loss_error = math.inf if math.isnan(loss_error) else loss_error
    columns = {"loss_value": loss, "loss_error": loss_error, "grad_norm": math.sqrt(square)}
    return Verdict({**columns, **verdict.columns}, verdict.wrong or complaint({"loss_error": loss_error}, dtype))


TILE = 64
"""Rows or columns of a tile. No head of a usual model is narrower."""


def judge_parts(comparison: Comparison, name: str, right: Tensor, tolerance: float, tokens: int) -> None:
    """Judge the elements, columns and tiles of a tensor, and this rank's whole part of it. A vector is one row.

    The error of a column, relative to its norm, has the tolerance of a row. An element may be wrong by twice the
    tolerance, relative to the root mean square of its row plus its own size: roundings err by about a tenth of that.

    The gain <got, right> / <right, right> of a part shows a wrong scale. Rounding errors hardly depend on the sign of
    the right elements and average out in it. So the gain of a row or column may differ from 1 by half the tolerance,
    and that of a tile or of all elements by an eighth.

    With fewer than 16 tokens a weight's gradient is a sum of few terms, in which rounding errors average out less. All
    limits are then up to twice as large.
    """
    tolerance *= max(1.0, min(2.0, 4 / math.sqrt(tokens)))
    got, right = (matrix.reshape(-1, matrix.shape[-1]) for matrix in (comparison.got[name], right))
    rows, columns = right.shape
    usual = right.square().mean()
    of_columns = right.new_zeros(3, columns)
    of_tiles = []
    step = max(1, CHUNK[right.device.type] // (columns * TILE)) * TILE
    for first in range(0, rows, step):
        right_part = right[first : first + step]
        got_part = got[first : first + step].double()
        error = got_part - right_part
        sums = torch.stack((error * right_part, right_part.square(), error.square()))
        of_rows = sums.sum(2)
        mean_square = (of_rows[1] / columns).clamp_(min=usual)
        size = mean_square.sqrt()[:, None] + right_part.abs()
        comparison.bounds(name, right_part, 2 * tolerance * size, got=got_part, first_row=first)
        comparison.gains(name, "row", of_rows, columns * usual, tolerance / 2, first=first)
        of_columns += sums.sum(1)
        of_tiles.append(_tile_sums(of_rows))
    if rows > 1:
        relative = (of_columns[2] / of_columns[1].clamp(min=rows * usual)).sqrt()
        comparison.groups(name, "column", relative, tolerance)
        comparison.gains(name, "column", of_columns, rows * usual, tolerance / 2)
    average = max(0.125, min(TILE, right.numel()) ** -0.5) * tolerance
    row_tile, column_tile = min(rows, TILE) * columns * usual, min(columns, TILE) * rows * usual
    comparison.gains(name, f"tile (of {TILE} rows)", torch.cat(of_tiles, dim=1), row_tile, average)
    comparison.gains(name, f"tile (of {TILE} columns)", _tile_sums(of_columns), column_tile, average)
    comparison.gains(name, "this rank's part", of_columns.sum(1), right.numel() * usual, average)


def _tile_sums(sums: Tensor) -> Tensor:
    """Return sums over groups of `TILE` columns, the last of which may be smaller."""
    return torch.stack([tile.sum(1) for tile in sums.split(TILE, dim=1)], dim=1)


def complaint(errors: Mapping[str, float], dtype: str) -> str | None:
    """Return why a result with these errors is wrong, or None."""
    limit = TOLERANCE[dtype]
    wrong = [f"{name} {value:.3g} is above {limit:.3g}" for name, value in errors.items() if not value <= limit]
    return f"{' and '.join(wrong)} ({dtype})" if wrong else None


def _loss(output: Tensor, upstream: Tensor) -> float:
    return float((output.double() * upstream).sum()) if output.shape == upstream.shape else math.nan


def squared_norm(grads: Mapping[str, Tensor], inputs: BlockInputs) -> float:
    """Return this rank's part of a block's squared gradient norm. Weights of norms are whole, and count on rank 0."""
    counted = [grad for name, grad in grads.items() if name not in inputs.problem.norms or inputs.rank == 0]
    return math.fsum(float(grad.double().square().sum()) for grad in counted)


def expected_trajectory(inputs: BlockInputs, steps: int) -> Tensor:
    """Train in float64. Return the loss and gradient norm of each step, (2, steps), equal on every rank. Collective.

    After each step the weights are rounded to the dtype in which a variant stores them.
    """
    problem = inputs.problem
    layers = [
        {name: part.double().requires_grad_() for name, part in parts.items()}
        for parts in (inputs.weights_of(inputs.rank, inputs.size, layer) for layer in range(problem.layers))
    ]
    x, target = inputs.x(0, 1).double(), inputs.target(0, 1).double()
    weights = [weight for layer in layers for weight in layer.values()]
    optimizer = torch.optim.AdamW(weights, problem.learning_rate, foreach=False)
    losses, grad_norms = [], []
    for _ in range(steps):
        y = x
        for layer in layers:
            y = forward_pass(inputs, layer, y)
        loss = (y - target).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        grads = ({name: part.grad for name, part in layer.items() if part.grad is not None} for layer in layers)
        square = torch.tensor(math.fsum(squared_norm(of_layer, inputs) for of_layer in grads), dtype=torch.float64)
        dist.all_reduce(square, group=inputs.group)
        grad_norms.append(math.sqrt(square))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for weight in weights:
                weight.copy_(weight.to(inputs.dtype))
    return torch.tensor([losses, grad_norms], dtype=torch.float64)
