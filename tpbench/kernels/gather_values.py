"""All-gather of small Python values as JSON."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_values(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Return one value from each rank, in rank order, as JSON returns it: a tuple comes back as a list. Collective.

    torch's all_gather_object would unpickle what the other ranks send. `device` is used if the group has no backend for
    CPU tensors.
    """
    place = torch.device("cpu") if "cpu" in str(dist.get_backend_config(group)) else device
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(place)
    sizes = _gather(torch.tensor([len(content)], device=place), group)
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8, device=place)
    padded[: len(content)] = content
    texts = zip(_gather(padded, group), sizes, strict=True)
    return [json.loads(bytes(text[: int(size)].tolist())) for text, size in texts]


def _gather(own: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    return gathered
