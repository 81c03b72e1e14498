"""Give a model memory, buffers and initial weights from the seed.

Every sharding gives the same bits, and each rank computes only its own shard.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tpbench.workloads.hashing import NORMAL_DEVIATION, hash_index, normal
from tpbench.workloads.train_step.model.configuration import UnknownArchitecture

DEVIATION = 0.02
"""Standard deviation of matrices, as in Qwen and Llama. Norms multiply by one at first (Gemma's, which add one to their
weights, have zeros), and biases are zeros."""

_CHUNK_ELEMENTS = 2**22
"""Elements computed at a time; several temporary tensors of this size exist at once."""


def materialise(model: Any, device: torch.device, seed: int) -> None:
    """Move the whole model to `device` and fill it with its initial weights."""
    place_buffers(model, device)
    allocate(model, device)
    model.tie_weights()  # `allocate` gave tied modules separate memory
    fill(model, "", seed)


def place_buffers(model: Any, device: torch.device) -> None:
    """Replace rotary embeddings on the meta device by new ones on `device`, and give other modules their buffers.

    Raises UnknownArchitecture for a buffer that transformers does not initialise.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            buffers = dict(child.named_buffers(recurse=False))
            if not any(buffer.is_meta for buffer in buffers.values()):
                continue
            if next(child.parameters(recurse=False), None) is None:
                with torch.device(device):
                    setattr(parent, name, type(child)(model.config))
                continue
            for buffer_name, buffer in buffers.items():
                setattr(child, buffer_name, torch.full_like(buffer, torch.nan, device=device))
            model._init_weights(child)
            if any(buffer.isnan().any() for buffer in child.buffers(recurse=False)):
                raise UnknownArchitecture(
                    f"{type(child).__name__} holds buffers, for which there are no initial values"
                )


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give the module's parameters uninitialised memory on `device`, and keep its buffers."""
    buffers = dict(module.named_buffers())
    module.to_empty(device=device)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])


@torch.no_grad()
def fill(module: nn.Module, prefix: str, seed: int) -> None:
    """Fill every parameter of `module` with its initial values.

    `prefix` is the module's name in the model with a dot at its end, or empty for the whole model.
    """
    offsets = {
        f"{name}.weight".removeprefix("."): getattr(child, "weight_offset", 0.0)
        for name, child in module.named_modules()
    }
    for name, parameter in module.named_parameters():
        fill_parameter(parameter, prefix + name, seed, one=1.0 - offsets.get(name, 0.0))


@torch.no_grad()
def fill_parameter(parameter: Tensor, name: str, seed: int, *, one: float = 1.0) -> None:
    """Fill a vector with `one` (a bias with zeros), and a matrix with normal numbers hashed from (seed, name, row,
    column)."""
    shard, (first_row, first_column) = _shard(parameter)
    if parameter.dim() < 2:
        shard.fill_(0.0 if name.endswith("bias") else one)
        return
    stream = zlib.crc32(name.encode()) & ~1
    rows, columns = shard.shape
    across = torch.arange(first_column, first_column + columns, device=shard.device)
    column_hash = hash_index(seed, stream + 1, across)
    step = max(1, _CHUNK_ELEMENTS // max(1, columns))
    for start in range(0, rows, step):
        part = shard[start : start + step]
        down = torch.arange(first_row + start, first_row + start + len(part), device=shard.device)
        numbers = normal(hash_index(seed, stream, down), column_hash)
        part.copy_(numbers.mul_(DEVIATION / NORMAL_DEVIATION))


def _shard(parameter: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Return this rank's shard and the global row and column of its first element."""
    if not isinstance(parameter, DTensor):
        return parameter, (0, 0)
    start = [0, 0]
    (placement,) = parameter.placements  # over the tensor-parallel mesh: replicas shard later
    if isinstance(placement, Shard):
        size = parameter.shape[placement.dim]
        chunk = -(-size // parameter.device_mesh.size())
        start[placement.dim] = min(size, parameter.device_mesh.get_local_rank() * chunk)
    elif not isinstance(placement, Replicate):
        raise TypeError(f"a parameter cannot be {placement}")
    return parameter.to_local(), (start[0], start[1])
