"""Symmetric memory never uses NVLink multicast."""

from typing import Any

import pytest

from tpbench.comm.symmetric_buffers import enable_symmetric_memory


def test_multicast_is_refused_before_memory_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    no_group: Any = None
    with pytest.raises(RuntimeError, match="symmetric memory needs TORCH_SYMM_MEM_DISABLE_MULTICAST=1, it is 0"):
        enable_symmetric_memory(no_group)
