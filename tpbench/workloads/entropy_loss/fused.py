"""triton_tp: this project's fused kernels."""

from __future__ import annotations

from tpbench.kernels import block_for, bytes_exchanged, entropy_loss
from tpbench.workloads.entropy_loss import EntropyLoss
from tpbench.workloads.entropy_loss.inputs import IGNORED, Shard
from tpbench.workloads.entropy_loss.output import Output, Step


def prepare(problem: EntropyLoss, shard: Shard) -> Step:
    """A call of `tpbench.kernels.entropy_loss`, the gradient into new memory."""

    def run() -> Output:
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
            exchange=problem.exchange,
        )
        assert result.grad is not None
        return Output(result.loss, result.row_loss, result.grad)

    return Step(
        run,
        bytes_communicated=bytes_exchanged(shard.tokens, shard.tp_size, problem.loss),
        block_used=block_for(shard.logits.shape[1], problem.block_cap, problem.loss),
    )
