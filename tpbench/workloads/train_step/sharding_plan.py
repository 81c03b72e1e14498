"""Decide how each module of the decoder layers is sharded over tensor-parallel ranks, from the model's own plan.

transformers gives each model type a plan (`base_model_tp_plan`): patterns of module names, each with a style.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch import nn

from tpbench.workloads.train_step.model_configuration import UnknownArchitecture

Style = Literal["colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "replicated"]
"""How a module of a block is sharded.

- colwise: a rank computes a share of a linear layer's output columns.
- rowwise: a rank has a share of the input's columns. Outputs are summed over the ranks.
- colwise_gather_output: as colwise. Then every rank gathers all output columns.
- rowwise_split_input: as rowwise. A rank takes its columns of an input that it has whole.
- replicated: every rank has the whole module.
"""
_SYNONYMS = {
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


def blocks(model: Any, plan: Mapping[str, str] | None = None) -> Iterator[Block]:
    """Yield each block of the decoder layers with the styles of its modules.

    `plan` has patterns of names in `model.model`, such as `layers.*.mlp.up_proj`. None: the model's own plan. Modules
    that no pattern matches are replicated. Raises UnknownArchitecture for a plan that has no correct computation.
    """
    plan = model.config.base_model_tp_plan if plan is None else plan
    if not plan:
        raise UnknownArchitecture(f"transformers has no tensor-parallel plan for model type {model.config.model_type}")
    for number, layer in enumerate(model.model.layers):
        for child_name, child in layer.named_children():
            if any(isinstance(each, nn.Linear) for each in child.modules()):
                yield _block(f"model.layers.{number}.{child_name}", child, plan)


def _block(name: str, module: nn.Module, plan: Mapping[str, str]) -> Block:
    owners = {
        f"{name}.{each}".removesuffix("."): owner
        for each, owner in module.named_modules()
        if next(owner.parameters(recurse=False), None) is not None
    }
    block = Block(name, {each: _style(each, plan) for each in owners})
    linear = {block.styles[each] for each, owner in owners.items() if isinstance(owner, nn.Linear)}
    if linear not in ({"colwise", "rowwise"}, {"colwise_gather_output", "rowwise_split_input"}, {"replicated"}):
        found = ", ".join(f"{each.removeprefix(name + '.')}: {style}" for each, style in block.styles.items())
        raise UnknownArchitecture(
            f"the linear layers of {name} cannot be sharded so: {found} (valid: colwise with rowwise, "
            "colwise_gather_output with rowwise_split_input, or all replicated)"
        )
    return block


def _style(name: str, plan: Mapping[str, str]) -> Style:
    inner = name.removeprefix("model.")
    found = next((style for pattern, style in plan.items() if fnmatchcase(inner, pattern)), "replicated")
    style: Any = _SYNONYMS.get(found, found)
    if style not in get_args(Style):
        raise UnknownArchitecture(f"{name} is {found} in the plan (known: {', '.join(get_args(Style))})")
    checked: Style = style
    return checked
