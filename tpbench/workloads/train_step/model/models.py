"""Build a problem's model from the transformers package, without weights at first, and give it weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import transformers.modeling_utils  # noqa: F401  every model needs it: import it before jobs are forked, not in each
from torch import nn
from transformers import AutoModelForCausalLM

from tpbench.workloads.train_step.model import sizes
from tpbench.workloads.train_step.model.configuration import (
    UnknownArchitecture,
    model_configuration,
    refused_by_transformers,
)
from tpbench.workloads.train_step.model.decoder_parts import decoder_layers, decoder_parts
from tpbench.workloads.train_step.model.inputs import model_inputs
from tpbench.workloads.train_step.model.norms import mark_and_fuse_norms
from tpbench.workloads.train_step.model.weights import fill
from tpbench.workloads.train_step.problem import TrainStep


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
    _check_counts(problem, model)
    decoder_parts(model)
    mark_and_fuse_norms(model, fused_norms)
    model.train()
    if problem.activation_checkpointing:
        # No layer has random numbers whose state a recomputation would need. Reading it would end a graph's capture.
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    return model


def _check_counts(problem: TrainStep, model: Any) -> None:
    """Raise UnknownArchitecture if the operations and the memory of the model would be counted wrong."""
    counted = sizes.matrix_parameters(problem)
    positions = {
        id(each.weight)
        for each in model.modules()
        if isinstance(each, nn.Embedding) and each is not model.get_input_embeddings()
    }
    matrices = (each for each in model.parameters() if each.dim() > 1 and id(each) not in positions)
    actual = sum(each.numel() for each in matrices)
    if actual != counted:
        raise UnknownArchitecture(
            f"{problem.model} ({problem.architecture}) has {actual} weights in matrices where a dense decoder of its "
            f"sizes has {counted}: operations and memory would be counted wrong"
        )


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
    complaint = (
        f"{problem.model} ({problem.architecture}) of transformers does not compute with the inputs of a training"
    )
    with refused_by_transformers(complaint):
        length = 1 + (problem.window or 1)
        tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
        model(input_ids=tokens, **model_inputs(replace(problem, seq_length=length), tokens.device))
    return problem


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
            if type(child).__module__ == "transformers.activations":
                # The numbers of an activation with learned weights, which are those of its constructor's defaults.
                dtype = next(child.parameters()).dtype
                child.load_state_dict(dict(type(child)(dtype=dtype).named_buffers()), strict=False)  # type: ignore[call-arg]
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
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward)
