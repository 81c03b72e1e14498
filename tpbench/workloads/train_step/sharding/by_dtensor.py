"""Shard a decoder over tensor-parallel ranks by torch's `parallelize_module`, with sequence parallelism.

Parameters, and the operations on them, are DTensors. Between the blocks a rank has its share of each sequence's tokens,
(batch, sequence / ranks, width).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tpbench.comm.collectives import gather_before
from tpbench.workloads.train_step.model.models import decoder_layers
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.sharding.plan import Block, Style, blocks

TOKENS, COLUMNS = Shard(1), Shard(-1)
"""Placements of hidden states, (batch, sequence, width)."""


def unsupported_model(problem: TrainStep, model: Any, plan: Sequence[Block]) -> str | None:
    """Return None: DTensor computes with any module that the plan shards."""
    return None


def shard(problem: TrainStep, model: Any, tp: DeviceMesh) -> None:
    """Shard the model's parameters, and let its modules exchange what the sharding needs.

    Raises UnknownArchitecture for a model whose plan has no correct computation.
    """
    parts = model.parts
    plan: dict[str, ParallelStyle] = {
        parts.embedding: RowwiseParallel(input_layouts=Replicate(), output_layouts=TOKENS),
        "lm_head": ColwiseParallel(
            input_layouts=TOKENS,
            output_layouts=COLUMNS if problem.vocab_parallel else Replicate(),
            use_local_output=not problem.vocab_parallel,
        ),
    }
    if hasattr(model.get_submodule(parts.norm), "weight"):
        plan[parts.norm] = SequenceParallel(use_local_output=True)

    def gather(share: Tensor) -> Tensor:
        return DTensor.from_local(share, tp, [TOKENS], run_check=False).redistribute(placements=[Replicate()])

    for block in blocks(problem, model):
        gather_before(model.get_submodule(block.name), gather)
        plan |= {name: _style(style, block) for name, style in block.styles.items()}
    for number, layer in enumerate(decoder_layers(model)):
        names = (f"{parts.layers}.{number}.{name}" for name, norm in layer.named_children() if hasattr(norm, "weight"))
        plan |= {name: SequenceParallel(use_local_output=True) for name in names}
    parallelize_module(model, tp, plan, src_data_rank=None)
    if problem.tied:
        model.lm_head.weight = model.get_input_embeddings().weight


def _style(style: Style, block: Block) -> ParallelStyle:
    if style == "replicated":
        # Norms of queries and keys, (batch, sequence, heads, width), apply to each of a rank's heads.
        norm = SequenceParallel(sequence_dim=2, use_local_output=True)
        if block.gathers_columns:
            norm.sequence_sharding = (Replicate(),)  # type: ignore[assignment]  # every rank has the whole input
        return norm
    return {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(output_layouts=TOKENS),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate(), output_layouts=TOKENS),
    }[style]


def gradient_reduction(model: nn.Module, group: Any) -> Callable[[], None]:
    """Return the function that sums over the ranks each gradient of which a rank has only its share: those of norms on
    shares of the tokens. Under FSDP this has happened before."""
    parameters = list(model.parameters())

    @torch.no_grad()
    def reduce_partial_gradients() -> None:
        for parameter in parameters:
            grad = parameter.grad
            if isinstance(parameter, DTensor) and isinstance(grad, DTensor) and grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(placements=parameter.placements)

    return reduce_partial_gradients
