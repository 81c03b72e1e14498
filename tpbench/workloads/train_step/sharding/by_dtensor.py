"""Shard a decoder over tensor-parallel ranks by torch's `parallelize_module`, with sequence parallelism.

Parameters, and the operations on them, are DTensors. Between the blocks a rank has its share of each sequence's tokens,
(batch, sequence / ranks, width).
"""

from collections.abc import Callable
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
from tpbench.workloads.train_step.sharding.plan import blocks

TOKENS, COLUMNS = Shard(1), Shard(-1)
"""Placements of hidden states, (batch, sequence, width)."""


def shard(problem: TrainStep, model: Any, tp: DeviceMesh) -> None:
    """Shard the model's parameters, and let its modules exchange what the sharding needs. Raises JobError for a model
    that has no correct plan."""
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

    styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(output_layouts=TOKENS),
        # Norms of queries and keys, (batch, sequence, heads, width), apply to each of a rank's heads.
        "replicated": SequenceParallel(sequence_dim=2, use_local_output=True),
    }
    for name, block in blocks(problem, model).items():
        gather_before(model.get_submodule(name), gather)
        plan |= {inner: styles[style] for inner, style in block.items()}
    for number, layer in enumerate(decoder_layers(model)):
        names = (f"{parts.layers}.{number}.{name}" for name, norm in layer.named_children() if hasattr(norm, "weight"))
        plan |= {name: SequenceParallel(use_local_output=True) for name in names}
    parallelize_module(model, tp, plan, src_data_rank=None)
    if problem.tied:
        model.lm_head.weight = model.get_input_embeddings().weight


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
