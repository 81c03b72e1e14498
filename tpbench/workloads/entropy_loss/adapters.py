"""Calls of other projects' entropy losses. Only ranks that run them import this module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tpbench.workloads.entropy_loss.inputs import Output, Shard, Step
from tpbench.workloads.entropy_loss.problem import EntropyLoss
from tpbench.workloads.lone_module import import_alone
from tpbench.workloads.losses import SEQUENCE
from tpbench.workloads.losses.formulas import (
    JSD_BETA,
    Losses,
    bytes_of_statistics,
    differentiated,
    rows_that_count,
    under_loss_parallel,
)
from tpbench.workloads.losses.inputs import CLIP
from tpbench.workloads.sizes import IGNORED, bytes_of_all_reduce


def torch_loss_parallel(problem: EntropyLoss, shard: Shard) -> Step:
    """https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html: loss_parallel.

    It computes in the dtype of its input. With compute_dtype=float32 it gets the logits in fp32.
    """
    dtype = torch.float32 if problem.compute_dtype == "float32" else shard.logits.dtype

    def iteration(mean_loss: Callable[[Tensor], Tensor]) -> Output:
        return _differentiated(shard.logits, lambda logits: mean_loss(logits.to(dtype)))

    return Step(under_loss_parallel(shard, shard.target, iteration), bytes_of_statistics(3, shard))


def liger(problem: EntropyLoss, shard: Shard) -> Step:
    """https://github.com/linkedin/Liger-Kernel: LigerCrossEntropyLoss, sharded LigerVocabParallelCrossEntropy.

    LigerCrossEntropyLoss keeps losses in the dtype of its input. With compute_dtype=float32 it gets the logits in fp32.
    """
    special = {"policy": _liger_grpo, "jsd": _liger_jsd}
    if problem.loss in special:
        return special[problem.loss](problem, shard)
    return _liger_sharded(shard) if shard.tp_size > 1 else _liger_whole(problem, shard)


def _liger_grpo(problem: EntropyLoss, shard: Shard) -> Step:
    """triton_grpo_loss, of logits (sequences, rows + 1, vocab): those of the last row of a sequence have no label."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    sequences, vocab = problem.tokens // SEQUENCE, problem.vocab
    work = shard.logits.new_zeros(sequences, SEQUENCE + 1, vocab)
    work[:, :-1] = shard.logits.view(sequences, SEQUENCE, vocab)
    rows = {name: values.view(sequences, SEQUENCE) for name, values in {**shard.rows, "labels": shard.target}.items()}
    mask = (rows["labels"] != IGNORED).long()
    count, labels = rows_that_count(shard.target), rows["labels"].clamp(min=0)
    scale = problem.temperature / problem.logits_scale

    def run() -> Callable[[], Output]:
        leaf = work.detach().requires_grad_()
        row_loss = triton_grpo_loss(
            leaf, rows["old_logprobs"], rows.get("ref_logprobs"), labels, rows["advantages"][:, 0].contiguous(), mask,
            temperature=scale, beta=problem.kl_weight, eps_low=CLIP[0], eps_high=CLIP[1], inplace=False,
        )[0]  # fmt: skip
        loss = (row_loss * mask).sum() / count
        (grad,) = torch.autograd.grad(loss, leaf)
        return lambda: Output(
            loss.detach(), (row_loss * mask).detach().view(-1), grad[:, :-1].reshape(problem.tokens, vocab)
        )

    return Step(run, restore=lambda: work[:, :-1].copy_(shard.logits.view(sequences, SEQUENCE, vocab)))


def _liger_jsd(problem: EntropyLoss, shard: Shard) -> Step:
    """LigerJSD of log-probabilities in fp32, which torch computes."""
    from liger_kernel.transformers import LigerJSD

    function = LigerJSD(beta=JSD_BETA)
    scale = problem.logits_scale

    def loss_of(logits: Tensor) -> Any:
        log_p = (logits.float() * scale).log_softmax(-1)
        return function(log_p, (shard.target.float() * (scale / problem.temperature)).log_softmax(-1))

    return Step(lambda: _differentiated(shard.logits, loss_of))


