"""Facts of this machine that only torch knows, printed as JSON on stdout. `doctor` runs this module as a process.

`python -m tpbench.console.torch_probe` prints the view of one process. Under `tpbench.worker.torchrun`, with `--ranks`,
all ranks together test NCCL and symmetric memory: nothing but such a test shows that they work. Without GPUs they use
gloo.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tpbench.launcher.torchrun import NO_MULTICAST


def probe_process() -> dict[str, Any]:
    """Return versions, and the pairs of GPUs that cannot reach each other directly."""
    import torch

    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": 0, "unreachable": []}
    if torch.version.cuda is None:
        return facts
    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        return {**facts, "cuda_error": str(error).splitlines()[0]}
    nccl: Any = torch.cuda.nccl
    gpus = range(torch.cuda.device_count())
    return {
        **facts,
        "gpus": len(gpus),
        "capability": [list(torch.cuda.get_device_capability(index)) for index in gpus],
        "nccl": ".".join(map(str, nccl.version())),
        "unreachable": [
            [one, other]
            for one in gpus
            for other in gpus
            if one != other and not torch.cuda.can_device_access_peer(one, other)
        ],
    }


def probe_ranks() -> dict[str, Any]:
    """Test an all-reduce and a read of a neighbour's symmetric memory, on all ranks. Return this rank's results."""
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    from tpbench.worker.rendezvous import store_of_agents

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    store = PrefixStore("doctor", store_of_agents())
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=rank, world_size=ranks, device_id=device if cuda else None
    )
    ones = torch.ones(1024, device=device)
    dist.all_reduce(ones)
    results: dict[str, Any] = {"nccl": bool((ones == ranks).all())}
    try:
        import torch.distributed._symmetric_memory as symmetric

        buffer = symmetric.empty(1024, device=device, dtype=torch.float32)
        world: Any = dist.group.WORLD
        handle = symmetric.rendezvous(buffer, world)
        buffer.fill_(rank)
        handle.barrier()
        neighbour = (rank + 1) % ranks
        values = handle.get_buffer(neighbour, (1024,), torch.float32)
        results["symmetric"] = bool((values == neighbour).all())
        handle.barrier()
    except (RuntimeError, AttributeError, ImportError) as error:
        results["symmetric"] = str(error).splitlines()[0] if str(error) else type(error).__name__
    if cuda:
        torch.cuda.synchronize()
    return results


def main() -> None:
    """Print the facts, or the results of rank 0."""
    if "--ranks" not in sys.argv:
        print(json.dumps(probe_process()), flush=True)
        return
    os.environ.update(NO_MULTICAST)
    results = probe_ranks()
    if os.environ["RANK"] == "0":
        print(json.dumps(results), flush=True)
    sys.stdout.flush()
    os._exit(0)  # an orderly teardown may abort, after all results are printed


if __name__ == "__main__":
    main()
