"""Runs the cells of a sweep as Slurm jobs: submits them, waits, and runs them on the nodes as on one host."""

import contextlib
import io
import math
import os
import shlex
import socket
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from tpbench.launcher import interrupts, torchrun
from tpbench.launcher.attempt import JOB_FILE, Attempt, abandon
from tpbench.launcher.display import Display
from tpbench.launcher.host import Host
from tpbench.launcher.options import SlurmSettings, SweepOptions
from tpbench.launcher.planning.plan import Cell
from tpbench.launcher.runner import Runner
from tpbench.launcher.slurm import cluster
from tpbench.launcher.slurm.cluster import ENDED, Layout, Partition
from tpbench.launcher.slurm.submitted import SUBMITIT, close_if_ended, is_wanted, job_of, left_behind, record
from tpbench.launcher.torchrun import Rendezvous
from tpbench.measure import machine
from tpbench.measure.session import STEPS_FILE
from tpbench.settings import JobError
from tpbench.worker.start import SECRET, SECRET_FILE, create_secret


class Slurm(Runner):
    """Runs cells as jobs of a Slurm cluster."""

    def __init__(self, settings: SlurmSettings, options: SweepOptions) -> None:
        if options.reuse and settings.cells_per_job == 1:
            raise JobError("reuse=true holds within a Slurm job, and needs hydra.launcher.cells_per_job=all")
        if options.order == "interleaved" and settings.cells_per_job:
            raise JobError("order=interleaved needs hydra.launcher.cells_per_job=all")
        self.settings, self.options = settings, options
        cluster.drop_client_variables(settings)
        self.target: Partition = Partition.find(settings)
        # The software is the cluster's too; its GPUs are unknown here, and each row names them.
        software = ("torch_version", "triton_version", "tpbench_version", "git_commit", "git_dirty")
        self.facts = {name: value for name, value in machine.facts().items() if name in software}
        self.adopted: dict[int, tuple[str, Attempt]] = {}
        """By the cell's index: an attempt of an earlier sweep, with the number of the job that still runs it."""

    def recover(self, cells: Sequence[Cell]) -> dict[int, str]:
        """Store the rows of jobs that ended without one, end the jobs of abandoned attempts, and adopt the others."""
        by_key = {cell.job.key: cell for cell in cells}
        unfinished = list(left_behind({cell.job.output_dir for cell in cells}, by_key.keys()))
        unwanted = [attempt for attempt in unfinished if not is_wanted(attempt)]
        cluster.cancel_and_wait({job_of(attempt) for attempt in unwanted})
        for attempt in unwanted:  # a later job may have the number, and must not be ended
            (attempt.folder / JOB_FILE).unlink(missing_ok=True)
        jobs = [(job_of(attempt), attempt) for attempt in unfinished if is_wanted(attempt)]
        while "COMPLETING" in (states := cluster.states({job_id for job_id, _ in jobs})).values():
            interrupts.sleep(cluster.POLL_S)  # the final state of such a job is not known yet
        for job_id, attempt in jobs:
            if close_if_ended(attempt, states.get(job_id, cluster.UNKNOWN)) is None:
                cell = by_key[attempt.cell.job.key]
                self.adopted[cell.index] = job_id, replace(attempt, cell=cell)
        return {index: f"already submitted as Slurm job {job_id}" for index, (job_id, _) in self.adopted.items()}

    def run(self, attempts: Sequence[Attempt], display: Display) -> Iterator[Attempt]:
        """Submit all attempts, and yield each as it ends. Cancels the jobs that it submitted when it is closed."""
        waiting: dict[int, tuple[str, Attempt]] = {}
        arrays: dict[Layout, list[Attempt]] = defaultdict(list)
        for attempt in attempts:
            if adopted := self.adopted.pop(attempt.cell.index, None):
                waiting[attempt.cell.index] = adopted
            else:
                arrays[self.target.layout(attempt.cell.job)].append(attempt)
        earlier = {job_id for job_id, _ in waiting.values()}  # an interrupt leaves the jobs of earlier sweeps alone
        try:
            for shape, alike in arrays.items():
                length = self.settings.cells_per_job or len(alike)
                begun = [attempt.begin() for attempt in alike]
                lists = [begun[start : start + length] for start in range(0, len(begun), length)]
                waiting |= self._submit(shape, lists)
            for job_id, attempt in waiting.values():
                display.show(attempt.cell, f"job {job_id}")
            if self.options.wait:
                yield from self._collect(waiting, display)
            submitted, waiting = waiting, {}  # a sweep that does not wait leaves its jobs
            for job_id, attempt in submitted.values():
                yield replace(attempt, note=f"Slurm job {job_id}")
        finally:
            for job_id, attempt in waiting.values():
                if job_id not in earlier:
                    abandon(attempt.folder)
            jobs = sorted({job_id for job_id, _ in waiting.values()} - earlier)
            if jobs and cluster.answer("scancel", *jobs).returncode:
                display.note(f"Slurm did not cancel this sweep's jobs: scancel {' '.join(jobs)}", 10_000)

    def _submit(self, shape: Layout, lists: Sequence[Sequence[Attempt]]) -> dict[int, tuple[str, Attempt]]:
        """Submit an array with a job for each list of attempts, which have begun. Return what `run` waits for."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from submitit import SlurmExecutor
            from submitit.core.utils import FailedJobError, FailedSubmissionError
        settings, options = self.settings, replace(self.options, wait=True)
        executor = SlurmExecutor(lists[0][0].folder.parent / SUBMITIT, max_num_timeout=settings.requeues)
        path = f"export PYTHONPATH={shlex.quote(str(torchrun.PACKAGE_ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}"
        setup = [*([] if torchrun.INSTALLED else [path]), *map(_required, settings.setup)]
        longest_s = max(sum(attempt.cell.job.timeout_s for attempt in alike) for alike in lists)
        minutes = settings.time_limit_min or 10 + math.ceil(longest_s / 60)  # processes start and end
        parameters = {
            "nodes": shape.nodes,
            "ntasks_per_node": 1,  # torchrun starts the ranks
            "cpus_per_task": settings.cpus_per_task or (shape.ranks_per_node if shape.device == "cpu" else None),
            "gpus_per_node": shape.ranks_per_node if shape.device == "cuda" else None,
            "time": minutes,
            "array_parallelism": settings.array_parallelism,
            "signal_delay_s": min(settings.signal_delay_s, 30 * minutes),
            "additional_parameters": {"requeue": True, **dict(settings.sbatch)},
            **{name: getattr(settings, name) for name in ("partition", "account", "qos", "constraint")},
        }
        given = {name: value for name, value in parameters.items() if value is not None}
        executor.update_parameters(job_name="tpbench", setup=setup, **given)
        for alike in lists:
            if shape.nodes > 1:
                create_secret(alike[0].folder)
            for attempt in alike:
                attempt.task.save(attempt.task_file)
        tasks = [NodeTask(tuple(str(attempt.folder) for attempt in alike), options) for alike in lists]
        try:
            with contextlib.redirect_stderr(io.StringIO()), executor.batch():  # submitit prints the error, too
                jobs = [executor.submit(task) for task in tasks]
        except (FailedJobError, FailedSubmissionError, OSError) as error:
            raise JobError(cluster.rejection_message(str(error))) from None
        submitted = [(str(job.job_id), each) for job, alike in zip(jobs, lists, strict=True) for each in alike]
        for job_id, attempt in submitted:
            record(attempt, job_id)
        return {attempt.cell.index: (job_id, attempt) for job_id, attempt in submitted}

    def _collect(self, waiting: dict[int, tuple[str, Attempt]], display: Display) -> Iterator[Attempt]:
        """Yield attempts as they end, and remove them from `waiting`."""
        queried_at = float("-inf")
        states: dict[str, str] = {}
        ended: dict[str, float] = {}
        while waiting:
            now = time.monotonic()
            if now - queried_at > self.settings.poll_s:
                queried_at = now
                states |= cluster.states({job_id for job_id, _ in waiting.values()})
                for job_id, attempt in waiting.values():
                    display.follow(attempt.folder / STEPS_FILE, f"job {job_id}: ")
                ended = {job_id: ended.get(job_id, now) for job_id, state in states.items() if state in ENDED}
            for index, (job_id, attempt) in list(waiting.items()):
                state = states.get(job_id, "PENDING")
                display.show(attempt.cell, f"job {job_id}: {state}")
                # Network file systems show the new file of a row late.
                delay_s = 10.0 if state == "COMPLETED" else self.settings.poll_s
                has_ended = now - ended.get(job_id, now) > delay_s
                if (attempt.has_row or has_ended) and (done := close_if_ended(attempt, state)):
                    display.follow(attempt.folder / STEPS_FILE, f"job {job_id}: ")
                    del waiting[index]
                    yield done
            interrupts.sleep(0.2)


def _required(line: str) -> str:
    """Return a shell line that ends the job if it fails. Its output is in the log that the row of the cell quotes."""
    failed = shlex.quote(f"this line of hydra.launcher.setup failed: {line}")
    return f"{{ {line}\n}} || {{ echo {failed} >&2; exit 1; }}"


@dataclass(frozen=True)
class NodeTask:
    """The function that submitit pickles and calls on each node. So its class must be importable there."""

    folders: tuple[str, ...]
    options: SweepOptions

    def __call__(self) -> None:
        from submitit import JobEnvironment
        from submitit.core.utils import UncompletedJobError

        here = JobEnvironment()
        hosts = list(here.hostnames)
        rendezvous = _rendezvous(int(here.raw_job_id), here.node, hosts)
        if len(hosts) > 1:
            secret = Path(self.folders[0], SECRET_FILE).read_text()
            os.environ.update({SECRET: secret, **gloo_interface(rendezvous(0).local_addr)})
        restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        logs = f"node{here.node}.{restarts}".removesuffix(".0")
        options = replace(self.options, reuse=False, order="sequential") if len(hosts) > 1 else self.options
        host = Host(options, rendezvous)
        attempts = []
        for folder in map(Path, self.folders):
            attempt = Attempt.load(folder)
            if attempt.has_row or attempt.abandoned:
                continue  # requeued after the row was stored, or abandoned, perhaps by a sweep without this job
            if here.node == 0:  # the launcher may have died before it could
                record(attempt, here.job_id)
            if attempt.has_result:  # requeued after the measurement
                attempt.close()
                continue
            facts = {**host.facts, "kernels_version": attempt.cell.job.kernels_version}
            facts |= {"host": hosts[0], "nodes": len(hosts)}
            if options != self.options and self.options.order == "interleaved":
                facts["not_interleaved"] = "its job has several nodes"
            attempts.append(replace(attempt.with_columns(**facts), folder=folder / logs))
        try:
            folder = Path(self.folders[0]).parent
            with Display(len(attempts), folder) as display, interrupts.noted(display.tick):
                for ended in host.run(attempts, display):
                    display.finish(ended)
        except interrupts.Terminated:
            # Slurm cancels or preempts the job, and sends SIGKILL later. A preempted job runs again: until then it must
            # not have an `error` row. It must not end by itself either: Slurm could take that for its regular end.
            time.sleep(600)
            raise RuntimeError("SIGTERM ended the job") from None
        except UncompletedJobError as error:  # submitit's, when there are no more requeues
            for attempt in attempts:
                if not attempt.has_row:
                    attempt.close("timeout", f"Slurm's time limit: {error}")
            raise

    def checkpoint(self) -> Any:
        """Return what runs when the job is requeued: the same again."""
        from submitit.core.utils import DelayedSubmission

        return DelayedSubmission(self)


def _rendezvous(job_id: int, node: int, hosts: list[str]) -> Callable[[int], Rendezvous]:
    """Return a function that returns the rendezvous of a cell, by the cell's index."""
    if len(hosts) == 1:
        return lambda cell: Rendezvous()
    first, local_addr = cluster.address(hosts[0]), address_towards(cluster.address(hosts[0 if node else 1]))
    # The ports are below those that systems use for outgoing connections.
    return lambda cell: Rendezvous(len(hosts), f"{first}:{10_000 + (job_id + 97 * cell) % 20_000}", local_addr, node)


def address_towards(peer: str) -> str:
    """Return the IP address of this node on the way to another one, given by its name or address."""
    family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing; the kernel chooses the interface
        return str(probe.getsockname()[0])


def gloo_interface(address: str) -> dict[str, str]:
    """Return the variable that makes gloo use the interface with this IP address, unless the user has set it."""
    interfaces = [(name, entry.address) for name, entries in psutil.net_if_addrs().items() for entry in entries]
    names = [name for name, of_interface in interfaces if of_interface.partition("%")[0] == address]
    return {} if "GLOO_SOCKET_IFNAME" in os.environ or not names else {"GLOO_SOCKET_IFNAME": names[0]}
