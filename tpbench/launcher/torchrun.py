"""A torchrun: its command line, its environment, its processes, and the attempts that run in it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from tpbench.job import Job
from tpbench.launcher import interrupts
from tpbench.launcher.attempt import Attempt
from tpbench.launcher.devices import Lease
from tpbench.launcher.failure import AGENT_LOG, describe, is_consequence
from tpbench.measure.machine import available_cores, omp_threads
from tpbench.worker.start import BACKEND, MARKER, STACK_SIGNAL, STORE_FILE, die_with_parent
from tpbench.worker.task import LIST_FILE, PROGRESS_FILE, JsonLines

PACKAGE_ROOT = Path(__file__).resolve().parents[2]

INSTALLED = PACKAGE_ROOT.name in ("site-packages", "dist-packages")
"""True if Python finds this package by itself. Its folder must not be first on the path, and hide other modules."""

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Variables that keep NVLink multicast off in all jobs on GPUs. `tpbench.kernels.distributed` sets them too, but only
in jobs with symmetric memory, and after NCCL has made its first communicators."""

KILL_S = 30.0
"""Longest wait for processes that were killed. One that waits for a broken disk may not end at all."""


class Rendezvous(NamedTuple):
    """The place where the nodes of a job meet: the address and port of node 0's store, which is a file for one node."""

    nodes: int = 1
    endpoint: str = ""
    local_addr: str = "127.0.0.1"
    node: int = 0


def command(job: Job, file: Path, log_dir: Path, rendezvous: Rendezvous = Rendezvous()) -> list[str]:
    """Return the torchrun line of a job on this host. `file`: the task, or the list of tasks of ranks that stay."""
    # A public name that is the same on every node and differs for every other job.
    cell = file.parent if rendezvous.nodes == 1 else file.parent.parent
    options = (
        f"--nnodes={rendezvous.nodes} --nproc-per-node={job.world_size // rendezvous.nodes} --rdzv-backend={BACKEND} "
        f"--local-addr={rendezvous.local_addr} --max-restarts=0 --monitor-interval=0.1 --redirects=3"
    )
    names = [f"--rdzv-id={cell.parent.name}-{cell.name}", f"--log-dir={log_dir}"]
    if rendezvous.nodes > 1:
        names += [f"--rdzv-endpoint={rendezvous.endpoint}", f"--rdzv-conf=rank={rendezvous.node}"]
    agent = [sys.executable, "-m", "tpbench.worker.torchrun", *options.split(), *names]
    return [*agent, "-m", "tpbench.worker.rank", str(file)]


def environment(
    job: Job, marker: str, inherited: Mapping[str, str] = os.environ, nodes: int = 1, interprets_triton: bool = False
) -> dict[str, str]:
    """Return the inherited environment with the variables of a job. `interprets_triton`: a job has Triton kernels."""
    # PET_... are options of torchrun. Clusters such as Kubeflow's set them.
    env = {name: value for name, value in inherited.items() if not name.startswith("PET_")}
    env |= {MARKER: marker, "PYTHONUNBUFFERED": inherited.get("PYTHONUNBUFFERED", "1")}
    if not INSTALLED:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), env.get("PYTHONPATH")]))
    if nodes == 1:  # never another interface, even if the user has set one
        env["GLOO_SOCKET_IFNAME"] = env["NCCL_SOCKET_IFNAME"] = "lo"
    if job.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
        if interprets_triton:
            env["TRITON_INTERPRET"] = "1"
    else:
        env.pop("TRITON_INTERPRET", None)
        env = {**NO_MULTICAST, **env}
    if omp_threads(env) is None:
        # On a CPU the ranks share the cores. Beside GPUs more threads have little to do, and wait for each other: two
        # ranks of 32 threads on 64 cores took 16 ms to hash an index, and of two threads 0.4 on such a host (medians).
        shared = available_cores() * nodes // job.world_size if job.device == "cpu" else 1
        env["OMP_NUM_THREADS"] = str(max(1, shared))
    return env


class ProcessTree:
    """A started command and its descendants, found by a marker in their environment, because they lead own sessions."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, keep: Sequence[int] = ()) -> None:
        """Start the command. `keep`: open files that the agent inherits."""
        self.marker = env[MARKER]
        self.store = Path(tempfile.mkdtemp(prefix="tpbench-"))
        """Folder of mode 0700 for the store of the job's processes. Not in the output folder, which may be slow."""
        launcher = os.getpid()

        def bind() -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler of this process would only note it
            die_with_parent(signal.SIGTERM, launcher)

        with log.open("wb") as output:
            self.agent = subprocess.Popen(
                command,
                env={**env, STORE_FILE: str(self.store / "store")},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that the terminal's Ctrl-C reaches the launcher alone
                pass_fds=tuple(keep),
                preexec_fn=bind,
            )

    def write_stacks(self) -> None:
        """Let each rank write its stack to its log, right before the end. Processes without a handler end at once."""
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                if process.pid != self.agent.pid:
                    process.send_signal(STACK_SIGNAL)
        time.sleep(0.5)  # until the stacks are written

    def end(self, grace_s: float = 5.0) -> None:
        """End the agent, which ends its workers, then every process that is left. Returns when all have ended."""
        if self.agent.poll() is None:
            self.agent.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.agent.wait(grace_s)
        deadline = time.monotonic() + KILL_S
        while (processes := self._processes()) and time.monotonic() < deadline:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=1.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.agent.wait(KILL_S)
        shutil.rmtree(self.store, ignore_errors=True)

    def _processes(self) -> list[psutil.Process]:
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARKER) == self.marker and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
        return processes


