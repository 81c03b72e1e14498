"""A stand-in for the forward and backward pass, beside which transfers may run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from tpbench.measure.stopwatch import Stopwatch
from tpbench.workloads.embedding_grad.exchange import After, Phase, sequence

SIDE = 2048
"""Of the square bf16 matrices whose products are the stand-in on a GPU, some 25 us each: they keep it busy as a
backward pass would."""

FORWARD = 0.5
"""Length of the forward pass over that of the backward, which has two products for each of its one."""


class StandIn:
    """Work of a given length: products of matrices on a GPU, on a CPU sleep."""

    def __init__(self, backward_ms: float, device: torch.device, stopwatch: Stopwatch) -> None:
        self.seconds, self.device, self.products = backward_ms / 1e3, device, 0
        if device.type == "cuda":
            self.factor = torch.zeros(SIDE, SIDE, dtype=torch.bfloat16, device=device)
            self.product = torch.empty_like(self.factor)
            self.products = 100
            self.products = max(2, round(100 * backward_ms / stopwatch.ms(self.backward)))

    def run(self) -> None:
        """Both passes."""
        self.forward()
        self.backward()

    def forward(self) -> None:
        """The forward pass; on a GPU only queued."""
        self._work(FORWARD)

    def backward(self) -> None:
        """The backward pass; on a GPU only queued."""
        self._work(1.0)

    def _work(self, share: float) -> None:
        if self.device.type == "cpu":
            time.sleep(share * self.seconds)
        for _ in range(round(share * self.products)):
            torch.mm(self.factor, self.factor, out=self.product)


def points(phases: Sequence[Phase], transfers: str) -> dict[After, list[Phase]]:
    """What is done as soon as the batch is there, after the forward pass, and after the backward pass."""
    everything: dict[str, After] = {"late": "backward", "beside": "batch"}
    found: dict[After, list[Phase]] = {"batch": [], "forward": [], "backward": []}
    for phase in phases:
        found[everything.get(transfers, phase.after)].append(phase)
    return found


class Overlap:
    """An iteration with the stand-in: on a GPU transfers have a stream of their own, on a CPU a thread."""

    def __init__(self, phases: Sequence[Phase], transfers: str, stand_in: StandIn, device: torch.device) -> None:
        at = points(phases, transfers)
        self.at_once, self.after_forward, self.after_backward = map(sequence, at.values())
        self.held_back = any(phase.after != "backward" for phase in at["backward"])
        self.stand_in, self.device = stand_in, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(max_workers=1) if device.type == "cpu" else None

    def run(self) -> None:
        """Ends, on a GPU for the current stream, when both have ended."""
        if self.thread is not None:
            begun = [self.thread.submit(self.at_once)]
            self.stand_in.forward()
            begun.append(self.thread.submit(self.after_forward))
            self.stand_in.backward()
            for each in begun:
                each.result()
            self.after_backward()
            return
        assert self.stream is not None
        compute = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(compute)
        # Both passes first: the host's part of the exchange then runs while the GPU is busy.
        self.stand_in.forward()
        forward_done = compute.record_event()
        self.stand_in.backward()
        with torch.cuda.stream(self.stream):
            self.at_once()
            self.stream.wait_event(forward_done)
            self.after_forward()
            if self.held_back:
                compute.synchronize()  # so that the host too begins late with what could have been early
            self.stream.wait_stream(compute)
            self.after_backward()
        compute.wait_stream(self.stream)
