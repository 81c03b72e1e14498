"""Work on a GPU whose launches are always the same: after the first time a CUDA graph repeats them."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Replayed:
    """Calls `work` the first time, captures it the second time, and from then on queues replays.

    A replay costs the host about as much as one launch. `work` must only launch kernels on the current stream, and must
    allocate nothing. On a CPU, and while another graph is captured, each call is a call of `work`.
    """

    def __init__(self, work: Callable[[], None], device: torch.device) -> None:
        self.work, self.device = work, device
        self.compiled = False
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Run the work; on a GPU queue it on the current stream."""
        if self.device.type == "cpu" or torch.cuda.is_current_stream_capturing() or not self.compiled:
            self.work()
            self.compiled = True
            return
        if self.graph is None:
            self.graph = self._captured()
        self.graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            # Threads of other libraries may call CUDA at the same time.
            graph.capture_begin(capture_error_mode="thread_local")
            self.work()
            graph.capture_end()
        return graph
