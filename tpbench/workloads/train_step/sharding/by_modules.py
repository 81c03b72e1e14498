"""Shard a decoder over tensor-parallel ranks, as Megatron does: replace its modules by tpbench's sharded ones."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpbench.workloads.train_step.model.configuration import UnknownArchitecture
from tpbench.workloads.train_step.model.decoder_parts import decoder_parts, modules_in_order
from tpbench.workloads.train_step.model.norms import FusedNorm
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.sharding.key_value_heads import head_share, needs_repeated_heads
from tpbench.workloads.train_step.sharding.plan import Block, is_activation, share_heads
from tpbench.workloads.train_step.sharding.plan_requirements import KEY_VALUE_LAYERS, require_norms
from tpbench.workloads.train_step.sharding.sequence_parallel import TokenExchange, exchange_tokens
from tpbench.workloads.train_step.sharding.sharded_modules import (
    ColumnLinear,
    RepeatedHeadsLinear,
    ReplicatedActivation,
    ReplicatedLinear,
    ReplicatedNorm,
    RowLinear,
    ShardedEmbedding,
    ShardedHead,
    ShardedModule,
    compute_locally,
)
from tpbench.workloads.train_step.sharding.styles import Style


def shard_by_modules(problem: TrainStep, model: Any, tp: DeviceMesh) -> None:
    """Replace the model's modules by column- and row-sharded ones with sequence parallelism (Megatron,
    arXiv:2205.05198).

    Raises UnknownArchitecture for a model with other modules, or whose plan has no correct computation.
    """
    tokens = TokenExchange(tp.get_group(), problem.batch_size, problem.seq_length)
    repeated = needs_repeated_heads(problem, tp.size())
    share = head_share(problem, tp.size(), tp.get_local_rank())
    for block in require_norms(problem, model, tp.size()):
        if block.sharded_inside:
            share_heads(problem, model.get_submodule(block.name), share)
        exchange_tokens(model.get_submodule(block.name), tokens, replicated=block.replicated)
        for name, style in block.styles.items():
            module = model.get_submodule(name)
            if style == "colwise" and repeated and name.rpartition(".")[2] in KEY_VALUE_LAYERS:
                model.set_submodule(name, RepeatedHeadsLinear(module, tp, share, problem.head_dim))
            else:
                model.set_submodule(name, _sharded(module, style, block, tp, tokens))
    for name, module in list(model.named_modules()):
        if isinstance(module, FusedNorm):
            model.set_submodule(name, ReplicatedNorm(module, tp))
    embedding = ShardedEmbedding(model.get_input_embeddings(), tp, tokens)
    model.set_submodule(decoder_parts(model).embedding, embedding)
    # The linear loss replaces the forward pass of the head: it takes this rank's tokens, and gathers them itself.
    model.lm_head = ShardedHead(
        model.lm_head, tp, tokens, whole=not problem.vocab_parallel, as_dtensor=problem.train_loss == "torch"
    )
    for part in modules_in_order(model):
        compute_locally(part)
    if problem.tied:
        model.lm_head.weight = embedding.weight
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise UnknownArchitecture(f"{name} of {problem.model} ({problem.architecture}) is in no block and no norm")


def _sharded(module: Any, style: Style, block: Block, tp: DeviceMesh, tokens: TokenExchange) -> ShardedModule:
    if isinstance(module, FusedNorm):
        return ReplicatedNorm(module, tp, partial_gradient=block.sharded_inside)
    if is_activation(module):
        return ReplicatedActivation(module, tp, partial_gradient=block.sharded_inside)
    if style == "replicated":
        return ReplicatedLinear(module, tp)
    if style.startswith("colwise"):
        return ColumnLinear(module, tp, gather_output=style == "colwise_gather_output")
    return RowLinear(module, tp, tokens, split_input=style == "rowwise_split_input")
