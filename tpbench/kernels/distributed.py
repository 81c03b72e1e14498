"""Collectives under one name for all versions of torch, an all-gather of small Python values, and NVLink multicast."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed both functions and warns about the old names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""all_gather(gathered, own, group, async_op): gather along the first dimension, in rank order."""
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""reduce_scatter(own, values, op, group, async_op): reduce, and keep this rank's part of the first dimension."""
ENVIRONMENT = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
"""These variables turn NVLink multicast off: a process that dies with a multicast object mapped can leave the fabric
unusable for other processes."""


def gather_by_rank(values: Tensor, group: dist.ProcessGroup | None, world_size: int) -> Tensor:
    """Return the values of all ranks, (world_size, *values.shape), in rank order; of one rank a view. Collective."""
    if world_size == 1:
        return values[None]
    gathered = torch.empty((world_size * values.shape[0], *values.shape[1:]), dtype=values.dtype, device=values.device)
    all_gather(gathered, values, group=group)
    return gathered.view(world_size, *values.shape)


def gather_values(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Return one value from each rank, in rank order, as JSON returns it: a tuple comes back as a list. Collective.

    torch's all_gather_object would unpickle what the other ranks send. `device` is used if the group has no backend for
    CPU tensors.
    """
    place = torch.device("cpu") if "cpu" in str(dist.get_backend_config(group)) else device
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(place)
    world_size = dist.get_world_size(group)
    sizes = gather_by_rank(torch.tensor([len(content)], device=place), group, world_size).flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=place)
    padded[: len(content)] = content
    texts = gather_by_rank(padded, group, world_size).tolist()
    return [json.loads(bytes(text[:size])) for text, size in zip(texts, sizes, strict=True)]


def machine_id() -> str:
    """Return a text that is equal for two processes under one Linux kernel and one host name.

    Containers of one machine have the same id of a boot. Machines of one name do not.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"


def forbid_multicast() -> None:
    """Set the variables that turn NVLink multicast off. Raises RuntimeError if one is already set otherwise."""
    for name, value in ENVIRONMENT.items():
        if os.environ.setdefault(name, value) != value:
            raise RuntimeError(f"symmetric memory needs {name}={value}, it is {os.environ[name]}")
