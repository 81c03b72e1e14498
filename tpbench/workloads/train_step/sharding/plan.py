"""Decide how each module of the decoder layers is sharded over tensor-parallel ranks, from the model's own plan.

transformers gives most model types a plan (`base_model_tp_plan`): patterns of module names, each with a style.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import Tensor, nn

from tpbench.suggestions import nearest
from tpbench.workloads.train_step.model.configuration import UnknownArchitecture
from tpbench.workloads.train_step.model.models import FusedNorm, build, decoder_layers, decoder_parts
from tpbench.workloads.train_step.problem import STYLES, Style, TrainStep, parse_mapping

SYNONYMS = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "replicated_with_grad_allreduce": "replicated",
}
"""Other names of a style in plans of transformers. The sum over ranks of a replicated module's gradient follows from
the module's place."""


@dataclass(frozen=True)
class Block:
    """A module with linear layers that a decoder layer calls with hidden states: attention or feed-forward."""

    name: str
    """The module's name in the model."""
    styles: Mapping[str, Style]
    """The style of each module in the block that has parameters, by name in the model."""

    @property
    def sharded_inside(self) -> bool:
        """True if a rank has only its share of the columns or heads between the block's linear layers. Then a rank has
        only its share of a replicated module's gradient."""
        return "colwise" in self.styles.values()

    @property
    def gathers_columns(self) -> bool:
        """True if every rank has all columns between the block's linear layers, which are sharded."""
        return "rowwise_split_input" in self.styles.values()

    @property
    def replicated(self) -> bool:
        """True if every rank computes the whole block."""
        return set(self.styles.values()) == {"replicated"}


def unsupported_model(problem: TrainStep, variant: str) -> str | None:
    """Return why the variant cannot shard the model by its plan and `tp_mapping`, or None if it can.

    The model is made without weights.
    """
    # A pattern of a mapping may name any layer. Without a mapping all layers have one plan.
    depth = problem.depth if problem.tp_mapping else 1
    try:
        model = build(replace(problem, num_layers=depth))
        blocks(problem, model)
        if variant in ("fsdp_dtensor", "fsdp_dtensor_async"):
            require_known_modules(problem, model)
    except UnknownArchitecture as error:
        return str(error)
    return None


def blocks(problem: TrainStep, model: Any) -> list[Block]:
    """Return each block of the decoder layers with the styles of its modules.

    The first pattern that matches a module's name decides: patterns of `problem.tp_mapping` come first, then those of
    the plan of transformers. Modules without a match are replicated. Raises UnknownArchitecture for a model without a
    plan, for a plan that has no correct computation, and for a pattern of `tp_mapping` that matches nothing.
    """
    mapping = parse_mapping(problem.tp_mapping)
    prefix = f"{model.base_model_prefix}."
    modules = list(_modules(model))
    plan = {**mapping}
    for pattern, style in (model.config.base_model_tp_plan or {}).items():
        plan.setdefault(pattern, style)
    for name, module in modules:
        layers = [f"{name}.{layer}".removesuffix(".").removeprefix(prefix) for layer in _linear(module)]
        if not any(_planned(layer, plan) for layer in layers):
            raise UnknownArchitecture(
                f"transformers has no tensor-parallel plan of {name} of {problem.model} ({problem.architecture}): a "
                "tp_mapping can be its plan"
            )
    result = [_block(name, module, plan, prefix, model.config.hidden_size) for name, module in modules]
    names = {name.removeprefix(prefix) for block in result for name in block.styles}
    for pattern in mapping:
        if not any(fnmatchcase(name, pattern) for name in names):
            valid = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name, count=1) for name in sorted(names))
            raise UnknownArchitecture(
                f"tp_mapping: {pattern} matches no module in the blocks of {problem.model}{nearest(pattern, valid)} "
                f"(valid: {', '.join(valid)})"
            )
    embedding = model.get_input_embeddings()
    if type(embedding) is not nn.Embedding and not hasattr(embedding, "scalar_embed_scale"):
        raise UnknownArchitecture(
            f"{problem.model} ({problem.architecture}) has an embedding of an unknown kind: {type(embedding).__name__}"
        )
    for block in result:
        if block.sharded_inside:
            _check_norms(problem, model, block)
    return result


