"""`python -m tpbench doctor`: problems of this machine, each with a fix."""

import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tpbench import packages
from tpbench.measure import machine
from tpbench.settings import JobError, user_path

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
    if not packages.installed("triton"):
        yield Finding("Triton", "fail", "not installed", packages.pip_install("triton"))
        return
    yield Finding("Triton", "ok", str(machine.version("triton")))
    if machine.gpu_count() and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        yield Finding("Triton", "fail", "no C compiler", "apt-get install gcc, or set CC")
    if machine.gpu_count() and not Path(sysconfig.get_path("include"), "Python.h").exists():
        yield Finding("Triton", "fail", "Python's headers are missing", "apt-get install python3-dev")


def disk(output_dir: str = "outputs") -> Iterator[Finding]:
    """Check the free space for rows, logs and shared memory."""
    folder = Path(output_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    for subject, place, fix in (
        ("disk", folder, "free some space, or choose another folder: output_dir=DIR"),
        ("temporary files", Path(tempfile.gettempdir()), "free some space, or set TMPDIR"),
        ("shared memory", Path("/dev/shm"), "NCCL and gloo use it; start a container with --shm-size=8g"),
    ):
        try:
            with tempfile.TemporaryFile(dir=place):
                free_gib = shutil.disk_usage(place).free / 2**30
        except OSError as error:
            yield Finding(subject, "fail", f"{place} cannot be written: {error.strerror}", fix)
        else:
            state: Literal["ok", "fail"] = "ok" if free_gib >= MIN_FREE_GIB else "fail"
            yield Finding(subject, state, f"{free_gib:.1f} GiB free in {place}", fix if state == "fail" else "")


def main(arguments: Sequence[str]) -> int:
    """Print all findings. The exit code is 1 if a check failed. Raises JobError for invalid arguments."""
    output_dir = "outputs"
    for name, _, value in (argument.partition("=") for argument in arguments):
        if name != "output_dir":
            raise JobError(f"doctor has one argument, output_dir=DIR, and not {name}")
        output_dir = str(user_path(value, name))
    failed = []
    for subject, state, message, fix in examine(output_dir):
        is_failure = state == "fail"
        failed += [subject] * is_failure
        print(f"{'FAIL' if is_failure else state:<4}  {subject}: {message}", flush=True)
        if fix:
            print(f"      {'fix' if is_failure else 'hint'}: {fix}", flush=True)
    if failed:
        print(f"\nVerdict: do not measure here before you fix: {', '.join(dict.fromkeys(failed))}")
        return 1
    place = f"run sweeps on {machine.available_cores()} CPU cores, where times of Triton kernels aren't measurements"
    if count := machine.gpu_count():
        place = f"measure on {count} GPU{'s' * (count > 1)}"
    print(f"\nVerdict: no problem found; this machine can {place}")
    return 0


def examine(output_dir: str) -> Iterator[Finding]:
    """Yield all findings, the quick ones first."""
    yield from gpus()
    yield from compiler()
    yield from disk(output_dir)
    count = machine.gpu_count()
    yield from torch_findings(probe(max(1, count)), count)


def torch_findings(probed: Mapping[str, Any], present: int) -> Iterator[Finding]:
    """Yield findings from torch's view of the machine. `present` is the number of GPUs that the driver has."""
    if "torch" not in probed:
        yield Finding("torch", "fail", f"cannot be used: {probed['error']}", packages.pip_install("torch"))
        return
    message = f"{probed['torch']}, built for {'CUDA ' + probed['cuda'] if probed['cuda'] else 'the CPU'}"
    if present and not probed["gpus"]:
        fix = "install a build of torch (pytorch.org) for a CUDA version that the driver supports: nvidia-smi prints it"
        yield Finding("torch", "fail", f"{message}: {probed.get('cuda_error', 'it sees no GPU')}", fix)
        return
    yield Finding("torch", "ok", message)
    if probed["gpus"] and tuple(probed["capability"]) < (8, 0):
        message = f"a GPU has compute capability {'.'.join(map(str, probed['capability']))}; bfloat16 kernels need 8.0"
        yield Finding("GPUs", "fail", message, "use a newer GPU, or leave this one out with CUDA_VISIBLE_DEVICES")
    if present < 2:
        return
    message = f"{probed['nccl']}: an all-reduce over {present} GPUs"
    if not probed.get("all_reduce"):
        reason = f"fails: {probed['error']}" if "error" in probed else "gives a wrong sum"
        fix = "NCCL_DEBUG=INFO says more; a small /dev/shm and wrong NCCL_SOCKET_IFNAME are usual causes"
        yield Finding("NCCL", "fail", f"{message} {reason}", fix)
        return
    yield Finding("NCCL", "ok", f"{message} gives the right sum")
    if probed["symmetric"]:
        fix = "check NVLink (nvidia-smi topo -m); variants that need it are skipped, and exchange=nccl does not need it"
        yield Finding("symmetric memory", "note", probed["symmetric"], fix)
    else:
        yield Finding("symmetric memory", "ok", f"each of {present} ranks reads its neighbour's")


def probe(ranks: int) -> dict[str, Any]:
    """Return what torch sees here and, of several ranks, whether they can communicate; `error` if that failed."""
    command = [sys.executable, "-m", "tpbench.console.torch_probe", str(ranks)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        output, lines = done.stdout, done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        failed, error = done.returncode != 0, [line for line in lines if "Error" in line] or lines
    except subprocess.TimeoutExpired as timeout:
        output, failed, error = (timeout.stdout or b"").decode(), True, [f"no answer within {TIMEOUT_S} s"]
    facts: dict[str, Any] = {"error": error[-1].strip()[:300]} if failed else {}
    for line in output.splitlines():
        facts |= json.loads(line) if line.startswith("{") else {}
    return facts
