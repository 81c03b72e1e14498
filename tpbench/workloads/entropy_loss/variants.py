"""The three variants of the entropy loss that this project is about."""

from __future__ import annotations

from typing import Any

from tpbench.workloads.entropy_loss.problem import WORKLOAD, EntropyLoss


def _no_such_exchange(problem: EntropyLoss, tp_size: int) -> str | None:
    """Return why the kernels' algorithm cannot use the exchange over these ranks, or None if it can."""
    if tp_size > 1 and problem.algorithm == "two_reads":
        return "algorithm=two_reads makes loss and gradient in one kernel: over ranks the exchange lies between them"
    exchange = {"two_kernels": "nccl", "one_read": "symmetric"}.get(problem.algorithm, problem.exchange)
    if tp_size > 1 and problem.exchange not in ("auto", exchange):
        return f"algorithm={problem.algorithm} over ranks is exchange={exchange}, got exchange={problem.exchange}"
    return None


@WORKLOAD.variant(
    "our fused Triton kernels on the local shard; one exchange of a few scalars a row",
    options={"block_cap", "exchange", "algorithm"},
    requires=("triton",),
    uses_triton=True,
    requires_cuda=lambda problem: problem.algorithm == "one_read" or problem.exchange == "symmetric",
    unsupported_reason=_no_such_exchange,
)
def triton_tp(problem: EntropyLoss, shard: Any) -> Any:
    from tpbench.workloads.entropy_loss import triton_tp as implementation

    return implementation.prepare(problem, shard)


@WORKLOAD.variant("the same algorithm in torch operations (compile=true: torch.compile)", options={"compile"})
def pytorch_tp_manual(problem: EntropyLoss, shard: Any) -> Any:
    from tpbench.workloads.entropy_loss import manual

    return manual.prepare(problem, shard)


@WORKLOAD.variant(
    "all-gather the logits to the whole vocabulary, then torch's own loss (compile=true: torch.compile)",
    options={"compute_dtype", "compile"},
)
def pytorch_gather(problem: EntropyLoss, shard: Any) -> Any:
    from tpbench.workloads.entropy_loss import gather

    return gather.prepare(problem, shard)
