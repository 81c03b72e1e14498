"""Unit tests start no Python process and no process group: each costs seconds."""

import multiprocessing.process
import subprocess
import sys
from typing import Any

import pytest
import torch.distributed

MESSAGE = "a unit test starts no Python process and no process group: see the table of tests in CONTRIBUTING.md"


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that starts one. Short commands of the system, such as git, are allowed."""
    start = subprocess.Popen.__init__

    def only_commands(process: subprocess.Popen[Any], args: Any, *rest: Any, **options: Any) -> None:
        if sys.executable in str(args):
            pytest.fail(MESSAGE)
        start(process, args, *rest, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", only_commands)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", lambda _: pytest.fail(MESSAGE))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: pytest.fail(MESSAGE))
