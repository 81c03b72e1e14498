"""Checks of `linear_entropy_loss`'s tensors. Each error names the argument and says what is valid."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpbench.kernels.entropy import checks
from tpbench.kernels.losses import LABEL_LOSSES


def tensors(hidden: Any, weight: Any, target: Any, loss: str, bias: Any, rows_per_hidden: int) -> None:
    """Raise unless the inputs fit together. rows_per_hidden: ranks that share the rows of the hidden states."""
    _factor("hidden", hidden, "(rows, h)")
    _factor("weight", weight, "(local vocab, h)")
    _product("hidden", hidden, "weight", weight)
    rows = len(hidden) * rows_per_hidden
    if bias is not None:
        _factor("bias", bias, "(local vocab,)", dimensions=1)
        if bias.shape != weight.shape[:1] or bias.dtype != weight.dtype or bias.device != weight.device:
            raise ValueError(
                f"bias must be {weight.dtype} of shape ({len(weight)},) on {weight.device}, like the weight; "
                f"got {bias.dtype} of shape {tuple(bias.shape)} on {bias.device}"
            )
    if loss in LABEL_LOSSES:
        checks.labels(target, rows, hidden.device, loss)
    elif isinstance(target, (tuple, list)):
        if len(target) != 2:
            raise ValueError(f"target must be (teacher_hidden, teacher_weight) or logits, got {len(target)} values")
        _factor("teacher_hidden", target[0], "(rows, teacher's h)")
        _factor("teacher_weight", target[1], "(local vocab, teacher's h)")
        _product("teacher_hidden", target[0], "teacher_weight", target[1])
        if len(target[0]) != len(hidden) or len(target[1]) != len(weight):
            raise ValueError(
                f"teacher_hidden must have {len(hidden)} rows and teacher_weight {len(weight)}, like hidden and weight;"
                f" got {len(target[0])} and {len(target[1])}"
            )
        if target[0].device != hidden.device:
            raise ValueError(f"teacher_hidden must be on the device {hidden.device}, got {target[0].device}")
    else:
        checks.matrix("target", target)
        if target.shape != (rows, len(weight)):
            raise ValueError(f"target must have shape ({rows}, {len(weight)}), got {tuple(target.shape)}")
        if target.device != hidden.device:
            raise ValueError(f"target must be on the device {hidden.device}, got {target.device}")


def weight_gradient(value: Any, weight: Tensor) -> None:
    """Raise unless `value` is None, or a tensor like the weight, in its dtype or fp32, to add to."""
    if value is None:
        return
    _factor("weight_grad", value, "(local vocab, h)")
    checks.writable("weight_grad", value)
    if value.shape != weight.shape or value.device != weight.device:
        raise ValueError(
            f"weight_grad must have the weight's shape {tuple(weight.shape)} and device {weight.device}; "
            f"got {tuple(value.shape)} on {value.device}"
        )
    if value.dtype not in (weight.dtype, torch.float32):
        raise TypeError(f"weight_grad must be {weight.dtype}, like the weight, or float32; got {value.dtype}")


def _factor(name: str, value: Any, shape: str, dimensions: int = 2) -> None:
    value = checks.tensor(name, value)
    if value.dim() != dimensions:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(value.shape)}")
    if value.dtype not in checks.DTYPES:
        raise TypeError(f"{name} must be bfloat16, float16 or float32, got {value.dtype}")


def _product(name: str, left: Tensor, other: str, right: Tensor) -> None:
    if left.shape[1] != right.shape[1] or left.shape[1] == 0:
        raise ValueError(f"{name} and {other} must have the same width h > 0, got {left.shape[1]} and {right.shape[1]}")
    if left.dtype != right.dtype:
        raise TypeError(f"{name} and {other} must have the same dtype, got {left.dtype} and {right.dtype}")
    if left.device != right.device:
        raise ValueError(f"{name} and {other} must be on one device, got {left.device} and {right.device}")