def _liger_whole(problem: EntropyLoss, shard: Shard) -> Step:
    from liger_kernel.transformers import LigerCrossEntropyLoss

    function = LigerCrossEntropyLoss(ignore_index=IGNORED)
    dtype = torch.float32 if problem.compute_dtype == "float32" else shard.logits.dtype
    work = shard.logits.clone()  # the gradient overwrites it; a training step would make new logits

    def run() -> Output:
        output = _differentiated(work, lambda logits: function(logits.to(dtype), shard.target))
        return replace(output, loss=output.loss.float())

    return Step(run, restore=lambda: work.copy_(shard.logits))


def _liger_sharded(shard: Shard) -> Step:
    from liger_kernel.transformers import LigerVocabParallelCrossEntropy

    function = LigerVocabParallelCrossEntropy(ignore_index=IGNORED)

    def row_losses(logits: Tensor) -> Tensor:
        row_loss: Tensor = function(logits[:, None], shard.target[:, None], shard.group)[:, 0]
        return row_loss

    return _step_of_rows(shard, row_losses, bytes_of_statistics(3, shard))


def megatron(problem: EntropyLoss, shard: Shard) -> Step:
    """https://github.com/NVIDIA/Megatron-LM: megatron.core.tensor_parallel.vocab_parallel_cross_entropy.

    It has no label to ignore. Losses of ignored rows are left out of the mean, as by Megatron's loss mask.
    """
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    counts = shard.target != IGNORED
    # Megatron subtracts the maximum in place from logits.float(), which is a copy unless the logits are fp32.
    overwritten = shard.logits.dtype == torch.float32
    work = shard.logits.clone() if overwritten else shard.logits

    def row_losses(logits: Tensor) -> Tensor:
        losses = vocab_parallel_cross_entropy(logits[:, None], shard.target[:, None], tp_group=shard.group)[:, 0]
        return torch.where(counts, losses, 0.0)

    step = _step_of_rows(replace(shard, logits=work), row_losses, bytes_of_statistics(3, shard))
    return replace(step, restore=lambda: work.copy_(shard.logits)) if overwritten else step


def quack(problem: EntropyLoss, shard: Shard) -> Step:
    """https://github.com/Dao-AILab/quack: cross_entropy_fwd, which computes loss and gradient in one launch.

    The gradient is that of the sum over rows. The factor of the mean is not applied: a training step can pass it on.
    """
    from quack.cross_entropy import cross_entropy_fwd

    factor = 1.0 / rows_that_count(shard.target)

    def run() -> Output:
        row_loss, grad = cross_entropy_fwd(shard.logits, shard.target, ignore_index=IGNORED, return_dx=True)
        return Output(row_loss.sum() * factor, row_loss, grad, factor)

    return Step(run)


def fast_llm(problem: EntropyLoss, shard: Shard) -> Step:
    """https://github.com/ServiceNow/Fast-LLM: triton_entropy_loss_forward_backward of fast_llm/functional/triton.

    It returns the mean loss and its gradient. Ranks all-reduce each row's maximum and sum of each distribution, and a
    part of its loss. `PYTHONPATH=CHECKOUT` is enough: the modules of the kernels need nothing else of Fast-LLM.
    """
    if sys.version_info < (3, 12):
        raise RuntimeError("Fast-LLM needs Python 3.12")
    if problem.loss == "policy":
        return _fast_llm_grpo(problem, shard)
    from fast_llm.functional.config import EntropyLossType, TargetFormat
    from fast_llm.functional.triton.entropy_loss import triton_entropy_loss_forward_backward

    options = {
        "loss_mask": None,
        "grad_output": 1.0,
        "group": shard.group,
        "logits_scale_factor": problem.logits_scale,
        "temperature": problem.temperature,
        "target_format": TargetFormat.labels if problem.from_labels else TargetFormat.logits,
        "entropy_loss_type": EntropyLossType(problem.loss.removeprefix("soft_")),
        "divisor": float(rows_that_count(shard.target) if problem.from_labels else shard.tokens),
    }

    def run() -> Output:
        loss, *_, grad = triton_entropy_loss_forward_backward(shard.logits, shard.target, **options)
        return Output(loss, None, grad)

    return Step(run, bytes_of_statistics(3 if problem.from_labels else 5, shard))


