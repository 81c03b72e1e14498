"""Build a problem's model from the transformers package, without weights at first, and give it weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers.modeling_utils  # noqa: F401  every model needs it: import it before jobs are forked, not in each
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tpbench.workloads.train_step import sizes
from tpbench.workloads.train_step.model_configuration import UnknownArchitecture, model_configuration
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.weights import fill


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Normalise the last dimension by its root mean square, in one operation and in the dtype of `hidden`."""
    return F.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), epsilon)


class FusedNorm(nn.Module):
    """RMS norm as one operation, in place of the six operations of transformers.

    Every variant uses it, so that variants differ only in how they distribute the work.
    """

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = norm.weight
        self.variance_epsilon: float = norm.variance_epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.variance_epsilon)


def build(problem: TrainStep, *, fused_norms: bool = True) -> Any:
    """Return the model in training mode, with parameters on the meta device.

    Layers are checkpointed if the problem says so. Buffers of rotary embeddings are on the meta device too, and no
    weight file has them: `place_buffers` makes them on the real device. Raises UnknownArchitecture.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_configuration(problem), dtype=getattr(torch, problem.stored_dtype)
        )
    counted = sizes.matrix_parameters(problem)
    actual = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    if actual != counted:
        raise UnknownArchitecture(
            f"{problem.model} ({problem.architecture}) has {actual} weights in matrices where a dense decoder of its "
            f"sizes has {counted}: operations and memory would be counted wrong"
        )
    for parent in list(model.modules()) if fused_norms else ():
        for name, child in list(parent.named_children()):
            if hasattr(child, "variance_epsilon"):
                setattr(parent, name, FusedNorm(child))
    model.train()
    if problem.activation_checkpointing:
        # No layer has random numbers whose state a recomputation would need. Reading it would end a graph's capture.
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    return model


def place_buffers(model: Any, device: torch.device) -> None:
    """Replace rotary embeddings on the meta device by new ones on `device`."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if any(buffer.is_meta for buffer in child.buffers(recurse=False)):
                with torch.device(device):
                    setattr(parent, name, type(child)(model.config))


def materialise(model: Any, device: torch.device, seed: int) -> None:
    """Move the whole model to `device` and fill it with its initial weights."""
    place_buffers(model, device)
    buffers = dict(model.named_buffers())
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    model.tie_weights()  # `to_empty` gave tied modules separate memory
    fill(model, "", seed)


def compile_layers(model: Any) -> None:
    """Compile the forward method of each decoder layer; one graph serves all layers.

    Hooks of FSDP and of tensor parallelism stay outside the graph: they are host code only.
    """
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward)
