"""What `doctor` looks at in this process: the machine, without torch."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tpbench.measure import machine

ENOUGH_DISK_GIB = 1.0
ENOUGH_SHARED_GIB = 1.0
BUSY_SHARE = 0.05


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: Literal["good", "note", "bad"]
    said: str
    mend: str = ""
    """What to do about it."""


def gpus() -> list[Finding]:
    """Whether there are GPUs, and whether they are free to be measured."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        mend = "fine for a first look; on a machine with NVIDIA GPUs install their driver (nvidia-smi must work)"
        return [Finding("GPUs", "note", f"none: {error}. Kernels run in Triton's interpreter", mend)]
    try:
        count = pynvml.nvmlDeviceGetCount()
        found = []
        for index in range(count):
            found += _gpu(index)
        if machine.gpu_count() < count:
            found.append(Finding("GPUs", "note", f"CUDA_VISIBLE_DEVICES leaves {machine.gpu_count()} of {count}"))
        return found or [Finding("GPUs", "note", "the driver is there, but no GPU", "ask who runs this machine")]
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> list[Finding]:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    name = pynvml.nvmlDeviceGetName(handle)
    what, total = f"GPU {index}", int(memory.total) / 2**30
    found = [Finding(what, "good", f"{name if isinstance(name, str) else name.decode()}, {total:.0f} GiB")]
    if int(memory.used) > BUSY_SHARE * int(memory.total):
        said = f"{int(memory.used) / 2**30:.0f} GiB are in use: somebody else's work disturbs a measurement"
        found.append(
            Finding(what, "bad", said, "wait, end it (nvidia-smi lists it), or choose with CUDA_VISIBLE_DEVICES")
        )
    return found


def compiler() -> list[Finding]:
    """Whether Triton can build its launchers: it needs a C compiler and Python's headers where there is a GPU."""
    found = []
    if importlib.util.find_spec("triton") is None:
        return [Finding("Triton", "bad", "not installed", "pip install triton")]
    found.append(Finding("Triton", "good", str(machine.version("triton"))))
    if machine.gpu_count():
        if not any(map(shutil.which, ("cc", "gcc", "clang"))):
            found.append(Finding("Triton", "bad", "no C compiler", "apt-get install gcc, or set CC"))
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            found.append(Finding("Triton", "bad", "Python's headers are missing", "apt-get install python3-dev"))
    return found


def slurm() -> list[Finding]:
    """Whether jobs can be sent to a Slurm cluster from here."""
    if shutil.which("sbatch") is None:
        return [Finding("Slurm", "note", "not here: sweeps run on this machine")]
    try:
        done = subprocess.run(["sinfo", "--noheader", "-o", "%P %a %D"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Finding("Slurm", "note", f"installed, but sinfo fails: {error}", "ask who runs the cluster")]
    if done.returncode:
        said = " ".join(done.stderr.split())[:100] or f"sinfo exits with {done.returncode}"
        return [
            Finding("Slurm", "note", f"installed, but no cluster answers: {said}", "is slurmctld up? sinfo must work")
        ]
    found = [Finding("Slurm", "good", f"{len(done.stdout.splitlines())} partitions")]
    if importlib.util.find_spec("submitit") is None:
        found.append(Finding("Slurm", "bad", "submitit is not installed", "pip install 'tpbench[slurm]'"))
    return found


def disk(output_dir: str = "outputs") -> list[Finding]:
    """Whether rows, logs and shared memory have room."""
    folder = Path(output_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return [
            Finding("disk", "bad", f"{folder} cannot be written: {error.strerror}", "choose another: output_dir=DIR")
        ]
    found = []
    for what, place, enough, mend in (
        ("disk", folder, ENOUGH_DISK_GIB, "make room, or choose another: output_dir=DIR"),
        ("temporary files", Path(tempfile.gettempdir()), ENOUGH_DISK_GIB, "make room, or set TMPDIR"),
        ("shared memory", Path("/dev/shm"), ENOUGH_SHARED_GIB, "NCCL and gloo use it; in a container: --shm-size=8g"),
    ):
        if place.exists():
            free = shutil.disk_usage(place).free / 2**30
            state: Literal["good", "bad"] = "good" if free >= enough else "bad"
            found.append(Finding(what, state, f"{free:.1f} GiB free in {place}", "" if state == "good" else mend))
    return found


def packages() -> list[Finding]:
    """What is not needed, but worth having."""
    wanted = {"matplotlib": "plots: pip install 'tpbench[report]'"}
    return [
        Finding("packages", "note", f"{name} is not installed", mend)
        for name, mend in wanted.items()
        if importlib.util.find_spec(name) is None
    ]
