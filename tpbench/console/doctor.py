"""`python -m tpbench doctor`: problems of this machine, each with a fix."""

import itertools
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from tpbench import packages
from tpbench.measure import machine
from tpbench.settings import JobError, user_path
from tpbench.suggestions import counted

MIN_FREE_GIB = 1.0
BUSY_SHARE = 0.05
"""Share of a GPU's memory above which the GPU counts as in use."""
TIMEOUT_S = 180


class Finding(NamedTuple):
    """Result of one check. Every failed check has a fix."""

    subject: str
    state: Literal["ok", "note", "fail"]
    message: str
    fix: str = ""


def gpus() -> Iterator[Finding]:
    """Check that there are GPUs, and that no other process uses those that jobs started here would use."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        fix = "on a machine with NVIDIA GPUs install their driver (nvidia-smi must work); others can try every command"
        yield Finding("GPUs", "note", f"none: {error}. Kernels run in Triton's interpreter", fix)
        return
    visible = dict(machine.visible_gpus())
    for index, handle in enumerate(machine.gpu_handles(pynvml)):
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        total, used = int(memory.total) / 2**30, int(memory.used) / 2**30
        yield Finding(f"GPU {index}", "ok", f"{pynvml.nvmlDeviceGetName(handle)}, {total:.0f} GiB")
        if used > BUSY_SHARE * total and pynvml.nvmlDeviceGetUUID(handle) in visible:
            message = f"{used:.0f} GiB are in use: another process would disturb a measurement"
            fix = "wait for it or end it (nvidia-smi lists it), or choose other GPUs with CUDA_VISIBLE_DEVICES"
            yield Finding(f"GPU {index}", "fail", message, fix)


def compiler() -> Iterator[Finding]:
    """Check that Triton can build its launchers. With a GPU it needs a C compiler and Python's headers."""
    yield Finding("Triton", "ok", str(machine.version("triton")))
    if not machine.gpu_count():
        return
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        yield Finding("Triton", "fail", "no C compiler", "apt-get install gcc, or set CC")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        yield Finding("Triton", "fail", "Python's headers are missing", "apt-get install python3-dev")


def disk(output_dir: str = "outputs") -> Iterator[Finding]:
    """Check the free space for rows, logs and shared memory."""
    folder = Path(output_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    for subject, place, fix in (
        ("disk", folder, "free some space, or choose another folder: output_dir=DIR"),
        ("shared memory", Path("/dev/shm"), "NCCL and gloo use it; start a container with --shm-size=8g"),
    ):
        try:
            with tempfile.TemporaryFile(dir=place):
                free_gib = shutil.disk_usage(place).free / 2**30
        except OSError as error:
            yield Finding(subject, "fail", f"{place} cannot be written: {error.strerror}", fix)
            continue
        is_full = free_gib < MIN_FREE_GIB
        yield Finding(subject, "fail" if is_full else "ok", f"{free_gib:.1f} GiB free in {place}", fix * is_full)


def torch_findings(gpus: int, ranks: int) -> Iterator[Finding]:
    """Return what torch sees of the GPUs and, over several ranks, whether they can communicate."""
    command = [sys.executable, "-m", "tpbench.console.torch_probe", str(gpus), str(ranks)]
    fix = "NCCL_DEBUG=INFO says more; a small /dev/shm and wrong NCCL_SOCKET_IFNAME are usual causes"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        yield Finding("NCCL", "fail", f"no answer within {TIMEOUT_S} s", fix)
        return
    findings = [Finding(*json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")]
    yield from findings
    if done.returncode:
        errors = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        error = next((line for line in reversed(errors) if "Error" in line), errors[-1]).strip()[:300]
        subject, fix = ("NCCL", fix) if findings else ("torch", packages.pip_install("torch"))
        yield Finding(subject, "fail", f"it fails: {error}", fix)


def main(arguments: Sequence[str]) -> int:
    """Print all findings. The exit code is 1 if a check failed. Raises JobError for invalid arguments."""
    output_dir = "outputs"
    for name, _, value in (argument.partition("=") for argument in arguments):
        if name != "output_dir":
            raise JobError(f"doctor has one argument, output_dir=DIR, and not {name}")
        output_dir = str(user_path(value, name))
    failed, count = [], machine.gpu_count()
    checks = (gpus(), compiler(), disk(output_dir), torch_findings(count, count))
    for subject, state, message, fix in itertools.chain(*checks):
        failed += [subject] * (state == "fail")
        print(f"{state:<4}  {subject}: {message}", flush=True)
        if fix:
            print(f"      {'fix' if state == 'fail' else 'hint'}: {fix}", flush=True)
    if failed:
        print(f"\nVerdict: do not measure here before you fix: {', '.join(dict.fromkeys(failed))}")
        return 1
    on_cpu = f"run sweeps on {machine.available_cores()} CPU cores, where times of Triton kernels aren't measurements"
    can = f"measure on {counted(count, 'GPU')}" if count else on_cpu
    print(f"\nVerdict: no problem found; this machine can {can}")
    return 0
