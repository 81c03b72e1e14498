"""Files of users are described in this process: one of its own would import torch. End-to-end tests start it."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.registered import forget
from tpbench.launcher.command_line import outside_choices
from tpbench.outside.describe import described


@pytest.fixture(autouse=True)
def described_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # in another folder its name would be a part of a variant's
    run = subprocess.run

    def run_here(command: Any, **options: Any) -> Any:
        if "tpbench.outside.describe" not in command:
            return run(command, **options)
        *_, path, version = command
        return subprocess.CompletedProcess(command, 0, json.dumps(described(Path(path), version)), "")

    monkeypatch.setattr(subprocess, "run", run_here)
    yield
    outside_choices.command_line_variants.clear()
    forget()
