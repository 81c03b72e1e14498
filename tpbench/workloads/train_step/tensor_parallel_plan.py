"""Shard a decoder's parameters over tensor-parallel ranks, as Megatron does."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpbench.workloads.train_step.model_configuration import UnknownArchitecture
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.sequence_parallel import TokenExchange
from tpbench.workloads.train_step.sharded_modules import (
    ColumnLinear,
    ReplicatedNorm,
    RowLinear,
    ShardedEmbedding,
    ShardedHead,
    compute_locally,
)


def apply_tensor_parallelism(problem: TrainStep, model: Any, tp: DeviceMesh) -> None:
    """Replace the model's modules by column- and row-sharded ones with sequence parallelism (Megatron,
    arXiv:2205.05198).

    Raises UnknownArchitecture for a model whose modules are not named as Llama's and Qwen's are.
    """
    try:
        _replace_modules(problem, model, tp)
    except AttributeError as error:
        raise UnknownArchitecture(_unknown(problem, str(error))) from None
    for part in (model.model.embed_tokens, *model.model.layers, model.model.norm, model.lm_head):
        compute_locally(part)
    if problem.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise UnknownArchitecture(_unknown(problem, name))


def _replace_modules(problem: TrainStep, model: Any, tp: DeviceMesh) -> None:
    tokens = TokenExchange(tp.get_group(), problem.seq_length)
    model.model.embed_tokens = ShardedEmbedding(model.model.embed_tokens, tp, tokens)
    model.lm_head = ShardedHead(
        model.lm_head, tp, whole=not problem.vocab_parallel, as_dtensor=problem.train_loss == "torch"
    )
    # The linear loss takes this rank's share of the tokens, and gathers them itself.
    behind = None if problem.train_loss == "tpbench_linear" else tokens
    model.model.norm = ReplicatedNorm(model.model.norm, tp, behind)
    for layer in model.model.layers:
        attention, feed_forward = layer.self_attn, layer.mlp
        layer.input_layernorm = ReplicatedNorm(layer.input_layernorm, tp, tokens)
        attention.q_proj = ColumnLinear(attention.q_proj, tp)
        attention.k_proj = ColumnLinear(attention.k_proj, tp)
        attention.v_proj = ColumnLinear(attention.v_proj, tp)
        attention.o_proj = RowLinear(attention.o_proj, tp, tokens)
        if hasattr(attention, "q_norm"):
            # These norms apply to each head of queries and keys, and a rank has only its heads: nothing is gathered.
            attention.q_norm = ReplicatedNorm(attention.q_norm, tp)
            attention.k_norm = ReplicatedNorm(attention.k_norm, tp)
        layer.post_attention_layernorm = ReplicatedNorm(layer.post_attention_layernorm, tp, tokens)
        feed_forward.gate_proj = ColumnLinear(feed_forward.gate_proj, tp)
        feed_forward.up_proj = ColumnLinear(feed_forward.up_proj, tp)
        feed_forward.down_proj = RowLinear(feed_forward.down_proj, tp, tokens)


def _unknown(problem: TrainStep, what: str) -> str:
    return (
        f"the tensor-parallel plan does not know {what} of {problem.model} ({problem.architecture}); it covers "
        "decoders whose modules are named as Llama's and Qwen3's"
    )
