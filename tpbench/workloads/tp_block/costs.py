"""What one step of the block costs by count, on one rank. Without torch."""

from __future__ import annotations

from tpbench.workloads.tp_block.problem import TpBlock


def flops(problem: TpBlock, size: int) -> int:
    """Two products in the backward pass for each in the forward; causal attention is half of the square, and what its
    backward pass computes again is not counted."""
    weights = sum(rows * columns for rows, columns in (each.local_shape(size) for each in problem.linears))
    attention = 0
    if problem.part == "block":
        attention = 2 * 2 * problem.tokens**2 * problem.head_dim * problem.heads // size // 2
    return 3 * (2 * problem.tokens * weights + attention)


def bytes_moved(problem: TpBlock, size: int, item: int) -> int:
    """Input, weights and the output's gradient read once; output and the other gradients written once."""
    weights = sum(rows * columns for rows, columns in (each.local_shape(size) for each in problem.linears))
    weights += problem.hidden * len(problem.norms)
    first, last = problem.linears[0], problem.linears[-1]
    ends = problem.tokens * (first.in_features + sum(last.out_features)) // size
    return 2 * item * (weights + ends)


def bytes_sent(problem: TpBlock, size: int, item: int, *, least: bool = False) -> int:
    """Bytes that a rank hands over for its peers: a gather or scatter of a (tokens, hidden) matrix the share that is
    not its own, for each linear one in the forward and one in the backward pass, and one more for each column-parallel
    linear that gathers its input again (`least`: not counted); an all-reduce of norms' gradients twice their share."""
    columns = sum(each.kind == "column" for each in problem.linears)
    again = 0 if problem.save_gathered or least else columns
    matrices = (2 * len(problem.linears) + again) * problem.tokens
    return (matrices + 2 * len(problem.norms)) * problem.hidden * item * (size - 1) // size
