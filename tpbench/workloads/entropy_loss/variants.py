"""The variants of the entropy loss: the three that this project is about, then those of other projects.

Each other project is called through its public interface. All are cross-entropies from labels, without a logits scale.
A variant is skipped if its package is not installed.
"""

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
    from tpbench.workloads.entropy_loss import in_torch

    return in_torch.prepare_manual(problem, shard)


@WORKLOAD.variant(
    "all-gather the logits to the whole vocabulary, then torch's own loss (compile=true: torch.compile)",
    options={"compute_dtype", "compile"},
)
def pytorch_gather(problem: EntropyLoss, shard: Any) -> Any:
    from tpbench.workloads.entropy_loss import in_torch

    return in_torch.prepare_gather(problem, shard)


def _no_other_loss(problem: EntropyLoss) -> str | None:
    return f"it has no {problem.loss}, only cross_entropy" if problem.loss != "cross_entropy" else None


def _labels_only(problem: EntropyLoss, tp_size: int) -> str | None:
    if reason := _no_other_loss(problem):
        return reason
    if problem.ignored == 1.0:
        return "it divides by zero where every row is ignored"
    return "it has no logits_scale" if problem.logits_scale != 1.0 else None


def _uneven(problem: EntropyLoss, tp_size: int) -> str | None:
    return (
        f"it needs a vocab that tp_size divides, got {problem.vocab} and {tp_size}" if problem.vocab % tp_size else None
    )


def _sharded_evenly(problem: EntropyLoss, tp_size: int) -> str | None:
    return "unsharded it is pytorch_gather" if tp_size == 1 else _even_shards(problem, tp_size)


def _even_shards(problem: EntropyLoss, tp_size: int) -> str | None:
    return _uneven(problem, tp_size) or _labels_only(problem, tp_size)


def _transformer_engine(problem: EntropyLoss, tp_size: int) -> str | None:
    if problem.dtype == "float16":
        return "it takes bfloat16 and float32 only"
    return _even_shards(problem, tp_size)


def _torchtitan(problem: EntropyLoss, tp_size: int) -> str | None:
    if tp_size == 1:
        return "unsharded it is F.cross_entropy"
    if problem.vocab % tp_size not in (0, tp_size - 1):
        return f"it needs a vocab whose shards differ only on the last rank, got {problem.vocab} and {tp_size}"
    return _labels_only(problem, tp_size)


@WORKLOAD.variant(
    "torch's own: F.cross_entropy of a sharded DTensor under loss_parallel()",
    options={"compute_dtype"},
    unsupported_reason=_sharded_evenly,
)
def torch_loss_parallel(problem: EntropyLoss, shard: Any) -> Any:
    from tpbench.workloads.entropy_loss import adapters

    return adapters.torch_loss_parallel(problem, shard)


@WORKLOAD.variant(
    "QuACK's CuTe kernel: forward and gradient (of the sum) in one launch",
    requires=("quack",),
    requires_cuda=True,
    unsupported_reason=lambda problem, tp_size: "it is for one GPU" if tp_size > 1 else _labels_only(problem, tp_size),
)
def quack(problem: EntropyLoss, shard: Any) -> Any:
    from tpbench.workloads.entropy_loss import adapters

    return adapters.quack(problem, shard)


@WORKLOAD.variant(
    "Megatron-LM's vocab_parallel_cross_entropy, in torch operations and fp32",
    requires=("megatron",),
    unsupported_reason=lambda problem, tp_size: (
        "it needs a group of ranks" if tp_size == 1 else _even_shards(problem, tp_size)
    ),
)
def megatron(problem: EntropyLoss, shard: Any) -> Any:
    from tpbench.workloads.entropy_loss import adapters

    return adapters.megatron(problem, shard)


@WORKLOAD.variant(
    "Liger's Triton kernel; the gradient takes the logits' memory (tp 1) or fp32 memory (tp > 1)",
    options={"compute_dtype"},
    requires=("liger_kernel",),
    requires_cuda=True,
    unsupported_reason=_even_shards,
)
def liger(problem: EntropyLoss, shard: Any) -> Any:
    from tpbench.workloads.entropy_loss import adapters

    return adapters.liger(problem, shard)


@WORKLOAD.variant(
    "flash-attention's Triton kernel, which shards the vocabulary",
    requires=("flash_attn",),
    requires_cuda=True,
    unsupported_reason=lambda problem, tp_size: _uneven(problem, tp_size) or _no_other_loss(problem),
)
def flash_attn(problem: EntropyLoss, shard: Any) -> Any:
    from tpbench.workloads.entropy_loss import adapters

    return adapters.flash_attn(problem, shard)


@WORKLOAD.variant(
    "Transformer Engine's Triton kernel, which shards the vocabulary",
    requires=("transformer_engine",),
    requires_cuda=True,
    unsupported_reason=_transformer_engine,
)
def transformer_engine(problem: EntropyLoss, shard: Any) -> Any:
    from tpbench.workloads.entropy_loss import adapters

    return adapters.transformer_engine(problem, shard)


@WORKLOAD.variant(
    "torchtitan's hand-written loss of a sharded vocabulary, in torch operations and fp32",
    requires=("torchtitan",),
    unsupported_reason=_torchtitan,
)
def torchtitan(problem: EntropyLoss, shard: Any) -> Any:
    from tpbench.workloads.entropy_loss import adapters

    return adapters.torchtitan(problem, shard)
