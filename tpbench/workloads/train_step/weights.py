"""Initial weights from the seed: the same bits however the model is sharded, each rank making only what it holds."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tpbench.workloads.hashing import hash_index, normal

DEVIATION = 0.02
"""Standard deviation of matrices, as Qwen and Llama begin. Norms begin as ones, biases as zeros."""

_OF_NORMAL = 4 / 3**0.5
"""That of `hashing.normal`: four uniform numbers of width 4."""
_CHUNK = 2**22
"""Elements made at a time: a few temporaries of it exist at once."""


@torch.no_grad()
def fill(module: nn.Module, prefix: str, seed: int) -> None:
    """Give every parameter below `module` its initial values. `prefix`: the module's name in the model, with a dot at
    its end, or nothing for the model."""
    for name, parameter in module.named_parameters():
        fill_parameter(parameter, prefix + name, seed)


@torch.no_grad()
def fill_parameter(parameter: Tensor, name: str, seed: int) -> None:
    """A vector becomes ones (a bias zeros), a matrix normal numbers by (seed, name, global row, global column)."""
    local, (first_row, first_column) = _local(parameter)
    if parameter.dim() < 2:
        local.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    stream = zlib.crc32(name.encode()) & ~1
    rows, columns = local.shape
    across = torch.arange(first_column, first_column + columns, device=local.device)
    column_hash = hash_index(seed, stream + 1, across)
    step = max(1, _CHUNK // max(1, columns))
    for start in range(0, rows, step):
        part = local[start : start + step]
        down = torch.arange(first_row + start, first_row + start + len(part), device=local.device)
        made = normal(hash_index(seed, stream, down), column_hash)
        part.copy_(made.mul_(DEVIATION / _OF_NORMAL))


def _local(parameter: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """What this rank holds of it, and the global row and column where that begins."""
    if not isinstance(parameter, DTensor):
        return parameter, (0, 0)
    start = [0, 0]
    (placement,) = parameter.placements  # a tensor-parallel mesh; replicas shard only afterwards
    if isinstance(placement, Shard):
        size = parameter.shape[placement.dim]
        chunk = -(-size // parameter.device_mesh.size())
        start[placement.dim] = min(size, parameter.device_mesh.get_local_rank() * chunk)
    elif not isinstance(placement, Replicate):
        raise TypeError(f"a parameter cannot be {placement}")
    return parameter.to_local(), (start[0], start[1])
