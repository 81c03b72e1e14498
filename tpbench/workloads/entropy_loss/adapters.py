"""Calls of other projects' entropy losses. Only ranks that run them import this module."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.kernels import COMPARING_LOSSES
from tpbench.workloads.entropy_loss.inputs import Output, Shard, Step
from tpbench.workloads.entropy_loss.problem import EntropyLoss
from tpbench.workloads.lone_module import import_alone
from tpbench.workloads.losses import SEQUENCE, formulas
from tpbench.workloads.losses.inputs import CLIP
from tpbench.workloads.sizes import IGNORED, bytes_of_all_reduce


def torch_loss_parallel(problem: EntropyLoss, shard: Shard) -> Step:
    """https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html: loss_parallel, in its input's dtype."""

    def iteration(mean_loss: Callable[[Tensor], Tensor]) -> Output:
        (loss, *_), (grad,) = formulas.differentiated((shard.logits,), lambda x: mean_loss(formulas.scaled(problem, x)))
        return Output(loss, None, grad)

    return Step(formulas.under_loss_parallel(shard, shard.target, iteration), formulas.bytes_of_statistics(3, shard))


def liger(problem: EntropyLoss, shard: Shard) -> Step:
    """https://github.com/linkedin/Liger-Kernel: cross-entropy on one rank and over ranks, JSD, TVD and GRPO."""
    if problem.loss == "policy":
        return _liger_grpo(problem, shard)
    if problem.loss in COMPARING_LOSSES:
        from liger_kernel.transformers import LigerJSD, LigerTVDLoss

        of_logs = problem.loss == "jsd"
        function = LigerJSD(beta=formulas.JSD_BETA) if of_logs else LigerTVDLoss()
        softmax = torch.log_softmax if of_logs else torch.softmax

        def loss_of(logits: Tensor) -> Tensor:
            pairs = (logits, problem.scale), (shard.target, problem.target_scale)
            return function(*(softmax(x.float() * scale, -1) for x, scale in pairs))  # type: ignore[no-any-return]

        return _step(shard, loss_of)
    if shard.group is not None:
        from liger_kernel.transformers import LigerVocabParallelCrossEntropy

        sharded, labels = LigerVocabParallelCrossEntropy(ignore_index=IGNORED), shard.target[:, None]
        sent = formulas.bytes_of_statistics(3, shard)
        return _step(shard, lambda logits: sharded(logits[:, None], labels, shard.group)[:, 0], sent, of_rows=True)
    from liger_kernel.transformers import LigerCrossEntropyLoss

    whole = LigerCrossEntropyLoss(ignore_index=IGNORED)
    return _step(shard, lambda logits: whole(formulas.scaled(problem, logits), shard.target), overwrites=True)


def _liger_grpo(problem: EntropyLoss, shard: Shard) -> Step:
    """triton_grpo_loss, of logits (sequences, rows + 1, vocab): those of the last row of a sequence have no label."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    sequences, vocab = problem.tokens // SEQUENCE, problem.vocab
    logits = shard.logits.view(sequences, SEQUENCE, vocab)
    work = logits.new_zeros(sequences, SEQUENCE + 1, vocab)
    work[:, :-1] = logits
    rows = {name: values.view(sequences, SEQUENCE) for name, values in {**shard.rows, "labels": shard.target}.items()}
    mask = (rows["labels"] != IGNORED).long()
    count, labels = formulas.rows_that_count(shard.target), rows["labels"].clamp(min=0)
    options = {"beta": problem.kl_weight, "eps_low": CLIP[0], "eps_high": CLIP[1], "inplace": False}

    def losses_of(leaf: Tensor) -> tuple[Tensor, Tensor]:
        row_loss = mask * triton_grpo_loss(
            leaf, rows["old_logprobs"], rows.get("ref_logprobs"), labels, rows["advantages"][:, 0].contiguous(), mask,
            temperature=problem.temperature / problem.logits_scale, **options,
        )[0]  # fmt: skip
        return row_loss.sum() / count, row_loss

    def run() -> Callable[[], Output]:
        (loss, row_loss, _), (grad,) = formulas.differentiated((work,), losses_of)
        return lambda: Output(loss, row_loss.view(-1), grad[:, :-1].reshape(problem.tokens, vocab))

    return Step(run, restore=lambda: work[:, :-1].copy_(logits))


def megatron(problem: EntropyLoss, shard: Shard) -> Step:
    """https://github.com/NVIDIA/Megatron-LM: megatron.core.tensor_parallel.vocab_parallel_cross_entropy.

    It subtracts the maximum in place from logits.float().
    """
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    return _megatron(shard, vocab_parallel_cross_entropy)


def megatron_fused(problem: EntropyLoss, shard: Shard) -> Step:
    """https://github.com/NVIDIA/Megatron-LM: its cross_entropy_loss_fusion, parts that torch.compile fuses."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    # From its second size on, torch would make slower kernels for any size. A training run has one, and a sweep many.
    torch._dynamo.config.automatic_dynamic_shapes, torch._dynamo.config.recompile_limit = False, 1000
    return _megatron(shard, fused_vocab_parallel_cross_entropy)


