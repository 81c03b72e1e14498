"""Requirements of the tensor-parallel variants on a model and its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from tpbench.workloads.train_step.model.configuration import UnknownArchitecture
from tpbench.workloads.train_step.model.decoder_parts import decoder_parts
from tpbench.workloads.train_step.model.norms import FusedNorm
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.sharding.key_value_heads import needs_repeated_heads
from tpbench.workloads.train_step.sharding.plan import Block, blocks, is_activation

KEY_VALUE_LAYERS = ("k_proj", "v_proj")
"""Names of the layers that compute keys and values. Models of transformers with fewer key-value heads than query heads
call them so."""


def require_plan(problem: TrainStep, model: Any, tp_size: int) -> list[Block]:
    """Return the blocks of a model that is to be sharded over `tp_size` ranks.

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


def require_norms(problem: TrainStep, model: Any, tp_size: int) -> list[Block]:
    """Return the blocks of a model that tpbench's own layers can shard. Raises UnknownArchitecture for others."""
    for name, module in model.named_modules():
        known = isinstance(module, nn.Linear | nn.Embedding | FusedNorm) or is_activation(module)
        if not known and next(module.parameters(recurse=False), None) is not None:
            raise UnknownArchitecture(
                f"fsdp_dtensor and fsdp_dtensor_async shard linear layers, embeddings and norms; {name} of "
                f"{problem.model} ({problem.architecture}) is a {type(module).__name__}"
            )
    result = require_plan(problem, model, tp_size)
    if needs_repeated_heads(problem, tp_size):
        for block in result:
            _require_key_value_layers(problem, model, block)
    return result


def _require_key_value_layers(problem: TrainStep, model: Any, block: Block) -> None:
    """Raise UnknownArchitecture if ranks cannot repeat the key-value heads of a sharded attention."""
    module = model.get_submodule(block.name)
    if not block.sharded_inside or not hasattr(module, "head_dim"):
        return
    layers = {name.rpartition(".")[2] for name in block.styles}
    if not (layers.issuperset(KEY_VALUE_LAYERS) and hasattr(module, "num_key_value_groups")):
        raise UnknownArchitecture(
            f"{block.name} of {problem.model} ({problem.architecture}) has no {' and '.join(KEY_VALUE_LAYERS)} whose "
            f"heads several ranks could repeat: tp_size must divide kv_heads={problem.kv_heads}"
        )


REQUIREMENTS: Mapping[str, Callable[[TrainStep, Any, int], Any]] = {
    "autotp": require_plan,
    "dtensor_tp": require_plan,
    "fsdp_dtensor": require_norms,
    "fsdp_dtensor_async": require_norms,
}
"""By variant, the function that raises UnknownArchitecture if the variant cannot shard the problem's model."""
