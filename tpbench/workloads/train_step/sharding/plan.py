"""Decide how each module of the decoder layers is sharded over tensor-parallel ranks, from the model's own plan.

transformers gives most model types a plan (`base_model_tp_plan`): patterns of module names, each with a style.
"""

from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias, cast, get_args

from torch import Tensor, nn

from tpbench.settings import JobError
from tpbench.workloads.train_step.model.models import FusedNorm, decoder_layers
from tpbench.workloads.train_step.problem import TrainStep

Style = Literal["colwise", "rowwise", "replicated"]
"""How a module of a block is sharded.

- colwise: a rank computes a share of a linear layer's output columns.
- rowwise: a rank has a share of the input's columns. Outputs are summed over the ranks.
- replicated: every rank has the whole module, a norm of the columns of a head.
"""
Block: TypeAlias = dict[str, Style]
"""The style of each module with parameters in a block, by its name in the model."""


def blocks(problem: TrainStep, model: Any) -> dict[str, Block]:
    """Return the blocks of the decoder layers by name: the children that contain linear layers, such as attention.

    The first pattern of the plan that matches a module's name decides. Modules without a match are replicated. Raises
    JobError for a model without a plan, with modules of other kinds, and for a plan that has no correct computation.
    """
    for module in model.modules():
        shardable = type(module) is nn.Embedding or isinstance(module, nn.Linear | FusedNorm)
        if not shardable and next(module.parameters(recurse=False), None) is not None:
            raise JobError(f"no variant shards {type(module).__name__} of {problem.title} over ranks: use tp_size=1")
    return {
        name: _block(name, child, problem, model)
        for number, layer in enumerate(decoder_layers(model))
        for inner, child in layer.named_children()
        if any(isinstance(module, nn.Linear) for module in child.modules())
        for name in [f"{model.parts.layers}.{number}.{inner}"]
    }


def _block(name: str, module: nn.Module, problem: TrainStep, model: Any) -> Block:
    """Return the styles of a block. Its linear layers take and return hidden states."""
    owners = {
        f"{name}.{inner}".removesuffix("."): owner
        for inner, owner in module.named_modules()
        if next(owner.parameters(recurse=False), None) is not None
    }
    block = {owner: _planned(owner, model) for owner in owners}
    linear = [block[inner] for inner, owner in owners.items() if isinstance(owner, nn.Linear)]
    if {*linear} == {"replicated"}:
        raise JobError(f"transformers has no tensor-parallel plan of {name} of {problem.title}")

    def fits(owner: Any, style: Style) -> bool:
        """Hidden states enter the column-wise layers and leave the row-wise one. Norms are of a head."""
        if isinstance(owner, nn.Linear):
            return (owner.out_features if style == "rowwise" else owner.in_features) == problem.hidden_size
        weight = getattr(owner, "weight", None)
        return isinstance(weight, Tensor) and len(weight) == problem.head_dim

    is_pair = {*linear} == {"colwise", "rowwise"} and linear.count("rowwise") == 1
    if not (is_pair and all(map(fits, owners.values(), block.values()))):
        styles = ", ".join(f"{inner.removeprefix(name + '.')}: {style}" for inner, style in block.items())
        raise JobError(f"no variant can shard {name} of {problem.title} as its plan says: {styles}")
    return block


def _planned(name: str, model: Any) -> Style:
    planned = (style for pattern, style in model.shard_plan.items() if fnmatchcase(name, pattern))
    style = next(planned, "replicated").removesuffix("_with_grad_allreduce")  # the sum follows from the module's place
    if style not in get_args(Style):
        raise JobError(f"the model's plan shards {name} as {style}, which no variant does: use tp_size=1")
    return cast("Style", style)
