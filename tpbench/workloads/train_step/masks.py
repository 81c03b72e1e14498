"""Attention masks of whole sequences. A model with a share of the tokens would make masks of the share's length."""

from __future__ import annotations

import torch
from torch import Tensor

from tpbench.workloads.train_step.problem import TrainStep


def attention_masks(problem: TrainStep, device: torch.device) -> Tensor | dict[str, Tensor | None] | None:
    """Return the mask of the model's forward pass.

    If the model's layers have kinds, some with a sliding window, it is a dictionary of masks by kind.
    """
    if problem.window is None or problem.window >= problem.seq_length:
        return _mask(problem, None, device)
    from tpbench.workloads.train_step.model_configuration import model_configuration

    windowed = _mask(problem, problem.window, device)
    if getattr(model_configuration(problem), "layer_types", None) is None:
        return windowed
    return {"full_attention": _mask(problem, None, device), "sliding_attention": windowed}


def _mask(problem: TrainStep, window: int | None, device: torch.device) -> Tensor | None:
    """Return the mask (1, 1, S, S) of causal attention to the latest `window` tokens, or to all (None).

    Eager attention adds it to its scores, in the problem's dtype. sdpa takes True for what a token attends to, and no
    mask without a window; flash attention knows the window itself.
    """
    if problem.attention == "flash_attention_2" or (problem.attention == "sdpa" and window is None):
        return None
    attended = torch.ones(problem.seq_length, problem.seq_length, dtype=torch.bool, device=device).tril()
    if window is not None:
        attended = attended.triu(1 - window)
    if problem.attention == "eager":
        dtype = getattr(torch, problem.dtype)
        blocked = torch.full(attended.shape, torch.finfo(dtype).min, dtype=dtype, device=device)
        return blocked.masked_fill(attended, 0.0)[None, None]
    return attended[None, None]
