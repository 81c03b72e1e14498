"""Checks of `doctor` that need no torch: GPUs, compiler, Slurm, disks, packages."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tpbench import packages
from tpbench.measure import machine

MIN_DISK_GIB = 1.0
MIN_SHARED_GIB = 1.0
BUSY_SHARE = 0.05
"""Share of a GPU's memory above which the GPU counts as in use."""


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    subject: str
    state: Literal["ok", "note", "fail"]
    message: str
    fix: str = ""
    """Advice to the user. Every failed check has one."""


def gpus() -> list[Finding]:
    """Check that there are GPUs and that no other process uses them."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        fix = "on a machine with NVIDIA GPUs install their driver (nvidia-smi must work); others can try every command"
        return [Finding("GPUs", "note", f"none: {error}. Kernels run in Triton's interpreter", fix)]
    try:
        count = pynvml.nvmlDeviceGetCount()
        findings = [finding for index in range(count) for finding in _gpu(pynvml, index)]
        if machine.gpu_count() < count:
            findings.append(Finding("GPUs", "note", f"CUDA_VISIBLE_DEVICES leaves {machine.gpu_count()} of {count}"))
        return findings or [
            Finding("GPUs", "note", "the driver is installed, but finds no GPU", "ask the administrator")
        ]
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> list[Finding]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    subject, total = f"GPU {index}", int(memory.total) / 2**30
    findings = [Finding(subject, "ok", f"{machine.nvml_text(nvml.nvmlDeviceGetName(handle))}, {total:.0f} GiB")]
    if int(memory.used) > BUSY_SHARE * int(memory.total):
        message = f"{int(memory.used) / 2**30:.0f} GiB are in use: another process would disturb a measurement"
        fix = "wait for it or end it (nvidia-smi lists it), or choose other GPUs with CUDA_VISIBLE_DEVICES"
        findings.append(Finding(subject, "fail", message, fix))
    return findings


def compiler() -> list[Finding]:
    """Check that Triton can build its launchers. With a GPU it needs a C compiler and Python's headers."""
    if not packages.installed("triton"):
        return [Finding("Triton", "fail", "not installed", packages.pip_install("triton"))]
    findings = [Finding("Triton", "ok", str(machine.version("triton")))]
    if machine.gpu_count():
        if not any(map(shutil.which, ("cc", "gcc", "clang"))):
            findings.append(Finding("Triton", "fail", "no C compiler", "apt-get install gcc, or set CC"))
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            findings.append(Finding("Triton", "fail", "Python's headers are missing", "apt-get install python3-dev"))
    return findings


def slurm() -> list[Finding]:
    """Check that jobs can be submitted to a Slurm cluster from here."""
    if shutil.which("sbatch") is None:
        return [Finding("Slurm", "note", "not installed: sweeps run on this machine")]
    try:
        done = subprocess.run(["sinfo", "--noheader", "-o", "%P %a %D"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Finding("Slurm", "note", f"installed, but sinfo fails: {error}", "ask the administrator")]
    if done.returncode:
        answer = " ".join(done.stderr.split())[:100] or f"sinfo exits with {done.returncode}"
        message = f"installed, but no cluster answers: {answer}"
        return [Finding("Slurm", "note", message, "sinfo must work: ask the administrator whether slurmctld runs")]
    partitions = len(done.stdout.splitlines())
    findings = [Finding("Slurm", "ok", f"{partitions} partition{'s' * (partitions != 1)}")]
    if not packages.installed("submitit"):
        findings.append(Finding("Slurm", "fail", "submitit is not installed", packages.install_command("slurm")))
    return findings


def disk(output_dir: str = "outputs") -> list[Finding]:
    """Check the free space for rows, logs and shared memory."""
    folder = Path(output_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"{folder} cannot be written: {error.strerror}"
        return [Finding("disk", "fail", message, "choose another folder: output_dir=DIR")]
    shared = Path("/dev/shm")
    return [
        *_free("disk", folder, MIN_DISK_GIB, "free some space, or choose another folder: output_dir=DIR"),
        *_free("temporary files", Path(tempfile.gettempdir()), MIN_DISK_GIB, "free some space, or set TMPDIR"),
        *_free("shared memory", shared, MIN_SHARED_GIB, "NCCL and gloo use it; start a container with --shm-size=8g"),
    ]


def _free(subject: str, folder: Path, min_gib: float, fix: str) -> list[Finding]:
    if not folder.exists():
        return []
    free_gib = shutil.disk_usage(folder).free / 2**30
    message = f"{free_gib:.1f} GiB free in {folder}"
    return [Finding(subject, "ok", message) if free_gib >= min_gib else Finding(subject, "fail", message, fix)]


def optional_packages() -> list[Finding]:
    """Report useful packages that are not installed."""
    if packages.installed("matplotlib"):
        return []
    fix = f"to draw plots: {packages.install_command('report')}"
    return [Finding("packages", "note", "matplotlib is not installed", fix)]
