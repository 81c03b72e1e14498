"""Facts of this machine that only torch knows, printed as lines of JSON. `doctor` runs this module by torchrun.

All ranks together test an all-reduce and symmetric memory: nothing but such a test shows that they work. Without GPUs
they use gloo.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tpbench.launcher.torchrun import NO_MULTICAST


def facts_of_torch() -> dict[str, Any]:
    """Return versions, and what torch sees of the GPUs."""
    import torch

    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": 0}
    if torch.version.cuda is None:
        return facts
    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        return {**facts, "cuda_error": str(error).splitlines()[0]}
    nccl: Any = torch.cuda.nccl
    gpus = range(torch.cuda.device_count())
    capability = min(torch.cuda.get_device_capability(index) for index in gpus)
    return {**facts, "gpus": len(gpus), "capability": capability, "nccl": ".".join(map(str, nccl.version()))}


def communication(rank: int, ranks: int, cuda: bool) -> dict[str, Any]:
    """Test an all-reduce and a read of a neighbour's symmetric memory, on all ranks. Return this rank's results."""
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    from tpbench.worker.rendezvous import store_of_agents

    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    store = PrefixStore("doctor", store_of_agents())
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=rank, world_size=ranks, device_id=device if cuda else None
    )
    ones = torch.ones(1024, device=device)
    dist.all_reduce(ones)
    results: dict[str, Any] = {"all_reduce": bool((ones == ranks).all())}
    try:
        import torch.distributed._symmetric_memory as symmetric

        buffer = symmetric.empty(1024, device=device, dtype=torch.float32)
        world: Any = dist.group.WORLD
        handle = symmetric.rendezvous(buffer, world)
        buffer.fill_(rank)
        handle.barrier()
        neighbour = (rank + 1) % ranks
        right = bool((handle.get_buffer(neighbour, (1024,), torch.float32) == neighbour).all())
        results["symmetric"] = "" if right else "a rank reads wrong values"
        handle.barrier()
    except (RuntimeError, AttributeError, ImportError) as error:
        results["symmetric"] = next(iter(str(error).splitlines()), type(error).__name__)
    if cuda:
        torch.cuda.synchronize()
    return results


def main() -> None:
    """Print the facts and, of several ranks, the results of rank 0."""
    os.environ.update(NO_MULTICAST)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    facts = facts_of_torch()
    if rank == 0:
        print(json.dumps(facts), flush=True)
    results = communication(rank, ranks, facts["gpus"] >= ranks) if ranks > 1 else {}
    if rank == 0:
        print(json.dumps(results), flush=True)
    sys.stdout.flush()
    os._exit(0)  # an orderly teardown may abort, after all results are printed


if __name__ == "__main__":
    main()
