"""The three variants of the entropy loss that this project is about."""

from __future__ import annotations

from typing import Any

from tpbench.workloads.entropy_loss.problem import WORKLOAD, EntropyLoss


@WORKLOAD.variant(
    "our fused Triton kernels on the local shard; one exchange of a few scalars a row",
    takes={"block_cap", "exchange"},
    needs=("triton",),
    uses_triton=True,
)
def triton_tp(problem: EntropyLoss, shard: Any) -> Any:
    from tpbench.workloads.entropy_loss import fused

    return fused.prepare(problem, shard)


@WORKLOAD.variant("the same algorithm in torch operations (compile=true: torch.compile)", takes={"compile"})
def pytorch_tp_manual(problem: EntropyLoss, shard: Any) -> Any:
    from tpbench.workloads.entropy_loss import manual

    return manual.prepare(problem, shard)


@WORKLOAD.variant("all-gather the logits to the whole vocabulary, then torch's own loss", takes={"compute_dtype"})
def pytorch_gather(problem: EntropyLoss, shard: Any) -> Any:
    from tpbench.workloads.entropy_loss import gather

    return gather.prepare(problem, shard)
