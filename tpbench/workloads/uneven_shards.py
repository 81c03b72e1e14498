"""A DTensor of shards that need not be equal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def sharded_along(dim: int, size: int, local: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a tensor of three dimensions, of which each rank of the mesh has the shard `local` along one of them.

    DTensor itself would derive the size of that dimension from one shard, as if all were equal.

    Args:
        dim: The sharded dimension.
        size: The size of that dimension over all ranks.
        local: This rank's shard.
        mesh: A mesh of one dimension.
    """
    whole = list(local.shape)
    whole[dim] = size
    shape, stride = torch.Size(whole), (whole[1] * whole[2], whole[2], 1)
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)
