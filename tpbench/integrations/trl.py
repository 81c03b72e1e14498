"""TRL: the log-probabilities of its trainers, and the losses of SFT and GRPO with one product of matrices less.

with tpbench.integrations.trl.patch(trainer):
    trainer.train()
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tpbench.integrations.patches import Patch, check_version, columns_of, linear_loss_of
from tpbench.integrations.trl_objectives import Summed, log_likelihood, objective_of

VERSIONS = ("1.16.0", "1.16.0")


def patch(trainer: Any) -> Patch:
    """Replace the head's log-probabilities, entropies and accuracies in TRL's trainers until the patch is undone.

    They are TRL's for every trainer. Besides, the loss of this trainer has its gradient in the forward pass, where the
    logits are still there. This is so for an SFTTrainer with `loss_type="nll"`, and for a GRPOTrainer with a loss of
    tokens (grpo, bnpo, dr_grpo, dapo, cispo) and no option that `trl_objectives.objective_of` lists.

    A head that tensor-parallel ranks shard stays sharded. TRL's function remains for a head of DeepSpeed ZeRO 3 and for
    outputs that the kernels don't have (`log_sum_sq_probs`, `mean_logits`).
    """
    check_version("trl", *VERSIONS)
    from trl.trainer import utils

    patched = Patch()
    head = _Head(utils._ChunkedLogProbFunction)
    patched.replace(utils, "_ChunkedLogProbFunction", head)
    patched.replace(utils, "_use_triton", lambda device: True)  # it only chooses the rows whose label counts
    patched.replace(utils, "DTensor", _NoTensor)
    if hasattr(trainer, "_get_per_token_logps_and_entropies") and hasattr(trainer, "loss_type"):
        patched.replace(trainer, "_compute_loss", functools.partial(_grpo_loss, head, trainer, trainer._compute_loss))
    elif getattr(trainer.args, "loss_type", None) == "nll" and not (
        trainer.compute_loss_func or trainer.label_smoother
    ):
        patched.replace(trainer, "compute_loss", functools.partial(_sft_loss, head, trainer.compute_loss))
    return patched


class _NoTensor:
    """Stands for DTensor where TRL gathers the head's weight. No tensor is one: `_Head` gathers what it must."""


class _Head:
    """Stands for TRL's autograd function of the head. The loss that runs may give it an objective."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs
        self.objective: Callable[..., Any] | None = None
        self.rows: dict[str, Any] = {}
        self.total: Tensor | None = None
        """The sum of the objective in the last call, with its gradient."""

    def apply(
        self, hidden: Tensor, weight: Any, bias: Any, targets: Tensor, temperature: float, chunk_size: int,
        softcap: float | None = None, scale: float = 1.0, outputs: tuple[str, ...] = (),
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        columns = columns_of(weight)
        others = {"log_sum_sq_probs", "mean_logits"} & set(outputs)
        is_theirs = others or hasattr(weight, "ds_id") or (softcap is not None and scale != 1.0)
        if is_theirs or not columns:
            weight, bias = (each.full_tensor() if hasattr(each, "full_tensor") else each for each in (weight, bias))
        if is_theirs:
            options = (targets, temperature, chunk_size, softcap, scale, outputs)
            return tuple(self.theirs.apply(hidden, weight, bias, *options))
        if weight.dtype != hidden.dtype and not torch.is_autocast_enabled(hidden.device.type):
            weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        settings = {"temperature": temperature, "softcap": softcap, "logits_scale": scale, **columns}
        settings["correct"] = "is_top1" in outputs
        if self.objective is None or not torch.is_grad_enabled():
            loss_of = linear_loss_of(loss="logprob", **settings)
            logprobs, entropy = loss_of(hidden, weight, targets, bias)
        else:
            loss_of = linear_loss_of(loss=self.objective, reduction="sum", **settings)
            total = loss_of(hidden, weight, targets, bias, **self.rows)
            assert loss_of.metrics is not None
            logprobs, entropy = loss_of.metrics["logprobs"], loss_of.metrics["entropy"]
            if self.objective is log_likelihood:
                logprobs = Summed.apply(total, logprobs)
            else:
                self.total = total
        return logprobs, entropy if "entropy" in outputs else None, None, None, loss_of.correct

    @contextlib.contextmanager
    def minimising(self, objective: Callable[..., Any], rows: dict[str, Any]) -> Iterator[None]:
        """Let calls compute the gradient of the sum of an objective, in the forward pass."""
        self.objective, self.rows = objective, rows
        try:
            yield
        finally:
            self.objective, self.rows = None, {}


def _sft_loss(head: _Head, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return TRL's loss of SFT, whose log-probabilities all have the same factor."""
    with head.minimising(log_likelihood, {}):
        return theirs(*args, **kwargs)


def _grpo_loss(head: _Head, trainer: Any, theirs: Callable[..., Any], model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return TRL's loss of GRPO. Its gradient is that of an objective, if there is one for the trainer's options."""
    found = objective_of(trainer, inputs) if torch.is_grad_enabled() else None
    if found is None:
        return theirs(model, inputs)
    with head.minimising(*found):
        value = theirs(model, inputs)
    total, head.total = head.total, None
    assert total is not None
    return total + (value - total).detach()
