"""Run a command in a network namespace, and see at which addresses its processes listen."""

import contextlib
import os
import subprocess
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from tests.support.command import environment

NAMESPACES = ("--net", "--uts", "--mount")
ISOLATED = ["unshare", *([] if os.getuid() == 0 else ["--map-root-user"]), *NAMESPACES, "--"]
# A second address, which the host name leads to, as that of a network card that other hosts reach.
SETUP = """
ip link set lo up
ip address add 198.51.100.7/24 dev lo
hostname reachable
printf '127.0.0.1 localhost\\n198.51.100.7 reachable\\n' >hosts
mount --bind hosts /etc/hosts
"""
LISTENING = "0A"
"""Linux's number of the state of a TCP socket that listens."""
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
"""127.0.0.1 and ::1."""


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


def alone_on_loopback(command: Sequence[str], folder: Path) -> tuple[int, str]:
    """Run a command, and return its exit code and what it printed. Fail if a socket listens beyond loopback.

    Where the system permits no network namespace, there is a warning in place of this check.
    """
    refusal = _refusal()
    if refusal:
        warnings.warn(f"the sockets of {command} are not looked at: {refusal}", stacklevel=2)
    line = [*command] if refusal else [*ISOLATED, "sh", "-ec", f'{SETUP}exec "$@"', "sh", *command]
    file = folder / "printed"
    with file.open("w") as printed:
        process = subprocess.Popen(line, cwd=folder, env=environment(), stdout=printed, stderr=subprocess.STDOUT)
        seen: set[str] = set()
        while process.poll() is None:
            with contextlib.suppress(OSError):  # it has just ended
                seen |= listeners(process.pid)
            time.sleep(0.05)
    text = file.read_text()
    assert seen or refusal, f"gloo's sockets were not seen:\n{text}"
    assert seen <= LOOPBACK, seen
    return process.returncode, text


def _refusal() -> str:
    """Return why this system permits no network namespace, or an empty string."""
    try:
        done = subprocess.run([*ISOLATED, "ip", "link", "set", "lo", "up"], capture_output=True, text=True)
    except FileNotFoundError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""
