"""Calls of other projects' linear losses. Only ranks that run them import this module."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tpbench.workloads.linear_loss.in_torch import bytes_of_gradient, differentiated, step_of_mean
from tpbench.workloads.linear_loss.inputs import Shard, Step
from tpbench.workloads.linear_loss.problem import LinearLoss, quack_chunk_rows
from tpbench.workloads.lone_module import import_alone
from tpbench.workloads.losses import SEQUENCE
from tpbench.workloads.losses.formulas import Losses, bytes_of_statistics, rows_that_count
from tpbench.workloads.losses.inputs import CLIP
from tpbench.workloads.sizes import IGNORED


def liger(problem: LinearLoss, shard: Shard) -> Step:
    """https://github.com/linkedin/Liger-Kernel: LigerFusedLinearCrossEntropyLoss and -GRPOLoss, in its chunks."""
    if problem.loss == "policy":
        return _liger_grpo(problem, shard)
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    function = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)
    return step_of_mean(problem, shard, lambda hidden, weight, labels: function(weight, hidden, labels))


def _liger_grpo(problem: LinearLoss, shard: Shard) -> Step:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    settings = {"beta": problem.kl_weight, "epsilon_low": CLIP[0], "epsilon_high": CLIP[1], "loss_type": "bnpo"}
    function = LigerFusedLinearGRPOLoss(
        temperature=problem.temperature, use_ref_model=problem.kl_weight > 0, compiled=True, **settings
    )
    rows = {name: values.view(-1, SEQUENCE) for name, values in shard.rows.items()}
    mask = torch.ones_like(rows["advantages"], dtype=torch.int64)

    def mean_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = function(
            hidden.view(-1, SEQUENCE, problem.hidden), weight, labels.view_as(mask), mask, rows["advantages"][:, 0],
            ref_per_token_logps=rows.get("ref_logprobs"), old_per_token_logps=rows["old_logprobs"],
        )[0]  # fmt: skip
        return loss

    return step_of_mean(problem, shard, mean_loss)


def liger_cutedsl(problem: LinearLoss, shard: Shard) -> Step:
    """https://github.com/linkedin/Liger-Kernel: liger_fused_linear_cross_entropy_sm90, in CuTe, with all logits."""
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import liger_fused_linear_cross_entropy_sm90

    return step_of_mean(problem, shard, partial(liger_fused_linear_cross_entropy_sm90, ignore_index=IGNORED))


def cce(problem: LinearLoss, shard: Shard) -> Step:
    """https://github.com/apple/ml-cross-entropy: linear_cross_entropy, which stores no logits."""
    from cut_cross_entropy import linear_cross_entropy

    def loss_of(hidden: Tensor, weight: Tensor) -> Tensor:
        loss: Tensor = linear_cross_entropy(hidden, weight, shard.labels, ignore_index=IGNORED, impl="cce")
        return loss.float()

    omitted = torch.finfo(shard.hidden.dtype).eps / 32  # its filter_eps: it leaves blocks out that are all below
    return Step(lambda: replace(differentiated(problem, shard, loss_of), omits_below=omitted))


def verl(problem: LinearLoss, shard: Shard) -> Step:
    """https://github.com/volcengine/verl, verl/utils/kernel: linear_cross_entropy, of log-probabilities and entropies.

    It has no ignored labels: a mask leaves their rows out. It imports `kernels` at its first call.
    """
    packages = ("verl", "verl.utils")  # they need Ray and an inference engine
    import_alone("verl.utils.kernel.kernels", packages)
    function = import_alone("verl.utils.kernel.linear_cross_entropy", packages).linear_cross_entropy
    settings = problem.temperature, "none", shard.group
    return _step_of_logprobs(problem, shard, lambda *tensors: function(*tensors, *settings), 4)


def liger_tp(problem: LinearLoss, shard: Shard) -> Step:
    """https://github.com/linkedin/Liger-Kernel: LigerFusedLinearScaledCrossEntropyTPFunction, in chunks of 512 rows.

    It is written in torch unless Liger's package of NVSHMEM kernels is installed.
    """
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyTPFunction

    def statistics(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        result = LigerFusedLinearScaledCrossEntropyTPFunction.apply(
            hidden, weight, labels, shard.group, problem.temperature, IGNORED, 1, problem.entropy
        )
        losses, entropies = result if problem.entropy else (result, result)
        return -losses, entropies

    return _step_of_logprobs(problem, shard, statistics, 3 + problem.entropy, sums=True)


def _step_of_logprobs(
    problem: LinearLoss, shard: Shard, statistics: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    numbers: int, *, sums: bool = False,
) -> Step:  # fmt: skip
    """Return the step of a function of log-probabilities and entropies, whose ranks exchange `numbers` for each row."""
    assert shard.labels is not None
    labels, counts = shard.labels, shard.labels != IGNORED
    count, is_logprob = rows_that_count(labels), problem.loss == "logprob"

    def losses_of(hidden: Tensor, weight: Tensor) -> Losses:
        logprobs, entropies = statistics(hidden, weight, labels)
        logprobs = logprobs.where(counts, 0.0)
        mean = (logprobs if is_logprob else -logprobs).sum() / count
        return mean, logprobs if is_logprob else None, entropies.where(counts, 0.0) if problem.entropy else None

    sent = bytes_of_statistics(numbers, shard) + bytes_of_gradient(problem, shard)
    return Step(lambda: differentiated(problem, shard, losses_of, sums=sums), sent)


def quack(problem: LinearLoss, shard: Shard) -> Step:
    """https://github.com/Dao-AILab/quack: chunked_linear_cross_entropy, in chunks of 4096 rows where it can."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    chunk_size = quack_chunk_rows(problem)
    assert chunk_size is not None  # the variant does not support others
    function = partial(chunked_linear_cross_entropy, chunk_size=chunk_size, ignore_index=IGNORED)
    return step_of_mean(problem, shard, function)
