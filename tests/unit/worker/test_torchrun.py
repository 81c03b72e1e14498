"""The processes of a job meet in a file of their user, and no port is open."""

import os
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry

from tpbench.launcher.torchrun import ProcessTree
from tpbench.worker.start import BACKEND, MARKER, STORE_FILE
from tpbench.worker.torchrun import register_rendezvous


def listening() -> set[tuple[str, int]]:
    return {tuple(each.laddr) for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}


def test_the_store_is_a_file_and_nothing_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(STORE_FILE, str(tmp_path / "store"))
    before = listening()
    register_rendezvous()
    meeting = registry.create_handler(RendezvousParameters(BACKEND, "", "job", 1, 1)).next_rendezvous()
    meeting.store.set("key", "value")
    assert (meeting.rank, meeting.world_size) == (0, 1)
    assert (tmp_path / "store").exists() and listening() == before


def test_the_folder_of_the_store_is_its_users_alone_and_does_not_stay(tmp_path: Path) -> None:
    log = tmp_path / "log"
    report = f'folder=$(dirname "${STORE_FILE}"); stat -c "%n %a" "$folder"'
    tree = ProcessTree(["sh", "-c", report], {MARKER: "test", "PATH": os.environ["PATH"]}, log)
    assert tree.agent.wait(60) == 0
    folder, mode = log.read_text().split()
    assert mode == "700"
    tree.end()
    assert not Path(folder).exists()
