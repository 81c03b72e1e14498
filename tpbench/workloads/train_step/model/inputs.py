"""Inputs of a model besides the tokens: positions and attention masks of whole sequences.

A model with a share of the tokens would make masks of the share's length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpbench.workloads.train_step.problem import TrainStep


def model_inputs(problem: TrainStep, device: torch.device) -> dict[str, Any]:
    """Return the arguments of a model's forward pass besides the tokens.

    `position_ids`, (1, S) int64, are explicit because a sequence-parallel rank would count its own tokens from 0.
    """
    positions = torch.arange(problem.seq_length, device=device)[None]
    return {"position_ids": positions, "attention_mask": attention_masks(problem, device), "use_cache": False}


def attention_masks(problem: TrainStep, device: torch.device) -> Tensor | dict[str, Tensor | None] | None:
    """Return the mask of the model's forward pass.

    If the model's layers have kinds, some with a sliding window, it is a dictionary of masks by kind.
    """
    if problem.window is None or problem.window >= problem.seq_length:
        return _mask(problem, None, device)
    from tpbench.workloads.train_step.model.configuration import model_configuration

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
