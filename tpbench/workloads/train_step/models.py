"""Build a problem's model from the transformers package, without weights at first, and give it weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
import transformers.modeling_utils  # noqa: F401  every model needs it: import it before jobs are forked, not in each
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tpbench.workloads.train_step import sizes
from tpbench.workloads.train_step.model_configuration import (
    UnknownArchitecture,
    model_configuration,
    refused_by_transformers,
)
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.weights import fill


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float, weight_offset: float = 0.0) -> Tensor:
    """Normalise the last dimension by its root mean square, in one operation and in the dtype of `hidden`."""
    scale = weight + weight_offset if weight_offset else weight
    return F.rms_norm(hidden, weight.shape, scale.to(hidden.dtype), epsilon)


class FusedNorm(nn.Module):
    """RMS norm as one operation, in place of the six operations of transformers.

    Every variant uses it, so that variants differ only in how they distribute the work.
    """

    def __init__(self, weight: nn.Parameter, epsilon: float, weight_offset: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.weight_offset = weight, epsilon, weight_offset

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.variance_epsilon, self.weight_offset)


def _mark_and_fuse_norms(model: Any, fuse: bool) -> None:
    """Give each RMS norm the attribute `weight_offset`, what it adds to its weight, and replace it if `fuse` is true.

    A module that computes something else stays as it is. Its outputs for random numbers tell.
    """
    offsets: dict[Any, float | None] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            epsilon, weight = (
                getattr(child, "variance_epsilon", getattr(child, "eps", None)),
                getattr(child, "weight", None),
            )
            if epsilon is None or weight is None or weight.dim() != 1:
                continue
            kind = (type(child), epsilon, len(weight))
            if kind not in offsets:
                offsets[kind] = _weight_offset(child, epsilon)
            if (offset := offsets[kind]) is not None:
                child.weight_offset = offset
                if fuse:
                    setattr(parent, name, FusedNorm(weight, epsilon, offset))


@torch.no_grad()
def _weight_offset(norm: nn.Module, epsilon: float) -> float | None:
    """Return what an RMS norm adds to its weight, 0 or (Gemma) 1, or None for another kind of norm."""
    probe: Any = copy.deepcopy(norm).to_empty(device="cpu").float()
    for parameter in probe.parameters():
        parameter.copy_(torch.linspace(-1.0, 2.0, len(parameter)))
    hidden = torch.linspace(-2.0, 3.0, len(probe.weight))[None]
    normed = probe(hidden)
    for offset in (0.0, 1.0):
        if torch.allclose(normed, rms_norm(hidden, probe.weight, epsilon, offset), rtol=1e-4):
            return offset
    return None


def build(problem: TrainStep, *, fused_norms: bool = True) -> Any:
    """Return the model in training mode, with parameters on the meta device.

    Layers are checkpointed if the problem says so. Buffers of rotary embeddings are on the meta device too, and no
    weight file has them: `place_buffers` makes them on the real device. Raises UnknownArchitecture.
    """
    configuration = model_configuration(problem)
    kind: Any = AutoModelForCausalLM._model_mapping[type(configuration)]
    if problem.attention == "sdpa" and not getattr(kind, "_supports_sdpa", True):
        raise UnknownArchitecture(
            f"transformers has no attention=sdpa for {problem.model} ({problem.architecture}); attention=eager can be "
            "trained"
        )
    complaint = f"transformers cannot make {problem.model} ({problem.architecture}) of its sizes"
    with refused_by_transformers(complaint), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration, dtype=getattr(torch, problem.stored_dtype))
    counted = sizes.matrix_parameters(problem)
    actual = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    if actual != counted:
        raise UnknownArchitecture(
            f"{problem.model} ({problem.architecture}) has {actual} weights in matrices where a dense decoder of its "
            f"sizes has {counted}: operations and memory would be counted wrong"
        )
    _mark_and_fuse_norms(model, fused_norms)
    model.train()
    if problem.activation_checkpointing:
        # No layer has random numbers whose state a recomputation would need. Reading it would end a graph's capture.
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    return model


def place_buffers(model: Any, device: torch.device) -> None:
    """Replace rotary embeddings on the meta device by new ones on `device`, and give other modules their buffers.

    Raises UnknownArchitecture for a buffer that transformers does not initialise.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            buffers = dict(child.named_buffers(recurse=False))
            if not any(buffer.is_meta for buffer in buffers.values()):
                continue
            if next(child.parameters(recurse=False), None) is None:
                with torch.device(device):
                    setattr(parent, name, type(child)(model.config))
                continue
            for each, buffer in buffers.items():
                setattr(child, each, torch.full_like(buffer, torch.nan, device=device))
            model._init_weights(child)
            if any(buffer.isnan().any() for buffer in child.buffers(recurse=False)):
                raise UnknownArchitecture(
                    f"{type(child).__name__} holds buffers, for which there are no initial values"
                )


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give the module's parameters uninitialised memory on `device`, and keep its buffers."""
    buffers = dict(module.named_buffers())
    module.to_empty(device=device)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])


def materialise(model: Any, device: torch.device, seed: int) -> None:
    """Move the whole model to `device` and fill it with its initial weights."""
    place_buffers(model, device)
    allocate(model, device)
    model.tie_weights()  # `allocate` gave tied modules separate memory
    fill(model, "", seed)


def compile_layers(model: Any) -> None:
    """Compile the forward method of each decoder layer; one graph serves all layers.

    Hooks of FSDP and of tensor parallelism stay outside the graph: they are host code only.
    """
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward)