def _fast_llm_grpo(problem: EntropyLoss, shard: Shard) -> Step:
    """triton_grpo_loss_forward_backward, which has no divergence from a reference."""
    from fast_llm.functional.triton.grpo_loss import triton_grpo_loss_forward_backward

    options = {
        "grad_output": 1.0, "group": shard.group, "epsilon_low": CLIP[0], "epsilon_high": CLIP[1],
        "logits_scale_factor": problem.logits_scale / problem.temperature,
        "divisor": float(rows_that_count(shard.target)),
    }  # fmt: skip
    rows = shard.rows["advantages"], shard.rows["old_logprobs"]

    def run() -> Output:
        loss, grad, _ = triton_grpo_loss_forward_backward(shard.logits, shard.target, *rows, **options)
        return Output(loss, None, grad)

    return Step(run, bytes_of_statistics(3, shard))


def flash_attn(problem: EntropyLoss, shard: Shard) -> Step:
    """https://github.com/Dao-AILab/flash-attention: flash_attn.ops.triton.cross_entropy.cross_entropy_loss.

    Ranks gather each other's log-sum-exp and sum the logits of the labels. The gradient is a new tensor, because the
    variant leaves `inplace_backward` at its default. Only the file of the kernel is imported: the package around it
    needs a compiled extension, which the kernel does not use.
    """
    function = import_alone("flash_attn.ops.triton.cross_entropy", ("flash_attn",)).cross_entropy_loss
    options = {"logit_scale": problem.logits_scale, "ignore_index": IGNORED, "process_group": shard.group}

    gathered = 4 * shard.tokens * (shard.tp_size - 1)
    summed = bytes_of_all_reduce(4 * shard.tokens, shard.tp_size)
    return _step_of_rows(shard, lambda logits: function(logits, shard.target, **options)[0], gathered + summed)


def transformer_engine(problem: EntropyLoss, shard: Shard) -> Step:
    """https://github.com/NVIDIA/TransformerEngine: transformer_engine.pytorch.parallel_cross_entropy.

    Ranks gather four fp32 numbers of each row. The function and its Triton kernels are imported alone: the packages
    around them need a compiled library, which the kernels do not use.
    """
    function = import_alone(
        "transformer_engine.pytorch.cross_entropy",
        (
            "transformer_engine",
            "transformer_engine.common",
            "transformer_engine.pytorch",
            "transformer_engine.pytorch.triton",
        ),
        # The decorator is for the form that overwrites its input, which this variant does not call.
        stand_ins={"transformer_engine.pytorch.jit": {"no_torch_dynamo": lambda: lambda function: function}},
    ).parallel_cross_entropy
    options = {"dist_process_group": shard.group, "ignore_idx": IGNORED}
    sent = 4 * 4 * shard.tokens * (shard.tp_size - 1)
    return _step_of_rows(shard, lambda logits: function(logits[None], shard.target[None], **options)[0], sent)


def _step_of_rows(shard: Shard, row_losses: Callable[[Tensor], Tensor], sent: int) -> Step:
    """Return the step of a project that computes each row's loss, (tokens,), from the local logits."""
    count = rows_that_count(shard.target)

    def loss_of(logits: Tensor) -> tuple[Tensor, Tensor]:
        row_loss = row_losses(logits)
        return row_loss.sum() / count, row_loss

    return Step(lambda: _differentiated(shard.logits, loss_of), bytes_communicated=sent)


def _differentiated(logits: Tensor, loss_of: Callable[[Tensor], Losses]) -> Output:
    """Return the mean loss, the losses of rows if the project computes them, and the gradient of the logits."""
    (loss, row_loss, _), (grad,) = differentiated((logits,), loss_of)
    return Output(loss, row_loss, grad)
