"""Shard a decoder over tensor-parallel ranks as Megatron does: replace its modules by sharded ones.

Parameters are DTensors, and the computation uses their local shards. DTensor's dispatcher costs the host about 50 us
for each operation, ten times the launch of the operation itself. A layer that computes on DTensors is limited by the
host long before the GPU is busy.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tpbench.comm.collectives import TokenExchange, gather_before
from tpbench.workloads.train_step.model.models import FusedNorm, modules_in_order
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.sharding.plan import blocks

_REPLICATED = Replicate()


def shard(problem: TrainStep, model: Any, tp: DeviceMesh) -> None:
    """Replace the model's modules by column- and row-sharded ones with sequence parallelism (Megatron,
    arXiv:2205.05198). Raises JobError for a model that has no correct plan."""
    tokens = TokenExchange(tp.get_group(), problem.batch_size, problem.seq_length)
    for block_name, block in blocks(problem, model).items():
        gather_before(model.get_submodule(block_name), tokens.gather)
        for name, style in block.items():
            module: Any = model.get_submodule(name)
            if style == "colwise":
                model.set_submodule(name, ColumnLinear(module, tp))
            elif style == "rowwise":
                model.set_submodule(name, RowLinear(module, tp, tokens))
    for name, module in list(model.named_modules()):
        if isinstance(module, FusedNorm):
            model.set_submodule(name, ReplicatedNorm(module, tp))
    embedding = ShardedEmbedding(model.get_input_embeddings(), tp, tokens)
    model.set_submodule(model.parts.embedding, embedding)
    model.lm_head = ShardedHead(
        model.lm_head, tp, tokens, whole=not problem.vocab_parallel, as_dtensor=problem.train_loss == "torch"
    )
    for part in modules_in_order(model):
        compute_locally(part)
    if problem.tied:
        model.lm_head.weight = embedding.weight


class ShardedModule(nn.Module):
    """A module whose parameters are DTensors and whose forward pass computes with `local_parameters`.

    `compute_locally` sets `local_parameters` before each forward pass. It does so outside of compiled or checkpointed
    code, which would keep a reference to the DTensor's mesh.
    """

    local_parameters: tuple[Tensor, ...]

    def __init__(
        self, module: Any, tp: DeviceMesh, weight: Placement = _REPLICATED, bias: Placement = _REPLICATED
    ) -> None:
        """Take the parameters of a module with these placements."""
        super().__init__()
        self.weight = _distributed(module.weight, tp, weight)
        self.bias = None if getattr(module, "bias", None) is None else _distributed(module.bias, tp, bias)


class ColumnLinear(ShardedModule):
    """A linear layer of which each rank computes a shard of the output's columns."""

    def __init__(self, linear: nn.Linear, tp: DeviceMesh) -> None:
        super().__init__(linear, tp, Shard(0), Shard(0))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, *self.local_parameters)


class RowLinear(ShardedModule):
    """A linear layer of which each rank has a shard of the input's columns. The outputs are summed over the ranks, and
    each rank keeps its share of the tokens."""

    def __init__(self, linear: nn.Linear, tp: DeviceMesh, tokens: TokenExchange) -> None:
        super().__init__(linear, tp, Shard(1))
        self.tokens = tokens

    def forward(self, hidden: Tensor) -> Tensor:
        weight, *bias = self.local_parameters
        summed = self.tokens.scatter(F.linear(hidden, weight))
        return summed + bias[0] if bias else summed


