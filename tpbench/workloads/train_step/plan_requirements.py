"""Requirements of the tensor-parallel variants on a model and its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from tpbench.workloads.train_step.decoder_parts import decoder_parts
from tpbench.workloads.train_step.model_configuration import UnknownArchitecture
from tpbench.workloads.train_step.norms import FusedNorm
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.sharding_plan import Block, blocks


def require_plan(problem: TrainStep, model: Any) -> list[Block]:
    """Return the blocks of a model.

    Raises UnknownArchitecture for a model with further weights and for a plan that has no correct computation.
    """
    parts = decoder_parts(model)
    embedding = model.get_input_embeddings()
    if type(embedding) is not nn.Embedding and not hasattr(embedding, "scalar_embed_scale"):
        raise UnknownArchitecture(
            f"{problem.model} ({problem.architecture}) has an embedding of an unknown kind: {type(embedding).__name__}"
        )
    if parts.others:
        raise UnknownArchitecture(
            f"{problem.model} ({problem.architecture}) has weights that no plan shards: {', '.join(parts.others)}"
        )
    return blocks(problem, model)


def require_norms(problem: TrainStep, model: Any) -> list[Block]:
    """Return the blocks of a model that tpbench's own layers can shard. Raises UnknownArchitecture for others."""
    for name, module in model.named_modules():
        known = isinstance(module, nn.Linear | nn.Embedding | FusedNorm)
        if not known and next(module.parameters(recurse=False), None) is not None:
            raise UnknownArchitecture(
                f"fsdp_dtensor and fsdp_dtensor_async shard linear layers, embeddings and norms; {name} of "
                f"{problem.model} ({problem.architecture}) is a {type(module).__name__}"
            )
    return require_plan(problem, model)


REQUIREMENTS: Mapping[str, Callable[[TrainStep, Any], Any]] = {
    "autotp": require_plan,
    "dtensor_tp": require_plan,
    "fsdp_dtensor": require_norms,
    "fsdp_dtensor_async": require_norms,
}
"""By variant, the function that raises UnknownArchitecture if the variant cannot shard the problem's model."""
