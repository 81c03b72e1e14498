"""The rendezvous of agents and ranks: a file on one host, a prefix that is secret over several nodes."""

import os
import socket
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from tpbench.launcher.slurm.jobs import address_towards, gloo_interface
from tpbench.launcher.torchrun import ProcessTree
from tpbench.worker.rendezvous import FixedNodes, store_of_agents
from tpbench.worker.start import BACKEND, MARKER, SECRET, SECRET_FILE, STORE_FILE, create_secret


def parameters(port: int, nodes: int, node: int) -> RendezvousParameters:
    return RendezvousParameters(BACKEND, f"127.0.0.1:{port}", "job", nodes, nodes, "127.0.0.1", rank=str(node))


def listening() -> set[tuple[str, int]]:
    return {tuple(each.laddr) for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}


def test_on_one_host_the_store_is_a_file_and_nothing_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(STORE_FILE, str(tmp_path / "store"))
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    before = listening()
    meeting = FixedNodes(parameters(0, nodes=1, node=0)).next_rendezvous()
    assert (meeting.rank, meeting.world_size) == (0, 1)
    meeting.store.set("key", "value")
    assert store_of_agents().get("key") == b"value"
    assert listening() == before


def test_nodes_share_a_store_on_one_interface_under_a_secret_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {SECRET: "s" * 32, "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(port))
    first = FixedNodes(parameters(port, nodes=2, node=0)).next_rendezvous()
    assert {address for address, number in listening() if number == port} == {"127.0.0.1"}
    second = FixedNodes(parameters(port, nodes=2, node=1)).next_rendezvous()
    assert [(each.rank, each.world_size) for each in (first, second)] == [(0, 2), (1, 2)]
    assert second.bootstrap_store_info is not None and second.bootstrap_store_info.master_port == port
    first.store.set("key", "value")
    assert store_of_agents().get("key") == second.store.get("key") == b"value"
    monkeypatch.setenv(SECRET, "another")
    assert not store_of_agents().check(["key"])


def test_the_folder_of_the_store_is_its_users_alone_and_does_not_stay(tmp_path: Path) -> None:
    log = tmp_path / "log"
    report = f'folder=$(dirname "${STORE_FILE}"); stat -c "%n %a" "$folder"'
    tree = ProcessTree(["sh", "-c", report], {MARKER: "test", "PATH": os.environ["PATH"]}, log)
    assert tree.agent.wait(60) == 0
    folder, mode = log.read_text().split()
    assert mode == "700"
    tree.end()
    assert not Path(folder).exists()


def test_a_secret_has_128_bits_and_only_its_user_reads_it(tmp_path: Path) -> None:
    secrets = []
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        create_secret(tmp_path / name)
        (file,) = (tmp_path / name).iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
        secrets.append((tmp_path / name / SECRET_FILE).read_text())
    assert len({*secrets}) == 2
    assert all(len(bytes.fromhex(each)) == 16 for each in secrets)


def test_a_node_binds_the_address_that_its_peers_reach() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert gloo_interface("127.0.0.1")["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert gloo_interface("203.0.113.1") == {}
