"""Print facts about this machine that only torch knows: a line of JSON for each finding of `doctor`, which runs this.

Several ranks test an all-reduce: nothing but such a test shows that it works. Without GPUs they use gloo. They meet in
a file, and NCCL and gloo use loopback, so that no port is open beyond it.
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


def find_gpus(expected: int) -> bool:
    """Print whether torch can use the GPUs, of which the driver has so many. Return true if it can."""
    message = f"{torch.__version__}, built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'the CPU'}"
    try:
        torch.zeros(1, device="cuda" if expected else "cpu")
    except (RuntimeError, AssertionError) as error:
        fix = "install a build of torch (pytorch.org) for a CUDA version that the driver supports: nvidia-smi prints it"
        print(json.dumps(["torch", "fail", f"{message}: {str(error).splitlines()[0]}", fix]), flush=True)
        return False
    print(json.dumps(["torch", "ok", message]), flush=True)
    return True


def all_reduce(rank: int, ranks: int, store: str) -> None:
    """Test an all-reduce on all ranks. Rank 0 prints the finding."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a rank gets if its parent is killed, perhaps in a collective
    device, backend = (torch.device("cuda", rank), "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    dist.init_process_group(backend, store, rank=rank, world_size=ranks)
    ones = torch.ones(1024, device=device)
    dist.all_reduce(ones)
    is_right = bool((ones == ranks).all())
    if rank == 0:
        message = f"an all-reduce over {ranks} ranks gives {'the right' if is_right else 'a wrong'} sum"
        fix = "" if is_right else "update the driver and torch: measurements here would be wrong"
        print(json.dumps([backend.upper(), "ok" if is_right else "fail", message, fix]), flush=True)
    os._exit(0)  # an orderly teardown may abort, after all results are printed


def main(gpus: int, ranks: int) -> None:
    """Print the findings for that many GPUs, and that of an all-reduce over several ranks."""
    if find_gpus(gpus) and ranks > 1:
        os.environ.update(NO_MULTICAST, GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
        with tempfile.TemporaryDirectory(prefix="tpbench-doctor-") as folder:
            processes: Any = torch.multiprocessing
            processes.spawn(all_reduce, (ranks, f"file://{folder}/store"), ranks)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
