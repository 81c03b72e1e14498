"""A rank that stays for many jobs: `python -m tpbench.worker.server FOLDER`, started by torchrun like a worker.

It imports what every job needs and never touches a GPU or a process group itself. For each job it forks, and the child
lives a worker's whole life in the copy; whatever that does to memory, limits, seeds, caches or compiled code is gone
with it. A child on a GPU that has left nothing behind stays for the next job (`tpbench.worker.reuse`). The first
job that does not end well ends this process in the same way, and so the group.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

POLL_S = 0.005
EXIT_MOVED_OUT = 75  # EX_TEMPFAIL: a child that stayed has not taken the job that is next


@dataclass(frozen=True)
class Order:
    """What a rank is to do next."""

    cell_file: Path
    may_stay: bool
    """Whether the job's process may have the next job too."""


@dataclass(frozen=True)
class Spool:
    """Where jobs are handed over, numbered from 0."""

    folder: Path

    def put(self, number: int, order: Order | None) -> None:
        """Hand over a job, or None: to give up the devices and do nothing else."""
        temporary = self.folder / f".{number}.job"
        temporary.write_text(json.dumps([str(order.cell_file), order.may_stay] if order else None))
        temporary.rename(self.folder / f"{number}.job")

    def wait(self, number: int) -> Order | None:
        """What is next, as soon as it is there."""
        file = self.folder / f"{number}.job"
        while not file.exists():
            time.sleep(POLL_S)
        content = json.loads(file.read_text())
        return Order(Path(content[0]), content[1]) if content else None

    def finish(self, number: int, rank: int) -> None:
        """This rank has done its part."""
        (self.folder / f"{number}.{rank}.done").touch()

    def finished(self, number: int, rank: int) -> bool:
        """Whether that rank has."""
        return (self.folder / f"{number}.{rank}.done").exists()

    def done(self, number: int, ranks: int) -> bool:
        """Whether all ranks have."""
        return all(self.finished(number, rank) for rank in range(ranks))


def main(folder: Path) -> NoReturn:
    from tpbench.launcher.process import die_with_parent

    rank = int(os.environ["RANK"])
    die_with_parent()
    _import_what_jobs_need()
    spool = Spool(folder)
    number = 0
    while True:
        order = spool.wait(number)
        if order is None:  # whoever stayed is gone
            spool.finish(number, rank)
        elif child := _forked(order.cell_file):
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            while spool.finished(number, rank):  # by a child that stayed
                number += 1
            if code == EXIT_MOVED_OUT:
                continue
            _end_like(code)
            spool.finish(number, rank)
        else:
            _live(spool, number, rank, order)
        number += 1


def _forked(cell_file: Path) -> int:
    _import_what_this_job_needs(cell_file)
    return os.fork()


def _import_what_jobs_need() -> None:
    for name in ("torch.distributed", "tpbench.measure.bandwidth", "tpbench.measure.run", "tpbench.worker.rank"):
        importlib.import_module(name)


def _import_what_this_job_needs(cell_file: Path) -> None:
    """Its workload, here and once. What cannot be imported will be said by the child, in the job's row."""
    import torch

    from tpbench.handover.task import CellRow

    with contextlib.suppress(Exception):
        _ = CellRow.load(cell_file).job.workload.bench
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError("CUDA was used before a job was forked: none could use it")


def _live(spool: Spool, number: int, rank: int, order: Order) -> NoReturn:
    """The child's life: a worker's, with logs and a rendezvous of its own, for one job or as long as it may stay."""
    from tpbench.handover.task import CellRow
    from tpbench.launcher.process import die_with_parent
    from tpbench.worker import rank as worker
    from tpbench.worker.reuse import Residence

    parent = os.getppid()
    die_with_parent()
    if os.getppid() != parent:
        os._exit(worker.EXIT_FAULT)
    residence, meeting = Residence(), f"job {number}"
    while True:
        _log_beside(order.cell_file)
        worker.BEGAN = time.monotonic()
        residence.welcome = order.may_stay
        if not worker.run(order.cell_file, meeting, residence):
            worker.leave()
        spool.finish(number, rank)
        number += 1
        following = spool.wait(number)
        if following is None or not residence.fits(CellRow.load(following.cell_file)):
            worker.leave(EXIT_MOVED_OUT)
        order = following


def _log_beside(cell_file: Path) -> None:
    """What is written from now on goes to the job's folder."""
    logs = cell_file.parent / "warm" / "attempt_0" / os.environ["LOCAL_RANK"]
    logs.mkdir(parents=True, exist_ok=True)
    for descriptor, name in ((1, "stdout.log"), (2, "stderr.log")):
        file = os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, descriptor)
        os.close(file)


def _end_like(code: int) -> None:
    """If a job ended badly, end in the same way, so that torchrun's summary says of us what is true of it."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
        time.sleep(60)
    if code:
        os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
