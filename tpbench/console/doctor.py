"""`python -m tpbench doctor`: what is wrong with this machine, and what to mend."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tpbench.console import checks
from tpbench.console.checks import Finding
from tpbench.measure import machine

TIMEOUT_S = 180
_PROBE = "tpbench.console.torch_probe"
_SIGNS = {"good": "ok  ", "note": "note", "bad": "BAD "}


def main(arguments: Sequence[str]) -> int:
    """Print all findings; the exit code is 1 where something is to be mended, 2 for arguments that it does not take."""
    output_dir = "outputs"
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name != "output_dir" or not value:
            print(f"tpbench: doctor takes output_dir=DIR, got {argument}", file=sys.stderr)
            return 2
        output_dir = value
    bad = 0
    for finding in examine(output_dir):
        bad += finding.state == "bad"
        print(f"{_SIGNS[finding.state]}  {finding.what}: {finding.said}", flush=True)
        if finding.mend:
            print(f"      {'mend' if finding.state == 'bad' else 'hint'}: {finding.mend}", flush=True)
    print(f"\n{bad} to mend" if bad else "\nnothing to mend")
    return 1 if bad else 0


def examine(output_dir: str) -> Iterator[Finding]:
    """All findings, the quick ones first."""
    yield from checks.gpus()
    yield from checks.compiler()
    yield from checks.slurm()
    yield from checks.disk(output_dir)
    yield from checks.packages()
    seen = _ask([sys.executable, "-m", _PROBE])
    if isinstance(seen, str):
        yield Finding("torch", "bad", f"cannot be imported: {seen}", "pip install torch")
        return
    present = machine.gpu_count()
    yield from of_torch(seen, present)
    if seen["gpus"] > 1:
        ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={seen['gpus']}"]
        yield from of_ranks(_ask([*ranks, "-m", _PROBE, "--ranks"]), seen["gpus"])


def of_torch(seen: Mapping[str, Any], present: int) -> Iterator[Finding]:
    """What torch's view of the machine means. `present`: GPUs that the driver has."""
    build = f"CUDA {seen['cuda']}" if seen["cuda"] else "for the CPU"
    if present and not seen["cuda"]:
        yield Finding(
            "torch", "bad", f"{seen['torch']} is built {build}", "install a CUDA build of torch (pytorch.org)"
        )
        return
    if present and not seen["gpus"]:
        said = seen.get("cuda_error", "it sees no GPU")
        yield Finding(
            "torch", "bad", f"{seen['torch']}, {build}: {said}", "does the driver know this CUDA? (nvidia-smi)"
        )
        return
    yield Finding("torch", "good", f"{seen['torch']}, built {build}")
    if seen["gpus"]:
        yield Finding("NCCL", "good", seen["nccl"])
        old = [capability for capability in seen["capability"] if tuple(capability) < (8, 0)]
        if old:
            yield Finding(
                "GPUs", "bad", f"compute capability {old[0][0]}.{old[0][1]}", "bfloat16 kernels need 8.0 or more"
            )
    if seen["gpus"] > 1:
        if seen["refused"]:
            one, other = seen["refused"][0]
            said = f"GPU {one} cannot reach GPU {other}" + f" ({len(seen['refused'])} such pairs)"
            mend = "check NVLink (nvidia-smi topo -m) and, in a virtual machine or behind an IOMMU, ACS settings"
            yield Finding("peer access", "bad", said, mend)
        else:
            yield Finding("peer access", "good", f"between all {seen['gpus']} GPUs")


def of_ranks(seen: Mapping[str, Any] | str, gpus: int) -> Iterator[Finding]:
    """What the ranks' try at talking to each other means."""
    if isinstance(seen, str):
        mend = "NCCL_DEBUG=INFO says more; a small /dev/shm and wrong NCCL_SOCKET_IFNAME are usual causes"
        yield Finding("NCCL", "bad", f"an all-reduce over {gpus} GPUs fails: {seen}", mend)
        return
    if seen["nccl"]:
        yield Finding("NCCL", "good", f"an all-reduce over {gpus} GPUs is right")
    else:
        yield Finding("NCCL", "bad", f"an all-reduce over {gpus} GPUs is wrong", "try another driver or NCCL")
    if seen["symmetric"] is True:
        yield Finding("symmetric memory", "good", f"each of {gpus} ranks reads its neighbour's")
    else:
        said = "a rank reads wrong values" if seen["symmetric"] is False else str(seen["symmetric"])
        yield Finding(
            "symmetric memory", "note", said, "variants that need it are skipped; exchange=nccl works without"
        )


def _ask(command: Sequence[str]) -> dict[str, Any] | str:
    """The JSON that a command prints last, or why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {TIMEOUT_S} s"
    except OSError as error:
        return str(error)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or [f"exit code {done.returncode}"])[-1].strip()[:300]
