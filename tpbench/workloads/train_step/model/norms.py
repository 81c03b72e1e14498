"""Norms as one operation, in place of the several operations of transformers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class NormKind:
    """The computation of a norm over the last dimension, without its weight."""

    epsilon: float
    weight_offset: float = 0.0
    """Added to the weight: 1 in Gemma and Nemotron."""
    centered: bool = False
    """True for a layer norm, which subtracts the mean. False for an RMS norm."""


def normalise(hidden: Tensor, weight: Tensor, bias: Tensor | None, kind: NormKind) -> Tensor:
    """Normalise the last dimension, in one operation and in the dtype of `hidden`. An RMS norm has no bias."""
    scale = (weight + kind.weight_offset if kind.weight_offset else weight).to(hidden.dtype)
    if not kind.centered:
        return F.rms_norm(hidden, weight.shape, scale, kind.epsilon)
    return F.layer_norm(hidden, weight.shape, scale, bias if bias is None else bias.to(hidden.dtype), kind.epsilon)


class FusedNorm(nn.Module):
    """RMS norm or layer norm as one operation.

    Every variant uses it, so that variants differ only in how they distribute the work.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, kind: NormKind) -> None:
        super().__init__()
        self.weight, self.bias, self.kind = weight, bias, kind
        self.weight_offset = kind.weight_offset

    def forward(self, hidden: Tensor) -> Tensor:
        return normalise(hidden, self.weight, self.bias, self.kind)


def mark_and_fuse_norms(model: Any, fuse: bool) -> None:
    """Give each norm the attribute `weight_offset`, the number that is added to its weight. With `fuse`, replace it.

    A module is a norm if its outputs for given numbers are those of a norm. Other modules stay as they are.
    """
    kinds: dict[Any, NormKind | None] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            epsilon = getattr(child, "variance_epsilon", getattr(child, "eps", None))
            weight, bias = getattr(child, "weight", None), getattr(child, "bias", None)
            if epsilon is None or weight is None or weight.dim() != 1:
                continue
            key = (type(child), epsilon, len(weight), bias is None)
            if key not in kinds:
                kinds[key] = _kind(child, epsilon)
            if (kind := kinds[key]) is not None:
                child.weight_offset = kind.weight_offset
                if fuse:
                    setattr(parent, name, FusedNorm(weight, bias, kind))


@torch.no_grad()
def _kind(norm: nn.Module, epsilon: float) -> NormKind | None:
    """Return what a norm computes, or None if it is neither an RMS norm nor a layer norm."""
    probe: Any = copy.deepcopy(norm).to_empty(device="cpu").float()
    for parameter in probe.parameters():
        parameter.copy_(torch.linspace(-1.0, 2.0, len(parameter)))
    hidden = torch.linspace(-2.0, 3.0, len(probe.weight))[None]
    normed, bias = probe(hidden), getattr(probe, "bias", None)
    for kind in (NormKind(epsilon, offset, centered) for centered in (False, True) for offset in (0.0, 1.0)):
        if torch.allclose(normed, normalise(hidden, probe.weight, bias, kind), rtol=1e-4):
            return kind
    return None
