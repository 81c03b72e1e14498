"""The three variants of the entropy loss that this project is about."""

from __future__ import annotations

from typing import Any

from tpbench.workloads.entropy_loss.problem import WORKLOAD, EntropyLoss


def _ours(problem: EntropyLoss, tp_size: int) -> str | None:
    """What a kernel cannot be organised for, whatever the machine."""
    if tp_size > 1 and problem.organisation == "fused":
        return "organisation=fused makes loss and gradient in one launch: over ranks the exchange lies between them"
    needed = {"cached": "nccl", "one_pass": "symmetric"}.get(problem.organisation, problem.exchange)
    if tp_size > 1 and problem.exchange not in ("auto", needed):
        return f"organisation={problem.organisation} over ranks is exchange={needed}, got exchange={problem.exchange}"
    return None


@WORKLOAD.variant(
    "our fused Triton kernels on the local shard; one exchange of a few scalars a row",
    options={"block_cap", "exchange", "organisation"},
    requires=("triton",),
    uses_triton=True,
    requires_cuda=lambda problem: problem.organisation == "one_pass" or problem.exchange == "symmetric",
    unsupported_reason=_ours,
)
def triton_tp(problem: EntropyLoss, shard: Any) -> Any:
    from tpbench.workloads.entropy_loss import fused

    return fused.prepare(problem, shard)


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