class Torchrun:
    """A torchrun on leased GPUs, with the attempts that run in it now: one, or the interleaved ones of a problem."""

    def __init__(
        self, attempts: Sequence[Attempt], lease: Lease, stays: bool = False, rendezvous: Rendezvous = Rendezvous()
    ) -> None:
        """Start it. The attempts have begun."""
        first, folder = attempts[0], attempts[0].folder
        self.rendezvous, self.needs = rendezvous, shared_needs(attempts)
        self.unfinished: list[list[Attempt]] = []
        """Attempts that must run once more, in another torchrun: those of a list run together."""
        self.over, self.runs = False, 0
        self.tasks: JsonLines | None = None
        self.progress: JsonLines | None = None
        if stays:
            folder = folder.with_name(f"group-{folder.name}")
            folder.mkdir()
            self.tasks, self.progress = JsonLines(folder / LIST_FILE), JsonLines(folder / PROGRESS_FILE)
        line = command(first.cell.job, self.tasks.file if self.tasks else first.task_file, folder, rendezvous)
        self.command, self.log = " ".join(line), folder / AGENT_LOG
        self.submit(attempts)
        marker = f"{first.task.row_id}.{rendezvous.node}"  # two nodes of a job may be on one host
        interpreted = any(attempt.cell.job.interpreted for attempt in attempts)
        env = environment(first.cell.job, marker, nodes=rendezvous.nodes, interprets_triton=interpreted)
        self.tree = ProcessTree(line, {**env, **lease.environment}, self.log, lease.locks)

    def submit(self, attempts: Sequence[Attempt]) -> None:
        """Let attempts run, which have begun. None may be running."""
        warm = {"warm": self.runs > 0} if self.tasks else {}
        self.running = [attempt.with_columns(command=self.command, **warm) for attempt in attempts]
        for attempt in self.running:
            attempt.task.save(attempt.task_file)
            if self.tasks:
                (attempt.folder / AGENT_LOG).symlink_to(self.log)
        if self.tasks:
            self.tasks.append([str(attempt.task_file.absolute()) for attempt in self.running])
        self.runs += 1
        self.place = 0
        self.spent_s = [0.0] * len(attempts)
        """Time that each attempt has run. It waits while others run with which it is interleaved."""
        self.looked_at = time.monotonic()

    def poll(self) -> list[Attempt]:
        """Return the attempts that have their rows now, once all have ended, and put the others into `unfinished`."""
        code, finished = self.tree.agent.poll(), self._read_progress()
        if finished is not None:
            if finished or code is not None:
                self.end()
            return self._close(None, "error", "its ranks saved no result")
        cause = self.running[self.place]
        if code is None and self.rendezvous.nodes > 1 and cause.has_row and cause.close().status != "ok":
            self.end()  # another node has ended the attempt, perhaps before this one could reach it
            return self._close(None, "error", "another node ended it")
        if code is None:
            if self.spent_s[self.place] <= cause.cell.job.timeout_s:
                return []
            self.tree.write_stacks()
        status, reason = describe(code, cause.cell.job.timeout_s, cause.folder)
        self.end()  # only now: a rank that receives SIGTERM adds lines to its log
        if code:
            interrupts.sleep(0.5)  # a signal that ended the torchrun may come here, too: Slurm sends it to all of a job
            # If the ranks of this node only lost their peers, another node stores a row with the reason.
            deadline = time.monotonic() + 15 * (self.rendezvous.nodes > 1 and is_consequence(cause.folder))
            while not (cause.has_row or cause.has_result) and time.monotonic() < deadline:
                interrupts.sleep(0.2)
        return self._close(cause, status, reason)

    def end(self) -> None:
        """End it at once, with all its processes."""
        if not self.over:
            self.tree.end()
        self.over = True

    def _read_progress(self) -> str | None:
        """Read how far the ranks are. Return None while the attempts run, else why the ranks run no others, if so."""
        now = time.monotonic()
        self.spent_s[self.place] += now - self.looked_at
        self.looked_at = now
        for value in self.progress.read() if self.progress else ():
            if isinstance(value, str):
                return value
            self.place = value
        return None

    def _close(self, cause: Attempt | None, status: str, reason: str) -> list[Attempt]:
        """Close the attempts: do what `poll` says. `cause`: the one that ended the torchrun; None: all ended."""
        attempts, self.running = self.running, []
        ended, crowded, others = [], [], []
        for attempt in attempts:
            if len(attempts) > 1 and (attempt.crowded or (attempt is cause and status == "oom")):
                crowded.append(attempt)
            elif cause not in (None, attempt) and not (attempt.has_row or attempt.has_result):
                others.append(attempt.again())
            elif not attempt.abandoned:  # else its row was deleted, and must not come back
                ended.append(attempt.close(status, reason))
        number = len(attempts) - 1
        alone = f"out of memory beside {number} cell{'s' * (number > 1)} of its problem"
        again = [[attempt.again(not_interleaved=alone)] for attempt in crowded]
        self.unfinished = [others, *again] if others else again
        return ended


def shared_needs(attempts: Sequence[Attempt]) -> tuple[object, ...]:
    """Return what attempts must have in common to run in one torchrun, one after the other."""
    job = attempts[0].cell.job
    interpreted = any(attempt.cell.job.interpreted for attempt in attempts)
    # Files of two folders may import two files of one name, which a process imports once.
    users = filter(None, (attempt.cell.job.outside for attempt in attempts))
    folders = frozenset(Path(user.path).parent for user in users if len(user.files) > 1)
    # Workloads differ in what they forbid NCCL, which reads that once.
    return job.workload.name, job.world_size, job.device, job.timeout_s, interpreted, folders
