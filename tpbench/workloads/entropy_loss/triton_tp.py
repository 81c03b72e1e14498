"""triton_tp: the kernels of this project."""

from __future__ import annotations

from typing import Any

from tpbench.kernels import How, entropy_loss
from tpbench.kernels.cached_launch import worst_resources
from tpbench.workloads.entropy_loss.inputs import Output, Shard, Step
from tpbench.workloads.entropy_loss.problem import EntropyLoss
from tpbench.workloads.losses.inputs import policy_options
from tpbench.workloads.sizes import IGNORED


def prepare(problem: EntropyLoss, shard: Shard) -> Step:
    """Prepare a call of `tpbench.kernels.entropy_loss` that writes the gradient into new memory."""
    last: How | None = None
    exchange: Any = problem.exchange  # never all_reduce, which the variant doesn't support

    policy: Any = policy_options(problem, shard.rows)

    def run() -> Output:
        nonlocal last
        result = entropy_loss(
            shard.logits,
            shard.target,
            loss=problem.loss,
            group=shard.group,
            vocab_start=shard.vocab_start,
            vocab_size=shard.vocab_size,
            ignore_index=IGNORED,
            logits_scale=problem.logits_scale,
            temperature=problem.temperature,
            block_cap=problem.block_cap,
            exchange=exchange,
            algorithm=problem.algorithm,
            **policy,
        )
        assert result.grad is not None
        last = result.how
        return Output(result.loss, result.row_loss, result.grad)

    def columns() -> dict[str, Any]:
        if last is None:
            return {}
        used = {"algorithm_used": last.algorithm, "block_used": last.block}
        return used | worst_resources(last.kernels, shard.device)

    return Step(
        run,
        bytes_communicated=lambda: 0 if last is None else last.bytes_sent,
        columns=columns,
        communicates_in_kernels=lambda: last is not None and last.algorithm == "one_read",
    )
