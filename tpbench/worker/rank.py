"""A rank's life: group up, set the workload up, check it, time it, write the row, group down.

torchrun starts it once for each rank: `python -m tpbench.worker.rank CELL_FILE`. It says on stderr what it is doing, so
that the last line of a rank that hung or died tells where.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import re
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from tpbench.handover.rescue import rescue_folder
from tpbench.handover.task import CellRow
from tpbench.launcher.failure import EXIT_CROWDED, EXIT_PEER_LOST
from tpbench.launcher.process import die_with_parent, parent_is_of
from tpbench.measure.interleaving import FOLDER, InterleavedRank
from tpbench.results.write import RowExists
from tpbench.worker.reuse import Residence

EXIT_FAULT = 70  # EX_SOFTWARE: the row says what happened
EXIT_NOT_WRITTEN = 74  # EX_IOERR: measured, but the output folder would not take the row

_PEER_LOST = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|ncclRemoteError|gloo/transport"
)
"""What gloo and NCCL say in a rank whose peer is gone."""

RANK = int(os.environ["RANK"])
BEGAN = time.monotonic()


def main(cell_file: Path) -> NoReturn:
    """A rank that torchrun started for one job."""
    die_with_parent()
    if not parent_is_of(CellRow.load(cell_file).row_id):
        os._exit(EXIT_FAULT)
    run(cell_file, "", Residence())
    leave()


def run(cell_file: Path, meeting: str, residence: Residence) -> bool:
    """Run the cell on this rank; leaves where it does not end well. `meeting`: what sets this process's groups apart
    from others of the same torchrun. Returns whether the process may have another job: the same on every rank."""
    faulthandler.enable()
    row = CellRow.load(cell_file)
    try:
        may_have_another = _measure(row, meeting, residence, cell_file.parent)
    except Exception as error:
        traceback.print_exc()
        code = EXIT_PEER_LOST if _PEER_LOST.search(str(error)) else EXIT_FAULT
        if code == EXIT_FAULT:  # else the launcher will say which rank broke the collective, and how
            _write_fault(row, error)
        leave(code)
    return may_have_another


def leave(code: int = 0) -> NoReturn:
    """By `os._exit`: gloo and NCCL threads may abort an orderly teardown after all that counts is done."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _measure(row: CellRow, meeting: str, residence: Residence, folder: Path) -> bool:
    say("importing torch")
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    job = row.job
    device = _device(torch, job.device)
    residence.enter(row)
    if not dist.is_initialized():
        # The launcher ends a job that takes too long and knows more of it than a group that gives up would.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=(job.timeout_s + 60) * row.sharers),
            store=PrefixStore(meeting, _agents_store(dist)),
            rank=RANK,
            world_size=job.world_size,
        )
    residence.settled()
    _measure_in(row, device, residence.jobs, InterleavedRank(folder / FOLDER) if row.known.get("interleaved") else None)
    obstacle = residence.ends_because(device)
    say(f"done; this process ends: {obstacle}" if obstacle else "done; this process may have another job")
    stays = torch.tensor(not obstacle, dtype=torch.int32)
    dist.all_reduce(stays, dist.ReduceOp.MIN)
    return bool(stays)


def _measure_in(row: CellRow, device: Any, jobs_before: int, turns: InterleavedRank | None) -> None:
    """The cell, within the process group. Nothing refers to its tensors afterwards."""
    import torch

    from tpbench.measure import memory
    from tpbench.measure.bandwidth import copy_gb_per_s
    from tpbench.measure.run import run as measure

    job = row.job
    context = _context(job, device, Path(row.known["log_dir"]))
    bench = job.workload.bench
    limit = memory.limit(device, job.memory_limit_gib, int(os.environ["LOCAL_WORLD_SIZE"]) * row.sharers)
    say("setting up")
    columns: dict[str, Any] = {
        "memory_limit_gib": limit, "jobs_before": jobs_before, **_torch_facts(torch, device),
    }  # fmt: skip
    copy = copy_gb_per_s(device)
    session = bench.setup(job.problem, job.implementation, context)
    verdict, measured = measure(session, context, job.measure, copy, say, bool(row.known["interpreted"]), turns)
    columns |= measured | verdict.columns
    if RANK == 0:
        _write(row, "wrong" if verdict.wrong else "ok", verdict.wrong, **columns)


