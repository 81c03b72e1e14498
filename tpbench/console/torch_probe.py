"""What only torch knows of this machine, as JSON on stdout. Run by `doctor` in a process of its own.

`python -m tpbench.console.torch_probe` looks at one process's view; under torchrun with `--ranks` all ranks together
try NCCL and symmetric memory, which is the one way to know that they work.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tpbench.launcher.torchrun import NO_MULTICAST


def look() -> dict[str, Any]:
    """Versions, and which GPUs reach which directly."""
    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": 0, "refused": []}
    if torch.version.cuda is None:
        return found
    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        found["cuda_error"] = str(error).splitlines()[0]
        return found
    count = torch.cuda.device_count()
    found["gpus"] = count
    found["capability"] = [list(torch.cuda.get_device_capability(index)) for index in range(count)]
    nccl: Any = torch.cuda.nccl
    found["nccl"] = ".".join(map(str, nccl.version()))
    found["refused"] = [
        [one, other]
        for one in range(count)
        for other in range(count)
        if one != other and not torch.cuda.can_device_access_peer(one, other)
    ]
    return found


def together() -> dict[str, Any]:
    """An all-reduce and a read of a neighbour's symmetric memory, on all ranks. Rank 0's account of it."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", device_id=device)
    ranks = dist.get_world_size()
    ones = torch.ones(1024, device=device)
    dist.all_reduce(ones)
    found: dict[str, Any] = {"nccl": bool((ones == ranks).all())}
    try:
        import torch.distributed._symmetric_memory as symmetric

        mine = symmetric.empty(1024, device=device, dtype=torch.float32)
        everyone: Any = dist.group.WORLD
        handle = symmetric.rendezvous(mine, everyone)
        mine.fill_(rank)
        handle.barrier()
        neighbour = (rank + 1) % ranks
        seen = handle.get_buffer(neighbour, (1024,), torch.float32)
        found["symmetric"] = bool((seen == neighbour).all())
        handle.barrier()
    except (RuntimeError, AttributeError, ImportError) as error:
        found["symmetric"] = str(error).splitlines()[0] if str(error) else type(error).__name__
    torch.cuda.synchronize()
    return found


def main() -> None:
    """Print what was found."""
    if "--ranks" not in sys.argv:
        print(json.dumps(look()), flush=True)
        return
    os.environ.update(NO_MULTICAST)
    found = together()
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(0)  # an orderly teardown may abort after all that counts is done


if __name__ == "__main__":
    main()
