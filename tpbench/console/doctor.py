"""`python -m tpbench doctor`: problems of this machine, each with a fix."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tpbench import packages
from tpbench.launcher.devices import available_cores
from tpbench.measure import machine
from tpbench.worker.start import STORE_FILE

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


TIMEOUT_S = 180
_PROBE = "tpbench.console.torch_probe"
_MARKS = {"ok": "ok  ", "note": "note", "fail": "FAIL"}


def main(arguments: Sequence[str]) -> int:
    """Print all findings. The exit code is 1 if a check failed, and 2 for invalid arguments."""
    output_dir = "outputs"
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name != "output_dir" or not value:
            print(f"tpbench: doctor has one argument, output_dir=DIR, and not {argument}", file=sys.stderr)
            return 2
        output_dir = value
    failed: list[str] = []
    for finding in examine(output_dir):
        failed += [finding.subject] if finding.state == "fail" else []
        print(f"{_MARKS[finding.state]}  {finding.subject}: {finding.message}", flush=True)
        if finding.fix:
            print(f"      {'fix' if finding.state == 'fail' else 'hint'}: {finding.fix}", flush=True)
    print(f"\nVerdict: {verdict(failed, machine.gpu_count(), available_cores())}")
    return 1 if failed else 0


def verdict(failed: Sequence[str], gpus: int, cores: int) -> str:
    """Return the verdict: the problems, or what this machine can measure. `failed`: subjects of the failed checks."""
    if failed:
        problems = "one problem" if len(failed) == 1 else f"{len(failed)} problems"
        return f"do not measure here before you fix {problems}: {', '.join(dict.fromkeys(failed))}"
    if gpus:
        return f"no problem found; this machine can measure on {gpus} GPU{'s' * (gpus > 1)}"
    core = f"{cores} CPU core{'s' * (cores > 1)}"
    return f"no problem found; sweeps run on {core}, where times of Triton kernels are no measurement"


def examine(output_dir: str) -> Iterator[Finding]:
    """Yield all findings, the quick ones first."""
    yield from gpus()
    yield from compiler()
    yield from slurm()
    yield from disk(output_dir)
    yield from optional_packages()
    probed = _probe([sys.executable, "-m", _PROBE])
    if isinstance(probed, str):
        yield Finding("torch", "fail", f"cannot be imported: {probed}", packages.pip_install("torch"))
        return
    yield from torch_findings(probed, machine.gpu_count())
    if (ranks := probed["gpus"]) > 1:
        yield from rank_findings(probe_ranks(ranks), ranks)


def torch_findings(probed: Mapping[str, Any], present: int) -> Iterator[Finding]:
    """Yield findings from one process's view of the machine. `present` is the number of GPUs that the driver has."""
    version, gpus = probed["torch"], probed["gpus"]
    build = f"CUDA {probed['cuda']}" if probed["cuda"] else "for the CPU"
    if present and not probed["cuda"]:
        yield Finding("torch", "fail", f"{version} is built {build}", "install a CUDA build of torch (pytorch.org)")
        return
    if present and not gpus:
        message = f"{version}, {build}: {probed.get('cuda_error', 'it sees no GPU')}"
        yield Finding(
            "torch",
            "fail",
            message,
            "the driver must support this CUDA version: nvidia-smi prints the newest that it supports",
        )
        return
    yield Finding("torch", "ok", f"{version}, built {build}")
    if gpus:
        yield Finding("NCCL", "ok", probed["nccl"])
        for major, minor in [each for each in probed["capability"] if tuple(each) < (8, 0)][:1]:
            message = f"a GPU has compute capability {major}.{minor}, and bfloat16 kernels need 8.0"
            yield Finding("GPUs", "fail", message, "use a newer GPU, or leave this one out with CUDA_VISIBLE_DEVICES")
    if gpus > 1 and (unreachable := probed["unreachable"]):
        one, other = unreachable[0]
        message = f"GPU {one} cannot reach GPU {other} ({len(unreachable)} such pairs)"
        fix = "check NVLink (nvidia-smi topo -m) and, in a virtual machine or behind an IOMMU, ACS settings"
        yield Finding("peer access", "fail", message, fix)
    elif gpus > 1:
        yield Finding("peer access", "ok", f"between all {gpus} GPUs")


def rank_findings(probed: Mapping[str, Any] | str, gpus: int) -> Iterator[Finding]:
    """Yield findings from a communication test of all ranks. `probed` is its error message if it failed."""
    if isinstance(probed, str):
        fix = "NCCL_DEBUG=INFO says more; a small /dev/shm and wrong NCCL_SOCKET_IFNAME are usual causes"
        yield Finding("NCCL", "fail", f"an all-reduce over {gpus} GPUs fails: {probed}", fix)
        return
    if probed["nccl"]:
        yield Finding("NCCL", "ok", f"an all-reduce over {gpus} GPUs gives the right sum")
    else:
        yield Finding("NCCL", "fail", f"an all-reduce over {gpus} GPUs gives a wrong sum", "try another driver or NCCL")
    if probed["symmetric"] is True:
        yield Finding("symmetric memory", "ok", f"each of {gpus} ranks reads its neighbour's")
    else:
        message = "a rank reads wrong values" if probed["symmetric"] is False else str(probed["symmetric"])
        fix = "variants that need it are skipped; exchange=nccl does not need it"
        yield Finding("symmetric memory", "note", message, fix)


def probe_ranks(ranks: int) -> dict[str, Any] | str:
    """Test the communication of all ranks of this host. They meet as those of jobs do: no port is open beyond loopback.

    Return the results of rank 0, or a message why there are none.
    """
    with tempfile.TemporaryDirectory(prefix="tpbench-doctor-") as folder:  # of mode 0700
        store = f"{folder}/store"
        torchrun = [
            sys.executable, "-m", "tpbench.worker.torchrun", "--nnodes=1", f"--nproc-per-node={ranks}",
            "--rdzv-backend=tpbench", "--rdzv-id=doctor", "--local-addr=127.0.0.1", f"--log-dir={folder}",
        ]  # fmt: skip
        interface = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
        return _probe([*torchrun, "-m", _PROBE, "--ranks"], {**os.environ, **interface, STORE_FILE: store})


def _probe(command: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, Any] | str:
    """Return the last JSON object that a command prints, or a message why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        return f"no answer within {TIMEOUT_S} s"
    except OSError as error:
        return str(error)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            printed: dict[str, Any] = json.loads(line)
            return printed
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or [f"exit code {done.returncode}"])[-1].strip()[:300]
