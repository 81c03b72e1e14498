"""Build a problem's model from the transformers package without weights, and name the parts of its decoder."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import transformers.modeling_utils  # noqa: F401  every model needs it: import it before jobs are forked, not in each
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tpbench.workloads.train_step.estimates import matrix_parameters
from tpbench.workloads.train_step.model.configuration import (
    UnknownArchitecture,
    model_configuration,
    refused_by_transformers,
)
from tpbench.workloads.train_step.model.inputs import model_inputs
from tpbench.workloads.train_step.model.weights import materialise as materialise
from tpbench.workloads.train_step.problem import TrainStep


def build(problem: TrainStep, *, fused_norms: bool = True) -> Any:
    """Return the model in training mode, with parameters on the meta device.

    Layers are checkpointed if the problem says so. Buffers of rotary embeddings are on the meta device too, and no
    weight file has them: `weights.place_buffers` makes them on the real device. Raises UnknownArchitecture.
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
    decoder_parts(model)
    counted = matrix_parameters(problem)
    actual = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    if actual != counted:
        raise UnknownArchitecture(
            f"{problem.model} ({problem.architecture}) has {actual} weights in matrices where a dense decoder of its "
            f"sizes has {counted}: operations and memory would be counted wrong"
        )
    _fuse_norms(model, fused_norms)
    model.train()
    if problem.activation_checkpointing:
        # No layer has random numbers whose state a recomputation would need. Reading it would end a graph's capture.
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    return model


def counted(problem: TrainStep) -> TrainStep:
    """Return the problem with the number of matrices that the model's feed-forward layers have: 3 with a gate, 2
    without. Raises UnknownArchitecture if the sizes do not describe the model."""
    one_layer = replace(problem, num_layers=1)
    try:
        model = build(one_layer)
    except UnknownArchitecture as error:
        matrices = 5 - problem.ffn_matrices
        try:
            model = build(replace(one_layer, ffn_matrices=matrices))
        except UnknownArchitecture:
            raise error from None
        problem = replace(problem, ffn_matrices=matrices)
    with refused_by_transformers(
        f"{problem.model} ({problem.architecture}) of transformers does not compute with the inputs of a training"
    ):
        length = 1 + (problem.window or 1)
        tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
        model(input_ids=tokens, **model_inputs(replace(problem, seq_length=length), tokens.device))
    return problem


@dataclass(frozen=True)
class DecoderParts:
    """Names of the parts in the model. The head is always `lm_head`."""

    embedding: str
    layers: str
    norm: str
    """The norm behind the layers."""


def decoder_parts(model: Any) -> DecoderParts:
    """Return the parts of a model, sharded or not. Raises UnknownArchitecture for weights in other parts."""
    children = dict(getattr(model, model.base_model_prefix).named_children())
    embedding = next((name for name, child in children.items() if child is model.get_input_embeddings()), "")
    norm = next((name for name in reversed(children) if "norm" in name), "")
    others = [
        name
        for name, child in children.items()
        if name not in (embedding, "layers", norm) and next(child.parameters(), None) is not None
    ]
    has_head = hasattr(getattr(model, "lm_head", None), "weight")
    if others or not (has_head and embedding and norm and isinstance(children.get("layers"), nn.ModuleList)):
        beside = f": it has weights in {', '.join(others)}" if others else ""
        raise UnknownArchitecture(
            f"{model.config.model_type} is no decoder of an embedding, layers, a norm and a linear lm_head{beside}"
        )
    prefix = model.base_model_prefix
    return DecoderParts(f"{prefix}.{embedding}", f"{prefix}.layers", f"{prefix}.{norm}")


def decoder_layers(model: Any) -> Any:
    """Return the list of decoder layers."""
    return model.get_submodule(decoder_parts(model).layers)


def modules_in_order(model: Any) -> list[nn.Module]:
    """Return the modules that hold all parameters, in the order of the forward pass: embedding, layers, norm, head."""
    parts = decoder_parts(model)
    return [
        model.get_submodule(parts.embedding),
        *model.get_submodule(parts.layers),
        model.get_submodule(parts.norm),
        model.lm_head,
    ]


def compile_layers(model: Any) -> None:
    """Compile the forward method of each decoder layer; one graph serves all layers.

    Hooks of FSDP and of tensor parallelism stay outside the graph: they are host code only.
    """
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward)


class FusedNorm(nn.Module):
    """RMS norm of the last dimension as one operation, in place of the several operations of transformers.

    Every variant uses it, so that variants differ only in how they distribute the work.
    """

    def __init__(self, weight: nn.Parameter, epsilon: float, weight_offset: float) -> None:
        super().__init__()
        self.weight, self.epsilon, self.weight_offset = weight, epsilon, weight_offset

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.epsilon, self.weight_offset)


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float, weight_offset: float) -> Tensor:
    """Normalise the last dimension in the dtype of `hidden`. Gemma adds 1 to the weight (`weight_offset`)."""
    scale = (weight + weight_offset if weight_offset else weight).to(hidden.dtype)
    return F.rms_norm(hidden, weight.shape, scale, epsilon)


def _fuse_norms(model: Any, fuse: bool) -> None:
    """Give each RMS norm the attribute `weight_offset`, the number that is added to its weight. With `fuse`, replace
    it. Layer norms of torch are one operation already."""
    offsets: dict[Any, float | None] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            epsilon = getattr(child, "variance_epsilon", getattr(child, "eps", None))
            weight = getattr(child, "weight", None)
            if epsilon is None or weight is None or isinstance(child, nn.LayerNorm):
                continue
            key = (type(child), epsilon, len(weight))
            if key not in offsets:
                offsets[key] = _weight_offset(child, epsilon)
            if (offset := offsets[key]) is not None:
                child.weight_offset = offset
                if fuse:
                    setattr(parent, name, FusedNorm(weight, epsilon, offset))


@torch.no_grad()
def _weight_offset(norm: nn.Module, epsilon: float) -> float | None:
    """Return what an RMS norm adds to its weight, or None for a norm of another kind, from outputs for given
    numbers."""
    probe: Any = copy.deepcopy(norm).to_empty(device="cpu").float()
    probe.weight.copy_(torch.linspace(-1.0, 2.0, len(probe.weight)))
    hidden = torch.linspace(-2.0, 3.0, len(probe.weight))[None]
    for offset in (0.0, 1.0):
        if torch.allclose(probe(hidden), rms_norm(hidden, probe.weight, epsilon, offset), rtol=1e-4):
            return offset
    return None
