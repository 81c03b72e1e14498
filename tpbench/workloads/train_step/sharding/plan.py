"""Decide how each module of the decoder layers is sharded over tensor-parallel ranks, from the model's own plan.

transformers gives most model types a plan (`base_model_tp_plan`): patterns of module names, each with a style.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, cast, get_args

from torch import Tensor, nn

from tpbench.workloads.train_step.model.configuration import UnknownArchitecture
from tpbench.workloads.train_step.model.models import decoder_layers
from tpbench.workloads.train_step.problem import TrainStep

Style = Literal["colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "replicated"]
"""How a module of a block is sharded.

- colwise: a rank computes a share of a linear layer's output columns.
- rowwise: a rank has a share of the input's columns. Outputs are summed over the ranks.
- colwise_gather_output: as colwise. Then every rank gathers all output columns.
- rowwise_split_input: as rowwise. A rank takes its columns of an input that it has whole.
- replicated: every rank has the whole module, a norm.
"""


@dataclass(frozen=True)
class Block:
    """A module with linear layers that a decoder layer calls with hidden states: attention or feed-forward."""

    name: str
    """The module's name in the model."""
    styles: Mapping[str, Style]
    """The style of each module in the block that has parameters, by name in the model."""

    @property
    def gathers_columns(self) -> bool:
        """True if every rank has all columns between the block's linear layers. Otherwise a rank has only its share of
        the columns or heads there, and of a replicated module's gradient."""
        return "rowwise_split_input" in self.styles.values()


def blocks(problem: TrainStep, model: Any) -> list[Block]:
    """Return each block of the decoder layers with the styles of its modules: the children of decoder layers that
    contain linear layers.

    The first pattern of the plan that matches a module's name decides. Modules without a match are replicated. Raises
    UnknownArchitecture for a model without a plan, and for a plan that has no correct computation.
    """
    embedding = model.get_input_embeddings()
    if type(embedding) is not nn.Embedding and not hasattr(embedding, "scalar_embed_scale"):
        raise UnknownArchitecture(
            f"{problem.model} ({problem.architecture}) has an embedding of an unknown kind: {type(embedding).__name__}"
        )
    layers = model.parts.layers
    return [
        _block(f"{layers}.{number}.{name}", child, problem, model)
        for number, layer in enumerate(decoder_layers(model))
        for name, child in layer.named_children()
        if any(isinstance(module, nn.Linear) for module in child.modules())
    ]


def _block(name: str, module: nn.Module, problem: TrainStep, model: Any) -> Block:
    """Return the block of that name. Its linear layers take and return hidden states."""
    owners = {
        f"{name}.{inner}".removesuffix("."): owner
        for inner, owner in module.named_modules()
        if next(owner.parameters(recurse=False), None) is not None
    }
    block = Block(name, {owner: _planned(owner, model) for owner in owners})
    place = f"{name} of {problem.model} ({problem.architecture})"
    linear = [block.styles[inner] for inner, owner in owners.items() if isinstance(owner, nn.Linear)]
    if {*linear} == {"replicated"}:
        raise UnknownArchitecture(f"transformers has no tensor-parallel plan of {place}")

    def fits(owner: Any, style: Style) -> bool:
        """Hidden states enter the column-wise layers and leave the row-wise one. Other weights, such as those of norms,
        are of a head, unless every rank has all columns."""
        if isinstance(owner, nn.Linear):
            return (owner.out_features if style.startswith("rowwise") else owner.in_features) == problem.hidden_size
        weight = getattr(owner, "weight", None)
        return block.gathers_columns or (isinstance(weight, Tensor) and len(weight) == problem.head_dim)

    paired = {*linear} in ({"colwise", "rowwise"}, {"colwise_gather_output", "rowwise_split_input"})
    one_last = sum(style.startswith("rowwise") for style in linear) == 1
    if not (paired and one_last and all(map(fits, owners.values(), block.styles.values()))):
        styles = ", ".join(f"{inner.removeprefix(name + '.')}: {style}" for inner, style in block.styles.items())
        raise UnknownArchitecture(f"no variant can shard {place} as its plan says: {styles}")
    return block


def _planned(name: str, model: Any) -> Style:
    planned = (style for pattern, style in model.shard_plan.items() if fnmatchcase(name, pattern))
    style = next(planned, "replicated").removesuffix("_with_grad_allreduce")  # the sum follows from the module's place
    if style not in get_args(Style):
        raise UnknownArchitecture(f"the model's plan shards {name} as {style}, which tpbench does not know")
    return cast("Style", style)
