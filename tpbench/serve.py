"""A rank that stays for many jobs: `python -m tpbench.serve FOLDER`, started by torchrun like a worker.

It imports what every job needs and never touches a GPU or a process group itself. For each job it forks, and the child
lives a worker's whole life in the copy; whatever that does to memory, limits, seeds, caches or compiled code is gone
with it. The first job that does not end well ends this process in the same way, and so the group.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

POLL_S = 0.005


@dataclass(frozen=True)
class Spool:
    """Where jobs are handed over, numbered from 0."""

    folder: Path

    def put(self, number: int, cell_file: Path) -> None:
        """Hand over a job."""
        temporary = self.folder / f".{number}.job"
        temporary.write_text(str(cell_file))
        temporary.rename(self.folder / f"{number}.job")

    def wait(self, number: int) -> Path:
        """The next job's cell file, as soon as there is one."""
        file = self.folder / f"{number}.job"
        while not file.exists():
            time.sleep(POLL_S)
        return Path(file.read_text())

    def finish(self, number: int, rank: int) -> None:
        """This rank has done its part."""
        (self.folder / f"{number}.{rank}.done").touch()

    def done(self, number: int, ranks: int) -> bool:
        """Whether all ranks have."""
        return all((self.folder / f"{number}.{rank}.done").exists() for rank in range(ranks))


def main(folder: Path) -> NoReturn:
    from tpbench.launcher.process import die_with_parent

    rank = int(os.environ["RANK"])
    die_with_parent()
    _import_what_jobs_need()
    spool = Spool(folder)
    for number in range(sys.maxsize):
        cell_file = spool.wait(number)
        _import_what_this_job_needs(cell_file)
        if child := os.fork():
            _end_like(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            spool.finish(number, rank)
        else:
            _run(cell_file, number)
    sys.exit("unreachable")


def _import_what_jobs_need() -> None:
    for name in ("torch.distributed", "tpbench.measure.bandwidth", "tpbench.measure.run", "tpbench.worker"):
        importlib.import_module(name)


def _import_what_this_job_needs(cell_file: Path) -> None:
    """Its workload, here and once. What cannot be imported will be said by the child, in the job's row."""
    import torch

    from tpbench.cell import CellRow

    with contextlib.suppress(Exception):
        _ = CellRow.load(cell_file).job.workload.bench
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError("CUDA was used before a job was forked: none could use it")


def _run(cell_file: Path, number: int) -> NoReturn:
    """The child's life: a worker's, with logs and a rendezvous of its own."""
    from tpbench import worker
    from tpbench.launcher.process import die_with_parent

    parent = os.getppid()
    die_with_parent()
    if os.getppid() != parent:
        os._exit(worker.EXIT_FAULT)
    logs = cell_file.parent / "warm" / "attempt_0" / os.environ["LOCAL_RANK"]
    logs.mkdir(parents=True, exist_ok=True)
    for descriptor, name in ((1, "stdout.log"), (2, "stderr.log")):
        file = os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, descriptor)
        os.close(file)
    worker.BEGAN = time.monotonic()
    worker.run(cell_file, f"job {number}")


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
