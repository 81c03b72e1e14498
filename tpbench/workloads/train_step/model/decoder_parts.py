"""The parts of a decoder, which have other names in some model types: embedding, layers, and the last norm."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from tpbench.workloads.train_step.model.configuration import UnknownArchitecture


@dataclass(frozen=True)
class DecoderParts:
    """Names of the parts in the model. The head is always `lm_head`."""

    embedding: str
    layers: str
    norm: str | None
    """The norm behind the layers; None if there is none."""
    others: tuple[str, ...]
    """Further modules with weights beside the layers, such as an embedding of positions."""


def decoder_parts(model: Any) -> DecoderParts:
    """Return the parts of a model from its modules, sharded or not. Raises UnknownArchitecture if it lacks one."""
    depth, embedding = model.config.num_hidden_layers, model.get_input_embeddings()
    names = {module: name for name, module in model.named_modules()}
    lists = (name for name, each in model.named_modules() if isinstance(each, nn.ModuleList) and len(each) == depth)
    layers = next(lists, None)
    if layers is None or embedding not in names or not hasattr(getattr(model, "lm_head", None), "weight"):
        raise UnknownArchitecture(
            f"{model.config.model_type} is no decoder of an embedding, layers and a linear lm_head"
        )
    beside = dict(model.get_submodule(layers.rpartition(".")[0]).named_children())
    norm = next((name for name in reversed(beside) if re.search("norm|ln_f", name) and beside[name]), None)
    known = {embedding, model.get_submodule(layers), beside.get(str(norm))}
    others = [each for each in beside.values() if each not in known and next(each.parameters(), None) is not None]
    prefix = layers.rpartition(".")[0]
    return DecoderParts(names[embedding], layers, norm and f"{prefix}.{norm}", tuple(names[each] for each in others))


def decoder_layers(model: Any) -> Any:
    """Return the list of decoder layers."""
    return model.get_submodule(decoder_parts(model).layers)


def modules_in_order(model: Any) -> list[nn.Module]:
    """Return the modules that hold all parameters, in the order of the forward pass: embeddings, layers, norm, head."""
    parts = decoder_parts(model)
    before = [model.get_submodule(name) for name in (parts.embedding, *parts.others)]
    norm = [] if parts.norm is None else [model.get_submodule(parts.norm)]
    return [*before, *model.get_submodule(parts.layers), *norm, model.lm_head]
