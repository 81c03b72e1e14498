"""`python -m tpbench doctor`: problems of this machine, each with a fix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tpbench import packages
from tpbench.console import checks
from tpbench.console.checks import Finding
from tpbench.handover.rendezvous import STORE_FILE
from tpbench.launcher.cores import available_cores
from tpbench.measure import machine

TIMEOUT_S = 180
_PROBE = "tpbench.console.torch_probe"
_MARKS = {"good": "ok  ", "note": "note", "bad": "BAD "}


def main(arguments: Sequence[str]) -> int:
    """Print all findings. The exit code is 1 if one of them is bad, and 2 for invalid arguments."""
    output_dir = "outputs"
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name != "output_dir" or not value:
            print(f"tpbench: doctor takes output_dir=DIR, got {argument}", file=sys.stderr)
            return 2
        output_dir = value
    bad: list[str] = []
    for finding in examine(output_dir):
        bad += [finding.subject] if finding.state == "bad" else []
        print(f"{_MARKS[finding.state]}  {finding.subject}: {finding.message}", flush=True)
        if finding.fix:
            print(f"      {'mend' if finding.state == 'bad' else 'hint'}: {finding.fix}", flush=True)
    print(f"\nVerdict: {verdict(bad, machine.gpu_count(), available_cores())}")
    return 1 if bad else 0


def verdict(bad: Sequence[str], gpus: int, cores: int) -> str:
    """Return the verdict: problems to solve, or what this machine can measure. `bad`: subjects of bad findings."""
    if bad:
        problems = "one problem" if len(bad) == 1 else f"{len(bad)} problems"
        return f"do not measure here yet, {problems} ({', '.join(dict.fromkeys(bad))}) to mend"
    if gpus:
        return f"this machine can measure on {gpus} GPU{'s' * (gpus > 1)}, nothing to mend"
    core = f"{cores} CPU core{'s' * (cores > 1)}"
    return f"sweeps run on {core}, times of Triton kernels are no measurement there, nothing to mend"


def examine(output_dir: str) -> Iterator[Finding]:
    """Yield all findings, the quick ones first."""
    yield from checks.gpus()
    yield from checks.compiler()
    yield from checks.slurm()
    yield from checks.disk(output_dir)
    yield from checks.optional_packages()
    probed = _probe([sys.executable, "-m", _PROBE])
    if isinstance(probed, str):
        yield Finding("torch", "bad", f"cannot be imported: {probed}", packages.pip_install("torch"))
        return
    yield from torch_findings(probed, machine.gpu_count())
    if (gpus := probed["gpus"]) > 1:
        yield from rank_findings(probe_ranks(gpus), gpus)


def torch_findings(probed: Mapping[str, Any], present: int) -> Iterator[Finding]:
    """Yield findings from one process's view of the machine. `present` is the number of GPUs that the driver has."""
    version, gpus = probed["torch"], probed["gpus"]
    build = f"CUDA {probed['cuda']}" if probed["cuda"] else "for the CPU"
    if present and not probed["cuda"]:
        yield Finding("torch", "bad", f"{version} is built {build}", "install a CUDA build of torch (pytorch.org)")
        return
    if present and not gpus:
        message = f"{version}, {build}: {probed.get('cuda_error', 'it sees no GPU')}"
        yield Finding("torch", "bad", message, "does the driver know this CUDA? (nvidia-smi)")
        return
    yield Finding("torch", "good", f"{version}, built {build}")
    if gpus:
        yield Finding("NCCL", "good", probed["nccl"])
        for major, minor in [each for each in probed["capability"] if tuple(each) < (8, 0)][:1]:
            yield Finding("GPUs", "bad", f"compute capability {major}.{minor}", "bfloat16 kernels need 8.0 or more")
    if gpus > 1 and (unreachable := probed["refused"]):
        one, other = unreachable[0]
        message = f"GPU {one} cannot reach GPU {other} ({len(unreachable)} such pairs)"
        fix = "check NVLink (nvidia-smi topo -m) and, in a virtual machine or behind an IOMMU, ACS settings"
        yield Finding("peer access", "bad", message, fix)
    elif gpus > 1:
        yield Finding("peer access", "good", f"between all {gpus} GPUs")


def rank_findings(probed: Mapping[str, Any] | str, gpus: int) -> Iterator[Finding]:
    """Yield findings from a communication test of all ranks. `probed` is its error message if it failed."""
    if isinstance(probed, str):
        fix = "NCCL_DEBUG=INFO says more; a small /dev/shm and wrong NCCL_SOCKET_IFNAME are usual causes"
        yield Finding("NCCL", "bad", f"an all-reduce over {gpus} GPUs fails: {probed}", fix)
        return
    if probed["nccl"]:
        yield Finding("NCCL", "good", f"an all-reduce over {gpus} GPUs is right")
    else:
        yield Finding("NCCL", "bad", f"an all-reduce over {gpus} GPUs is wrong", "try another driver or NCCL")
    if probed["symmetric"] is True:
        yield Finding("symmetric memory", "good", f"each of {gpus} ranks reads its neighbour's")
    else:
        message = "a rank reads wrong values" if probed["symmetric"] is False else str(probed["symmetric"])
        fix = "variants that need it are skipped; exchange=nccl works without"
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