def _megatron(shard: Shard, function: Callable[..., Tensor]) -> Step:
    """Return the step of a loss that has no label to ignore: a mask leaves those rows out."""
    group = shard.group or _group_of_this_rank()
    counts, overwrites = shard.target != IGNORED, shard.logits.dtype == torch.float32

    def row_losses(logits: Tensor) -> Tensor:
        return torch.where(counts, function(logits[:, None], shard.target[:, None], tp_group=group)[:, 0], 0.0)

    return _step(shard, row_losses, formulas.bytes_of_statistics(3, shard), of_rows=True, overwrites=overwrites)


@cache  # a group has memory of its own
def _group_of_this_rank() -> dist.ProcessGroup:
    """Return a group of one rank, which Megatron-LM passes on one GPU."""
    group: dist.ProcessGroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return group


def quack(problem: EntropyLoss, shard: Shard) -> Step:
    """https://github.com/Dao-AILab/quack: cross_entropy_fwd, with the gradient of the sum over rows in one launch."""
    from quack.cross_entropy import cross_entropy_fwd

    factor = 1.0 / formulas.rows_that_count(shard.target)

    def run() -> Output:
        row_loss, grad = cross_entropy_fwd(shard.logits, shard.target, ignore_index=IGNORED, return_dx=True)
        return Output(row_loss.sum() * factor, row_loss, grad, factor)

    return Step(run)


def fast_llm(problem: EntropyLoss, shard: Shard) -> Step:
    """https://github.com/ServiceNow/Fast-LLM: kernels of entropy losses and GRPO. A checkout on PYTHONPATH suffices."""
    divisor = float(formulas.rows_that_count(shard.target) if problem.from_labels else shard.tokens)
    options: dict[str, Any] = {"grad_output": 1.0, "group": shard.group, "divisor": divisor}
    arguments: tuple[Any, ...] = (shard.logits, shard.target)
    if problem.loss == "policy":  # its kernel has no divergence from a reference
        from fast_llm.functional.triton.grpo_loss import triton_grpo_loss_forward_backward as function

        arguments += shard.rows["advantages"], shard.rows["old_logprobs"]
        options |= {"logits_scale_factor": problem.scale, "epsilon_low": CLIP[0], "epsilon_high": CLIP[1]}
    else:
        from fast_llm.functional.config import EntropyLossType, TargetFormat
        from fast_llm.functional.triton.entropy_loss import triton_entropy_loss_forward_backward as function

        options |= {
            "loss_mask": None,
            "logits_scale_factor": problem.logits_scale,
            "temperature": problem.temperature,
            "target_format": TargetFormat.labels if problem.from_labels else TargetFormat.logits,
            "entropy_loss_type": EntropyLossType(problem.loss.removeprefix("soft_")),
        }

    def run() -> Output:
        results = function(*arguments, **options)
        return Output(results[0], None, results[1 if problem.loss == "policy" else -1])

    return Step(run, formulas.bytes_of_statistics(3 if problem.from_labels else 5, shard))


def flash_attn(problem: EntropyLoss, shard: Shard) -> Step:
    """https://github.com/Dao-AILab/flash-attention: flash_attn.ops.triton.cross_entropy.cross_entropy_loss.

    Ranks gather each other's log-sum-exp and sum the logits of the labels.
    """
    # The whole package needs a compiled extension.
    function = import_alone("flash_attn.ops.triton.cross_entropy", ("flash_attn",)).cross_entropy_loss
    options = {"logit_scale": problem.logits_scale, "ignore_index": IGNORED, "process_group": shard.group}
    target, gathered = shard.target, 4 * shard.tokens * (shard.tp_size - 1)
    sent = gathered + bytes_of_all_reduce(4 * shard.tokens, shard.tp_size)
    return _step(shard, lambda logits: function(logits, target, **options)[0], sent, of_rows=True)


def _step(
    shard: Shard, loss_of: Callable[[Tensor], Any], sent: int = 0, *, of_rows: bool = False, overwrites: bool = False
) -> Step:
    """Return the step of a project that computes the mean loss, or losses `of_rows`, with the gradient by autograd.

    overwrites: it writes to its argument, where a training step would make new logits, so it gets a copy.
    """
    work = shard.logits.clone() if overwrites else shard.logits
    count = formulas.rows_that_count(shard.target) if of_rows else None

    def losses_of(logits: Tensor) -> formulas.Losses:
        losses = loss_of(logits)
        return losses if count is None else (losses.sum() / count, losses)

    def run() -> Output:
        (loss, row_loss, _), (grad,) = formulas.differentiated((work,), losses_of)
        return Output(loss.float(), row_loss, grad)

    return Step(run, sent, restore=(lambda: work.copy_(shard.logits)) if overwrites else None)
