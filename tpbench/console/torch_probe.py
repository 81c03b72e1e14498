"""Facts of this machine that only torch knows, printed as lines of JSON. `doctor` runs this module.

Several ranks test an all-reduce and symmetric memory: nothing but such a test shows that they work. Without GPUs they
use gloo. They meet in a file, and NCCL and gloo use loopback, so that no port is open beyond it.
"""

import json
import os
import signal
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from tpbench.launcher.torchrun import NO_MULTICAST


def facts_of_torch() -> dict[str, Any]:
    """Return versions, and what torch sees of the GPUs."""
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


def communicate(rank: int, ranks: int, backend: str, store: str) -> None:
    """Test an all-reduce and a read of a neighbour's symmetric memory, on all ranks. Rank 0 prints its results."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a rank gets if its parent is killed, perhaps in a collective
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store, rank=rank, world_size=ranks)
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
        torch.cuda.synchronize()
    except (RuntimeError, AttributeError, ImportError) as error:
        results["symmetric"] = next(iter(str(error).splitlines()), type(error).__name__)
    if rank == 0:
        print(json.dumps(results), flush=True)
    os._exit(0)  # an orderly teardown may abort, after all results are printed


def main(ranks: int) -> None:
    """Print the facts and, of several ranks, the results of rank 0."""
    facts = facts_of_torch()
    print(json.dumps(facts), flush=True)
    if ranks > 1:
        os.environ.update(NO_MULTICAST, GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
        with tempfile.TemporaryDirectory(prefix="tpbench-doctor-") as folder:
            arguments = (ranks, "nccl" if facts["gpus"] >= ranks else "gloo", f"file://{folder}/store")
            processes: Any = torch.multiprocessing
            processes.spawn(communicate, arguments, ranks)


if __name__ == "__main__":
    main(int(sys.argv[1]))
