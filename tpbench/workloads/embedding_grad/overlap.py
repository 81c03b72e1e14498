"""A stand-in for the backward pass, beside which transfers may run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from tpbench.measure.stopwatch import Stopwatch
from tpbench.workloads.embedding_grad.exchange import Phase, sequence

SIDE = 2048
"""Of the square bf16 matrices whose products are the stand-in on a GPU, some 25 us each: they keep it busy as a
backward pass would."""


class StandIn:
    """Work of a given length: products of matrices on a GPU, on a CPU sleep."""

    def __init__(self, ms: float, device: torch.device, stopwatch: Stopwatch) -> None:
        self.seconds, self.device, self.products = ms / 1e3, device, 0
        if device.type == "cuda":
            self.factor = torch.zeros(SIDE, SIDE, dtype=torch.bfloat16, device=device)
            self.product = torch.empty_like(self.factor)
            self.products = 100
            self.products = max(1, round(100 * ms / stopwatch.ms(self.run)))

    def run(self) -> None:
        """On a GPU only queued."""
        if self.device.type == "cpu":
            time.sleep(self.seconds)
        for _ in range(self.products):
            torch.mm(self.factor, self.factor, out=self.product)


def split(phases: Sequence[Phase], transfers: str) -> tuple[list[Phase], list[Phase]]:
    """The phases that run beside the stand-in, and those that run after it."""
    beside = {"early": lambda phase: phase.early, "late": lambda phase: False, "beside": lambda phase: True}[transfers]
    return [each for each in phases if beside(each)], [each for each in phases if not beside(each)]


class Overlap:
    """An iteration with the stand-in: on a GPU transfers have a stream of their own, on a CPU a thread."""

    def __init__(self, phases: Sequence[Phase], transfers: str, stand_in: StandIn, device: torch.device) -> None:
        self.beside, self.after = map(sequence, split(phases, transfers))
        self.stand_in, self.device = stand_in, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(max_workers=1) if device.type == "cpu" else None

    def run(self) -> None:
        """Ends, on a GPU for the current stream, when both have ended."""
        if self.thread is not None:
            running = self.thread.submit(self.beside)
            self.stand_in.run()
            running.result()
            self.after()
            return
        assert self.stream is not None
        compute = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(compute)
        self.stand_in.run()  # first: the host's part of the exchange then runs while the GPU is busy
        with torch.cuda.stream(self.stream):
            self.beside()
            self.stream.wait_stream(compute)
            self.after()
        compute.wait_stream(self.stream)
