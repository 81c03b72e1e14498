"""The rendezvous of a job's agents and ranks. On one host no port is open, and nothing is unpickled anywhere.

torchrun's own rendezvous (c10d) listens on all interfaces and unpickles its state, which everyone who reaches the port
can write. Here the number of nodes is fixed. So the nodes need no state: each knows its number, and all share a store.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from tpbench.worker.start import SECRET, STORE_FILE

BACKEND = "tpbench"
"""Name of this rendezvous on torchrun's command line."""


class FixedNodes(RendezvousHandler):
    """Rendezvous of a fixed number of nodes. `rank` in torchrun's `--rdzv-conf` is the number of this node."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self.run_id, self.nodes = parameters.run_id, parameters.max_nodes
        self.node = parameters.get_as_int("rank", 0) or 0
        self.address, self.port = "127.0.0.1", 0
        if self.nodes == 1:
            self.store: Store = FileStore(os.environ[STORE_FILE])
            return
        self.address, _, port = parameters.endpoint.rpartition(":")
        self.port = int(port)
        descriptor = None
        if self.node == 0:  # torch would listen on all interfaces
            here = parameters.local_addr or self.address
            family = socket.getaddrinfo(here, self.port, type=socket.SOCK_STREAM)[0][0]
            descriptor = socket.create_server((here, self.port), family=family, backlog=4096).detach()
        self.store = _tcp_store(self.address, self.port, is_master=self.node == 0, master_listen_fd=descriptor)

    @property
    def use_agent_store(self) -> bool:
        """True: the ranks use the store of the agents."""
        return True

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return the name of the job, which isn't secret."""
        return self.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store and the number of this node."""
        return RendezvousInfo(self.store, self.node, self.nodes, RendezvousStoreInfo(self.address, self.port))

    def is_closed(self) -> bool:
        """Return False: a job has one rendezvous, which lasts as long as its agents."""
        return False

    def set_closed(self) -> None:
        """Do nothing: no node joins later."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no node joins later."""
        return 0

    def shutdown(self) -> bool:
        """Return True: the store ends with its processes."""
        return True


def store_of_agents() -> Store:
    """Return the store of this rank's agent, in which the ranks find each other."""
    if os.environ["GROUP_WORLD_SIZE"] == "1":
        return FileStore(os.environ[STORE_FILE])
    return _tcp_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def _tcp_store(address: str, port: int, **options: Any) -> Store:
    """Return a store whose keys have the job's secret in front. It waits ten minutes for nodes that start later."""
    store = TCPStore(address, port, timeout=timedelta(minutes=10), wait_for_workers=False, **options)
    return PrefixStore(os.environ[SECRET], store)
