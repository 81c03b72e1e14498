"""Facts about this machine and its installed software, found without torch. The worker adds facts from torch."""

import contextlib
import functools
import json
import os
import platform
import re
import socket
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import tpbench

RECORDED_VARIABLES = re.compile(
    r"CUDA_(DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING|VISIBLE_DEVICES)|NCCL_\w+|GLOO_SOCKET_IFNAME|(MKL|OMP)_NUM_THREADS|"
    r"PYTORCH_(CUDA_)?ALLOC_CONF|TORCH_(NCCL_(?!ASYNC_ERROR_HANDLING)|SYMM_MEM_)\w+|TRITON_INTERPRET"
)
"""Environment variables that can change a measurement, and that torchrun does not set. A row records no others."""

SHARE_OF_FREE = 0.9
"""Fraction of a CPU machine's free memory that the ranks share. The rest is for the launcher and the page cache."""

KNOWN_GPUS = {"A100": (79.2, 2039.0), "H100": (79.2, 3350.0), "H200": (139.8, 4800.0), "B200": (178.4, 8000.0)}
"""Memory in GiB and datasheet bandwidth in GB/s of SXM modules (A100: 80 GB), by a part of the GPU's name."""

L2_FLUSH_BYTES = 256 * 2**20
"""Bytes that the clocks write between iterations: at least twice the L2 cache of current GPUs (an H200 has 50 MiB, a
B200 126 MiB)."""


def known_gpu(name: str) -> tuple[float, float] | None:
    """Return memory in GiB and datasheet bandwidth in GB/s of a GPU whose name contains that of a known one."""
    if re.search("PCIE|NVL", name.upper()):  # they have other memory than SXM modules
        return None
    return next((facts for known, facts in KNOWN_GPUS.items() if known in name.upper()), None)


def facts() -> dict[str, Any]:
    """Return the columns that are equal in all rows from this machine and this installation."""
    return {
        "host": socket.gethostname(),
        "os": f"{platform.system()} {platform.release()}",
        "cpu_model": _cpu_model(),
        "cpu_count": available_cores(),
        "memory_gib": psutil.virtual_memory().total / 2**30,
        "python_version": platform.python_version(),
        "torch_version": version("torch"),
        "triton_version": version("triton"),
        "tpbench_version": tpbench.__version__,
        **_git(),
        **_gpus(),
    }


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def recorded_environment() -> str:
    """Return the recorded environment variables that are set, as JSON."""
    recorded = {name: value for name, value in os.environ.items() if RECORDED_VARIABLES.fullmatch(name)}
    return json.dumps(recorded, sort_keys=True)


def omp_threads(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of threads that OMP_NUM_THREADS asks for, the first of a list, or None if it has none."""
    text = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return (int(text) or None) if text.isdecimal() else None


def gpu_count() -> int:
    """Return the number of GPUs that a job started here can use."""
    return len(visible_gpus())


def visible_gpus() -> list[tuple[str, str]]:
    """Return UUID and name of each GPU that a job started here can use.

    The name is that of CUDA_VISIBLE_DEVICES, else the UUID. As in CUDA, the list ends before the first name that isn't
    a GPU, such as -1, and is empty if a GPU is named twice. Parts of a GPU (MIG) keep the name that the user wrote.
    """
    if (nvml := load_nvml()) is None:
        return []
    present = [nvml.nvmlDeviceGetUUID(handle) for handle in gpu_handles(nvml)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [(uuid, uuid) for uuid in present]
    gpus = []
    for name in map(str.strip, visible.split(",")):
        matching = [uuid for at, uuid in enumerate(present) if name == str(at) or (name and uuid.startswith(name))]
        if not matching and not name.startswith("MIG-"):
            break
        gpus.append((matching[0] if matching else name, name))
    return gpus if len(dict(gpus)) == len(gpus) else []


def version(package: str) -> str | None:
    """Return the installed version of a package without importing it, with a local part such as 2.11.0+cu130."""
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    # The metadata of torch's wheels may lack the local part, but ranks record torch.__version__.
    with contextlib.suppress(OSError):
        text = Path(str(distribution.locate_file(f"{package}/version.py"))).read_text()
        if match := re.search(rf"^__version__ = '({re.escape(distribution.version)}\+.+)'$", text, re.MULTILINE):
            return match[1]
    return distribution.version


def available_memory_gib() -> float:
    """Return the main memory that can still be allocated in GiB: free memory, limited by this process's cgroup."""
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # without a limit its text is "max"
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free / 2**30


def memory_share_gib(ranks_here: int) -> float:
    """Return the main memory in GiB that each of the ranks on this host may use, if none has a limit of its own."""
    return SHARE_OF_FREE * available_memory_gib() / ranks_here


def load_nvml() -> Any | None:
    """Return the initialised module `pynvml`, or None without it or without an NVIDIA driver."""
    with contextlib.suppress(ImportError):
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            return pynvml
    return None


def gpu_handles(nvml: Any) -> list[Any]:
    """Return NVML's handle of each GPU of this machine."""
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def _gpus() -> dict[str, Any]:
    nvml = load_nvml()
    names = [nvml.nvmlDeviceGetName(handle) for handle in gpu_handles(nvml)] if nvml else []
    if nvml is None or not names:
        return {"gpu_count": 0}
    name, driver = " + ".join(sorted(set(names))), nvml.nvmlSystemGetDriverVersion()
    return {"gpu_count": len(names), "gpu_name": name, "driver_version": driver}


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git() -> dict[str, Any]:
    root = Path(tpbench.__file__).resolve().parents[1]
    return _state(root) if (root / ".git").exists() else {}


@functools.cache
def user_commit(folder: Path) -> str | None:
    """Return the commit of the git repository of a folder, or None if it is in none, or in the checkout of tpbench."""
    if folder.resolve().is_relative_to(Path(tpbench.__file__).resolve().parents[1]):
        return None
    state = _state(folder, "--untracked-files=no")
    return f"{state['git_commit']}{' and changes' * state['git_dirty']}" if state else None


def _state(root: Path, *options: str) -> dict[str, Any]:
    # A git hook has variables such as GIT_DIR, of another repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    git = functools.partial(subprocess.check_output, cwd=root, env=env, stderr=subprocess.DEVNULL, text=True)
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        commit = git(["git", "rev-parse", "HEAD"])
        status = git(["git", "--no-optional-locks", "status", "--porcelain", *options])
        return {"git_commit": commit.strip(), "git_dirty": bool(status.strip())}
    return {}
