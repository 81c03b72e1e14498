"""The rendezvous of a job's agents and ranks. On one host no port is open, and nothing is unpickled anywhere.

torchrun's own rendezvous (c10d) listens on all interfaces and unpickles its state, which everyone who reaches the port
can write. Here the number of nodes is fixed. So the nodes need no state: each knows its number, and all share a store.
"""

import os
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from tpbench.worker.start import BACKEND, SECRET, STORE_FILE


class FixedNodes(StaticTCPRendezvous):
    """Rendezvous of a fixed number of nodes. `rank` in torchrun's `--rdzv-conf` is the number of this node."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        nodes, node = parameters.max_nodes, parameters.get_as_int("rank", 0) or 0
        if nodes == 1:
            address, port = "127.0.0.1", "0"
            self.store: Store = FileStore(os.environ[STORE_FILE])
        else:
            address, _, port = parameters.endpoint.rpartition(":")
            descriptor = None
            if node == 0:  # torch would listen on all interfaces
                here = parameters.local_addr or address
                family = socket.getaddrinfo(here, int(port), type=socket.SOCK_STREAM)[0][0]
                descriptor = socket.create_server((here, int(port)), family=family, backlog=4096).detach()
            self.store = _tcp_store(address, int(port), is_master=node == 0, master_listen_fd=descriptor)
        super().__init__(address, int(port), node, nodes, parameters.run_id, timeout=0)

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        bootstrap = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(self.store, self.rank, self.world_size, bootstrap)


def store_of_agents() -> Store:
    """Return the store of this rank's agent, in which the ranks find each other."""
    if os.environ["GROUP_WORLD_SIZE"] == "1":
        return FileStore(os.environ[STORE_FILE])
    return _tcp_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def _tcp_store(address: str, port: int, **options: Any) -> Store:
    """Return a store whose keys have the job's secret in front. It waits ten minutes for nodes that start later."""
    store = TCPStore(address, port, timeout=timedelta(minutes=10), wait_for_workers=False, **options)
    return PrefixStore(os.environ[SECRET], store)
