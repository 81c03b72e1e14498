"""The buffers through which rows of a search on the CPU go to the GPU."""

from typing import Any
from unittest import mock

import torch

from tpbench.workloads.embedding_grad.exchanges.search import PinnedRing


class LateRing(PinnedRing):
    """Ring whose device copies only when the host waits, like a device that is far behind the host."""

    def __init__(self) -> None:
        super().__init__(4, torch.device("cpu"))
        self.waits = 0

    def copy(self, filled: torch.Tensor, out: torch.Tensor) -> Any:
        def finish() -> None:
            self.waits += 1
            out.copy_(filled)

        return mock.Mock(synchronize=finish)


def test_a_pinned_buffer_is_not_written_before_its_copy_ended() -> None:
    ring = LateRing()
    uploaded = [torch.full((3,), -1, dtype=torch.int32) for _ in range(6)]
    for step, out in enumerate(uploaded):
        ring.upload(lambda buffer, step=step: buffer.fill_(step), out)  # type: ignore[misc]
    assert ring.waits == 4  # and no more waits than necessary
    assert [numbers.tolist() for numbers in uploaded[:4]] == [[step] * 3 for step in range(4)]
