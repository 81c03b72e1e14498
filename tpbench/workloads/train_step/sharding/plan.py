"""Decide how each module of the decoder layers is sharded over tensor-parallel ranks, from the model's own plan.

transformers gives most model types a plan (`base_model_tp_plan`): patterns of module names, each with a style.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import Tensor, nn

from tpbench.suggestions import nearest
from tpbench.workloads.train_step.model.configuration import UnknownArchitecture
from tpbench.workloads.train_step.model.decoder_parts import decoder_layers, decoder_parts
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.sharding.key_value_heads import HeadShare
from tpbench.workloads.train_step.sharding.styles import PLANS, STYLES, SYNONYMS, Style, parse_mapping


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


def blocks(problem: TrainStep, model: Any) -> list[Block]:
    """Return each block of the decoder layers with the styles of its modules.

    The first pattern that matches a module's name decides: patterns of `problem.tp_mapping` come first, then those of
    the model's plan, from `PLANS` or from transformers, or of the usual plan if it has none. Modules without a match
    are replicated. Raises UnknownArchitecture for a plan that has no correct computation, and for a pattern of
    `tp_mapping` that matches nothing.
    """
    mapping = parse_mapping(problem.tp_mapping)
    base = PLANS.get(problem.architecture) or plan_of_transformers(model) or _usual_plan(problem, model, mapping)
    plan = mapping | {pattern: style for pattern, style in base.items() if pattern not in mapping}
    prefix = f"{model.base_model_prefix}."
    result = [_block(*each, plan, prefix, model.config.hidden_size) for each in _modules(model)]
    names = {name.removeprefix(prefix) for block in result for name in block.styles}
    for pattern in mapping:
        if not any(fnmatchcase(name, pattern) for name in names):
            known = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name, count=1) for name in sorted(names))
            raise UnknownArchitecture(
                f"tp_mapping: {pattern} matches no module in the blocks of {problem.model}{nearest(pattern, known)} "
                f"(valid: {', '.join(known)})"
            )
    for block in result:
        if block.sharded_inside:
            _check_norms(problem, model, block)
    return result


def plan_of_transformers(model: Any) -> Mapping[str, str]:
    """Return the plan of transformers for a model, or an empty one if it names no linear layer of a block.

    Transformers 5.24 gives some model types a plan of the embedding alone. With it every rank would compute all blocks.
    """
    plan: Mapping[str, str] = model.config.base_model_tp_plan or {}
    prefix = f"{model.base_model_prefix}."
    names = [
        f"{block}.{name}".removesuffix(".").removeprefix(prefix)
        for block, module in _modules(model)
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    return plan if any(fnmatchcase(name, pattern) for name in names for pattern in plan) else {}


def _check_norms(problem: TrainStep, model: Any, block: Block) -> None:
    """Raise UnknownArchitecture if a rank would need only a share of the weights of a block's norms."""
    for name in block.styles:
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear) or is_activation(module):
            continue
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or re.search(r"\.\d+", name.removeprefix(block.name)):
            raise UnknownArchitecture(
                f"{name} of {problem.model} ({problem.architecture}), a {type(module).__name__}, has weights that each "
                "rank would use for its share of the columns, which no variant knows"
            )
        if len(weight) != problem.head_dim:
            raise UnknownArchitecture(
                f"{name} of {problem.model} normalises {len(weight)} columns, and a rank would have a share of "
                "them: colwise_gather_output with rowwise_split_input leaves every rank all columns"
            )


def is_activation(module: nn.Module) -> bool:
    """Return whether a module has numbers for its parameters, so that each rank can apply it to its columns."""
    parameters = list(module.parameters(recurse=False))
    return bool(parameters) and all(each.numel() == 1 for each in parameters)


def share_heads(problem: TrainStep, module: Any, share: HeadShare) -> None:
    """Let a sharded block compute with a rank's heads, if it keeps their numbers in attributes as StableLM does."""
    numbers = {
        "num_heads": (problem.heads, share.queries),
        "num_key_value_heads": (problem.kv_heads, len(share.key_values)),
        "num_key_value_groups": (problem.heads // problem.kv_heads, share.group),
    }
    for name, (of_model, of_rank) in numbers.items():
        if getattr(module, name, None) == of_model:
            setattr(module, name, of_rank)


def _usual_plan(problem: TrainStep, model: Any, mapping: Mapping[str, str]) -> dict[str, str]:
    """Return Megatron's plan for a model without one: in each block the last linear layer is rowwise, and the others
    are colwise. Blocks that the mapping names are left out.

    Raises UnknownArchitecture for a block whose first layers are not one for each of queries, keys, values, gate, up.
    """
    widths = {problem.heads * problem.head_dim, problem.kv_heads * problem.head_dim, problem.ffn_size}
    plan: dict[str, str] = {}
    for block, module in _modules(model):
        inner = block.removeprefix(f"{model.base_model_prefix}.")
        linear = {f"{inner}.{name}": each for name, each in module.named_modules() if isinstance(each, nn.Linear)}
        if any(fnmatchcase(name, pattern) for name in linear for pattern in mapping):
            continue
        *first, last = linear
        if not (first and all(linear[name].out_features in widths for name in first)):
            raise UnknownArchitecture(
                f"transformers has no tensor-parallel plan for {problem.model} ({problem.architecture}), and {inner} "
                "has no layer for each of queries, keys and values, or up; a tp_mapping can be its plan"
            )
        plan |= dict.fromkeys(first, "colwise") | {last: "rowwise"}
    return plan


def _modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks by name: the children of decoder layers that contain linear layers."""
    layers = decoder_parts(model).layers
    for number, layer in enumerate(decoder_layers(model)):
        for name, child in layer.named_children():
            if any(isinstance(each, nn.Linear) for each in child.modules()):
                yield f"{layers}.{number}.{name}", child


def _block(name: str, module: nn.Module, plan: Mapping[str, str], prefix: str, width: int) -> Block:
    """Return the block of that name, which takes and returns hidden states of this width. Names in the plan lack the
    prefix."""
    owners = {
        f"{name}.{each}".removesuffix("."): owner
        for each, owner in module.named_modules()
        if next(owner.parameters(recurse=False), None) is not None
    }
    block = Block(name, {each: _style(each.removeprefix(prefix), plan) for each in owners})
    linear = {each: owner for each, owner in owners.items() if isinstance(owner, nn.Linear)}
    last = [each for each in linear if block.styles[each].startswith("rowwise")]
    kinds = {block.styles[each] for each in linear}
    paired = kinds in ({"colwise", "rowwise"}, {"colwise_gather_output", "rowwise_split_input"}) and len(last) == 1
    # Hidden states enter the column-wise layers and leave the row-wise one.
    fits = all((owner.out_features if each in last else owner.in_features) == width for each, owner in linear.items())
    if kinds != {"replicated"} and not (paired and fits):
        found = ", ".join(f"{each.removeprefix(name + '.')}: {style}" for each, style in block.styles.items())
        raise UnknownArchitecture(
            f"the linear layers of {name} cannot be sharded as {found} (valid: the last one rowwise and the others "
            "colwise, or rowwise_split_input and colwise_gather_output, or all replicated)"
        )
    return block


def _style(name: str, plan: Mapping[str, str]) -> Style:
    found = next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), "replicated")
    style = SYNONYMS.get(found, found)
    if style not in STYLES:
        raise UnknownArchitecture(
            f"the model's plan shards {name} as {found}, which is not known (known: {', '.join(STYLES)}); "
            "tp_mapping can give another style"
        )
    return cast("Style", style)