class ShardedEmbedding(ShardedModule):
    """An embedding of which each rank has a shard of the vocabulary's rows. The outputs are summed over the ranks, and
    each rank keeps its share of the tokens."""

    def __init__(self, embedding: nn.Embedding, tp: DeviceMesh, tokens: TokenExchange) -> None:
        super().__init__(embedding, tp, Shard(0))
        self.first_row = tp.get_local_rank() * -(-embedding.num_embeddings // tp.size())
        self.tokens = tokens

    def forward(self, ids: Tensor) -> Tensor:
        (weight,) = self.local_parameters
        rows = ids - self.first_row
        elsewhere = (rows < 0) | (rows >= len(weight))
        vectors = F.embedding(rows.masked_fill(elsewhere, 0), weight)
        return self.tokens.scatter(vectors.masked_fill(elsewhere[..., None], 0.0))


class ShardedHead(ColumnLinear):
    """The head, of which each rank gathers the tokens and computes the logits of its vocabulary shard, (batch,
    sequence, vocabulary / ranks).

    With `as_dtensor` the shards become one DTensor; with `whole` each rank gathers all logits.
    """

    def __init__(
        self, linear: nn.Linear, tp: DeviceMesh, tokens: TokenExchange, *, whole: bool, as_dtensor: bool
    ) -> None:
        super().__init__(linear, tp)
        self.tp, self.vocab, self.tokens = tp, linear.out_features, tokens
        self.whole, self.as_dtensor = whole, as_dtensor

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.tokens.gather(hidden)
        logits = super().forward(hidden)
        if not (self.whole or self.as_dtensor):
            return logits
        # DTensor itself would derive the whole vocabulary from one shard, as if all were equal.
        shape = torch.Size((*logits.shape[:2], self.vocab))
        stride = (shape[1] * shape[2], shape[2], 1)
        sharded = DTensor.from_local(logits, self.tp, [Shard(2)], run_check=False, shape=shape, stride=stride)
        return sharded.redistribute(placements=[Replicate()]).to_local() if self.whole else sharded


class ReplicatedNorm(ShardedModule):
    """A norm with replicated parameters, applied to this rank's share of the tokens or of the heads."""

    def __init__(self, norm: FusedNorm, tp: DeviceMesh) -> None:
        super().__init__(norm, tp)
        self.epsilon = norm.epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        (weight,) = self.local_parameters
        return F.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), self.epsilon)


def compute_locally(part: nn.Module) -> None:
    """Set `local_parameters` of all sharded modules in `part` before each of its forward passes."""
    modules = [module for module in part.modules() if isinstance(module, ShardedModule)]

    def set_local_parameters(*_: Any) -> None:
        parameters = [list(module.parameters()) for module in modules]
        shards = iter(_LocalShards.apply(*(parameter for owned in parameters for parameter in owned)))
        for module, owned in zip(modules, parameters, strict=True):
            module.local_parameters = tuple(next(shards) for _ in owned)

    part.register_forward_pre_hook(set_local_parameters)


def gradient_reduction(model: nn.Module, group: Any) -> Callable[[], None]:
    """Return the function that completes the gradients of a replica's model after its last backward pass.

    Every rank has whole norms and biases of row-parallel layers, but only its share of their gradients.
    The function replaces the shares by their sums over the ranks, with one all-reduce in fp32.
    """
    norms = [module for module in model.modules() if isinstance(module, ReplicatedNorm)]
    biases = [module.bias for module in model.modules() if isinstance(module, RowLinear) and module.bias is not None]
    parameters = [*(parameter for norm in norms for parameter in norm.parameters()), *biases]

    @torch.no_grad()
    def sum_gradients() -> None:
        shares = [parameter.grad.to_local() for parameter in parameters if isinstance(parameter.grad, DTensor)]
        if not shares:  # OLMo's norms have no weights
            return
        flat = torch.cat([share.flatten().float() for share in shares])
        dist.all_reduce(flat, group=group)
        sums = flat.split([share.numel() for share in shares])
        torch._foreach_copy_(shares, [flat_sum.view_as(share) for flat_sum, share in zip(sums, shares, strict=True)])

    return sum_gradients


class _LocalShards(torch.autograd.Function):
    """`to_local` of many DTensors at once. The backward pass of `to_local` itself costs the host 100 us per tensor.
    Here gradients have the layout of their parameters, so there is nothing to derive."""

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.layouts = [parameter._spec for parameter in parameters]
        return tuple(parameter._local_tensor.view_as(parameter._local_tensor) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(
            DTensor(gradient, layout, requires_grad=False)
            for gradient, layout in zip(gradients, ctx.layouts, strict=True)
        )


def _distributed(parameter: Tensor, tp: DeviceMesh, placement: Placement) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(parameter.detach(), tp, [placement], src_data_rank=None))