def require_known_modules(problem: TrainStep, model: Any) -> None:
    """Raise UnknownArchitecture for a model that tpbench's own layers cannot shard."""
    for name, module in model.named_modules():
        known = isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm | FusedNorm)
        if not known and next(module.parameters(recurse=False), None) is not None:
            raise UnknownArchitecture(
                f"fsdp_dtensor and fsdp_dtensor_async shard linear layers, embeddings and norms; {name} of "
                f"{problem.model} ({problem.architecture}) is a {type(module).__name__}"
            )


def _check_norms(problem: TrainStep, model: Any, block: Block) -> None:
    """Raise UnknownArchitecture if a rank would need only a share of the weights of a block's norms."""
    for name in block.styles:
        module = model.get_submodule(name)
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear):
            continue
        if not isinstance(weight, Tensor):
            raise UnknownArchitecture(
                f"{name} of {problem.model} ({problem.architecture}), a {type(module).__name__}, has weights that each "
                "rank would use for its share of the columns, which no variant knows"
            )
        if len(weight) != problem.head_dim:
            raise UnknownArchitecture(
                f"{name} of {problem.model} normalises {len(weight)} columns, and a rank would have a share of "
                "them: colwise_gather_output with rowwise_split_input leaves every rank all columns"
            )


def _modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks by name: the children of decoder layers that contain linear layers."""
    layers = decoder_parts(model).layers
    for number, layer in enumerate(decoder_layers(model)):
        for name, child in layer.named_children():
            if _linear(child):
                yield f"{layers}.{number}.{name}", child


def _linear(module: nn.Module) -> list[str]:
    """Return the names of the linear layers in a module."""
    return [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]


def _planned(name: str, plan: Mapping[str, str]) -> str | None:
    """Return the style of the first pattern that matches the name, or None."""
    return next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)


def _block(name: str, module: nn.Module, plan: Mapping[str, str], prefix: str, width: int) -> Block:
    """Return the block of that name, which takes and returns hidden states of this width. Names in the plan lack the
    prefix."""
    owners = {
        f"{name}.{inner}".removesuffix("."): owner
        for inner, owner in module.named_modules()
        if next(owner.parameters(recurse=False), None) is not None
    }
    block = Block(name, {owner: _style(owner.removeprefix(prefix), plan) for owner in owners})
    linear = {name: owner for name, owner in owners.items() if isinstance(owner, nn.Linear)}
    last = [name for name in linear if block.styles[name].startswith("rowwise")]
    kinds = {block.styles[name] for name in linear}
    paired = kinds in ({"colwise", "rowwise"}, {"colwise_gather_output", "rowwise_split_input"}) and len(last) == 1
    # Hidden states enter the column-wise layers and leave the row-wise one.
    fits = all((owner.out_features if name in last else owner.in_features) == width for name, owner in linear.items())
    if kinds != {"replicated"} and not (paired and fits):
        styles = ", ".join(f"{inner.removeprefix(name + '.')}: {style}" for inner, style in block.styles.items())
        raise UnknownArchitecture(
            f"the linear layers of {name} cannot be sharded as {styles} (valid: the last one rowwise and the others "
            "colwise, or rowwise_split_input and colwise_gather_output, or all replicated)"
        )
    return block


def _style(name: str, plan: Mapping[str, str]) -> Style:
    planned = _planned(name, plan) or "replicated"
    style = SYNONYMS.get(planned, planned)
    if style not in STYLES:
        raise UnknownArchitecture(
            f"the model's plan shards {name} as {planned}, which is not known (known: {', '.join(STYLES)}); "
            "tp_mapping can give another style"
        )
    return cast("Style", style)
