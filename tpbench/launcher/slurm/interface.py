"""The network interface on which the nodes of a job reach each other."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def reachable_address(own: str, peer: str) -> str:
    """Return the IP address at which this node's peers reach it.

    `own`: name or address of this node in Slurm's configuration, which this node may resolve to a loopback address.
    `peer`: name or address of another node.
    """
    _, address = _resolve(own)
    family, of_peer = _resolve(peer)
    if not ipaddress.ip_address(address).is_loopback:
        return address
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((of_peer, 9))  # sends nothing; the kernel chooses the interface
        return str(probe.getsockname()[0])


def gloo_interface(address: str) -> dict[str, str]:
    """Return the variable that makes gloo use the interface with this IP address. Empty if no interface has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    return family, str(address[0])