def _write(row: CellRow, status: str, reason: str | None, **columns: Any) -> None:
    """Publish the row unless another rank did. A row that the disk will not take is put where the launcher looks."""
    from tpbench.measure import machine

    columns["environment"] = machine.recorded_environment()
    try:
        row.write(status, reason, **columns)
    except RowExists:
        pass
    except OSError as error:
        say(f"the row cannot be written: {error}")
        row.write(status, reason, output_dir=str(rescue_folder()), **columns)
        os._exit(EXIT_NOT_WRITTEN)


def _write_fault(row: CellRow, error: Exception) -> None:
    from tpbench.measure import memory

    memory.lift_limit()
    shortage = memory.shortage(error)
    if shortage is None:
        _write(row, "error", f"rank {RANK}: {type(error).__name__}: {error}")
        return
    if row.sharers > 1:  # says nothing of the cell: it will be measured alone
        say("out of memory, which others share who take turns with this cell")
        os._exit(EXIT_CROWDED)
    asked = f" asking for {shortage / 2**30:.3g} GiB" if shortage else ""
    _write(row, "oom", f"rank {RANK} ran out of memory{asked}", oom_rank=RANK, oom_bytes=shortage or None)


def _device(torch: Any, wanted: str) -> Any:
    if wanted == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"torch {torch.__version__} cannot use the GPUs of this machine; install a CUDA build or say device=cpu"
        )
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def _agents_store(dist: Any) -> Any:
    """torchrun's own store, where the ranks find each other."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


@functools.cache
def _groups(tp_size: int, dp_size: int) -> tuple[list[Any], list[Any]]:
    """The groups of the (dp, tp) mesh's rows and of its columns, row-major. Every rank must create every group, in the
    same order. One of all ranks is the world itself: a communicator of its own would cost seconds and memory."""
    import torch.distributed as dist

    def group(ranks: list[int]) -> Any:
        return dist.group.WORLD if len(ranks) == dist.get_world_size() else dist.new_group(ranks)

    replicas = [[dp * tp_size + tp for tp in range(tp_size)] for dp in range(dp_size)]
    return [group(ranks) for ranks in replicas], [group(list(ranks)) for ranks in zip(*replicas, strict=True)]


def _context(job: Any, device: Any, folder: Path) -> Any:
    import torch.distributed as dist

    from tpbench.measure.session import Context

    dp_rank, tp_rank = divmod(dist.get_rank(), job.tp_size)
    tp_groups, dp_groups = _groups(job.tp_size, job.dp_size)
    return Context(
        rank=dist.get_rank(),
        world_size=job.world_size,
        tp_rank=tp_rank,
        tp_size=job.tp_size,
        dp_rank=dp_rank,
        dp_size=job.dp_size,
        tp_group=tp_groups[dp_rank],
        dp_group=dp_groups[tp_rank],
        device=device,
        folder=folder,
        say=say,
    )


def _torch_facts(torch: Any, device: Any) -> dict[str, Any]:
    import torch.distributed as dist

    found: dict[str, Any] = {"backend": dist.get_backend(), "torch_version": torch.__version__}
    if device.type == "cuda":
        found["backend"] = "nccl"
        found["cuda_version"] = torch.version.cuda
        found["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def say(what: str) -> None:
    """A line on stderr: what this rank begins."""
    with contextlib.suppress(OSError):  # a disk that is full must not cost the measurement too
        print(f"[{time.monotonic() - BEGAN:.1f} s] rank {RANK}: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
