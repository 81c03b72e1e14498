"""What this machine is and what is installed on it, found without torch (the worker adds what only torch knows)."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import re
import socket
import subprocess
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import tpbench

RECORDED_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "TORCH_NCCL_HIGH_PRIORITY",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "TRITON_INTERPRET",
)
"""The environment variables that a row may show: those that change a measurement. No other one leaves the process."""


def facts() -> dict[str, Any]:
    """Columns that are the same for every row made on this machine by this installation."""
    return {
        "host": socket.gethostname(),
        "os": f"{platform.system()} {platform.release()}",
        "cpu_model": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "memory_gib": psutil.virtual_memory().total / 2**30,
        "python_version": platform.python_version(),
        "torch_version": version("torch"),
        "triton_version": version("triton"),
        "tpbench_version": tpbench.__version__,
        "kernels_version": kernels_version(),
        **_git(),
        **_gpus(),
    }


def recorded_environment(environment: Mapping[str, str] = os.environ) -> str:
    """The variables of a rank's environment that a row shows, as JSON."""
    return json.dumps({name: environment[name] for name in RECORDED_VARIABLES if name in environment})


def gpu_count() -> int:
    """GPUs that a job started here could use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with nvml_session() as nvml:
        if nvml is None:
            return 0
        present = int(nvml.nvmlDeviceGetCount())
        return present if visible is None else min(present, len([each for each in visible.split(",") if each.strip()]))


def version(package: str) -> str | None:
    """The installed version of a package, without importing it. Includes a build's local part, as 2.11.0+cu130."""
    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    # torch's own file says its local part, the metadata of a wheel need not: rows that ranks wrote would look stale.
    with contextlib.suppress(OSError):
        text = Path(str(found.locate_file(f"{package}/version.py"))).read_text()
        said = re.search(r"^__version__ = '(.+)'$", text, re.MULTILINE)
        if said and said[1].startswith(f"{found.version}+"):
            return said[1]
    return found.version


@functools.cache
def kernels_version() -> str:
    """Hash of the kernels' source and choices: rows of different ones are of different things, whatever the release."""
    import hashlib

    root = Path(tpbench.__file__).parent
    digest = hashlib.sha256()
    for file in kernel_sources(root):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def kernel_sources(root: Path) -> list[Path]:
    """The package's kernels with what chooses among them, and the Triton kernels that workloads keep themselves."""
    own = [each for each in (root / "kernels").rglob("*") if each.suffix in (".py", ".json")]
    return sorted([*own, *(root / "workloads").rglob("*_kernel.py")])


def available_memory_gib() -> float:
    """Main memory that could still be taken: what is free, or what this process's cgroup leaves of it."""
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return free / 2**30


@contextlib.contextmanager
def nvml_session() -> Iterator[Any]:
    """NVML, or None where there is no NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _gpus() -> dict[str, Any]:
    with nvml_session() as nvml:
        if nvml is None or not (count := nvml.nvmlDeviceGetCount()):
            return {"gpu_count": 0}
        names = {nvml_text(nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(index))) for index in range(count)}
        return {
            "gpu_count": count,
            "gpu_name": " + ".join(sorted(names)),
            "driver_version": nvml_text(nvml.nvmlSystemGetDriverVersion()),
        }


def nvml_text(value: str | bytes) -> str:
    """What NVML's bindings give as bytes or as text, by their version."""
    return value.decode() if isinstance(value, bytes) else value


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git() -> dict[str, Any]:
    """The commit of the checkout that this package lies in, if it lies in one."""
    root = Path(tpbench.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return {}
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        status = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"git_commit": commit.stdout.strip(), "git_dirty": bool(status.stdout.strip())}
