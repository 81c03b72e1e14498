"""No socket of a sweep or of the doctor listens beyond loopback on one host, as a network namespace shows."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tpbench as package
from tests.support.command import COMMAND, environment

SMALL = ("tokens=64", "vocab=2048", "tp_size=2", "dtype=float32", "device=cpu", "measure=quick", "max_iterations=40")
SWEEP = ("-m", "variant=pytorch_gather,pytorch_tp_manual", "reuse=true", "order=interleaved", *SMALL)
ISOLATED = ["unshare", *([] if os.getuid() == 0 else ["--map-root-user"]), "--net", "--"]
LISTENING = "0A"
"""Linux's number of the state of a TCP socket that listens."""
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
"""127.0.0.1 and ::1."""


def require_namespaces() -> None:
    try:
        done = subprocess.run([*ISOLATED, "ip", "link", "set", "lo", "up"], capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(f"a network namespace needs unshare and ip: {error}")
    if done.returncode:
        pytest.skip(f"this system permits no network namespace: {done.stderr.strip()}")


def listeners(pid: int) -> set[str]:
    """Return the addresses, in hexadecimal, at which TCP sockets listen in the network namespace of a process.

    There are none before the process has entered a namespace of its own.
    """
    found: set[str] = set()
    if Path(f"/proc/{pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink():
        return found
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING:
                found.add(fields[1].partition(":")[0])
    return found


def listeners_of(command: list[str], folder: Path) -> set[str]:
    """Run a command in a network namespace of its own. Return the addresses at which its processes listened."""
    require_namespaces()
    # A second address, which the host name leads to and which other hosts could reach.
    setup = (
        "ip link set lo up && ip link add d0 type dummy && ip address add 198.51.100.7/24 dev d0 && ip link set d0 up"
    )
    line = [*ISOLATED, "sh", "-c", f'{setup}; exec "$@"', "sh", *command]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(line, cwd=folder, env=environment(), stdout=log, stderr=subprocess.STDOUT)
        seen: set[str] = set()
        while process.poll() is None:
            try:
                seen |= listeners(process.pid)
            except OSError:  # it has just ended
                break
            time.sleep(0.05)
    assert process.wait() == 0, (folder / "log").read_text()
    assert seen, "gloo's sockets were not seen"
    return seen


def test_no_socket_of_a_sweep_listens_beyond_loopback(tmp_path: Path) -> None:
    assert listeners_of([*COMMAND, *SWEEP], tmp_path) <= LOOPBACK
    assert set(package.load(tmp_path / "outputs")["status"]) == {"ok"}


def test_no_socket_of_the_doctors_ranks_listens_beyond_loopback(tmp_path: Path) -> None:
    """The same code runs over NCCL if there are GPUs."""
    assert listeners_of([sys.executable, "-m", "tpbench.console.torch_probe", "0", "2"], tmp_path) <= LOOPBACK
