"""The losses of TRL's SFT and GRPO as objectives of tokens, whose gradient the kernels compute in the forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def log_likelihood(logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective of SFT, but for its sign."""
    return logprobs, {"logprobs": logprobs, "entropy": entropy}


class Summed(torch.autograd.Function):
    """The log-probabilities of a sum whose gradient is known: they need one factor for all."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, logprobs: Tensor) -> Tensor:
        return logprobs.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        first = grad[:1].sum()
        # NaN tells of factors that differ, and the host needn't wait for it.
        return torch.where((grad == first).all(), first, torch.nan), None


@functools.lru_cache(maxsize=16)
def _objective(
    loss_type: str, low: float, high: float, delta: float | None, beta: float, corrected: bool
) -> Callable[..., Any]:
    def grpo(
        logprobs: Tensor, entropy: Tensor, advantages: Tensor, old_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
        ratio = (logprobs - (logprobs.detach() if old_logprobs is None else old_logprobs)).exp()
        if loss_type == "cispo":
            losses = -ratio.clamp(max=high).detach() * advantages * logprobs
        else:
            bounded = ratio if delta is None else ratio.clamp(max=delta)
            losses = -torch.minimum(bounded * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
        if ref_logprobs is not None:
            difference = ref_logprobs - logprobs
            kl = difference.exp() - difference - 1
            losses = losses + beta * (kl * ratio if corrected else kl)
        return losses, {"logprobs": logprobs, "entropy": entropy}

    return grpo


def objective_of(trainer: Any, inputs: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Tensor]] | None:
    """Return the objective of a GRPOTrainer in training and its tensors of rows, one for each token of a completion.

    None if the trainer has an option beyond clips, divisors and the KL divergence.
    """
    args, kind = trainer.args, trainer.loss_type
    other_options = (
        kind not in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo"), trainer.importance_sampling_level != "token",
        trainer.top_entropy_quantile < 1.0, trainer.off_policy_mask_threshold is not None, trainer.aux_loss_enabled,
        trainer._entropy_bonus_enabled, trainer.use_vllm and trainer.vllm_importance_sampling_correction,
    )  # fmt: skip
    if any(other_options):
        return None
    completion = inputs["completion_mask"]
    mask = (completion * inputs["tool_mask"] if "tool_mask" in inputs else completion).float()
    steps = trainer.current_gradient_accumulation_steps
    divisor: Any = len(mask) * trainer.max_completion_length * steps  # of dr_grpo
    if kind == "grpo":
        divisor = mask.sum(-1, keepdim=True).clamp(min=1.0) * len(mask) * steps
    elif kind == "bnpo":
        divisor = mask.sum().clamp(min=1.0) * steps
    elif kind != "dr_grpo":
        items = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
        divisor = items * steps / args.steps_per_generation
    advantages = inputs["advantages"]
    tokens = {
        "advantages": advantages[:, None] if advantages.dim() == 1 else advantages,
        "row_weight": mask / divisor,
        "old_logprobs": inputs.get("old_per_token_logps"),
        "ref_logprobs": inputs["ref_per_token_logps"] if trainer.beta else None,
    }
    counted = completion.bool()
    rows = {name: each.expand(mask.shape)[counted] for name, each in tokens.items() if each is not None}
    options = (kind, trainer.epsilon_low, trainer.epsilon_high, args.delta, trainer.beta, args.use_bias_correction_kl)
    return _objective(*options), rows
