"""Stand-in for the forward and backward pass, beside which transfers can run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from tpbench.measure.clock import Stopwatch, do_nothing
from tpbench.workloads.embedding_grad.exchanges.base import Phase, StepPoint, sequence
from tpbench.workloads.embedding_grad.training_step.beside_exchange import ForwardIndex

SIDE = 2048
"""Side of the square bf16 matrices whose products are the stand-in on a GPU.

Each product takes about 25 us. They keep the GPU busy as a backward pass would.
"""

FORWARD = 0.5
"""Length of the forward pass over that of the backward pass, which has two products for each of its one."""


class StandIn:
    """Work of a given length: matrix products on a GPU, sleep on a CPU."""

    def __init__(self, backward_ms: float, device: torch.device, stopwatch: Stopwatch) -> None:
        self.seconds, self.device, self.products = backward_ms / 1e3, device, 0
        if device.type == "cuda":
            self.factor = torch.zeros(SIDE, SIDE, dtype=torch.bfloat16, device=device)
            self.product = torch.empty_like(self.factor)
            self.products = 100
            self.products = max(2, round(100 * backward_ms / stopwatch.ms(self.backward)))

    def run(self) -> None:
        """Run both passes."""
        self.forward()
        self.backward()

    def forward(self, part: float = 1.0) -> None:
        """Run a part of the forward pass; on a GPU only queue it."""
        self._work(FORWARD * part)

    def backward(self, part: float = 1.0) -> None:
        """Run a part of the backward pass; on a GPU only queue it."""
        self._work(part)

    def _work(self, share: float) -> None:
        if self.device.type == "cpu":
            time.sleep(share * self.seconds)
        for _ in range(round(share * self.products)):
            torch.mm(self.factor, self.factor, out=self.product)


@dataclass(frozen=True)
class StepTransfers:
    """The exchange's phases by the point of the step after which they start."""

    after_batch: Callable[[], None]
    after_forward: Callable[[], None]
    after_backward: Callable[[], None]
    delayed: bool
    """True if a phase starts after the backward pass that could start before."""


def step_transfers(phases: Sequence[Phase], transfers: str) -> StepTransfers:
    """Return the phases that start after each point of the step, under the problem's option `transfers`."""
    same_point: dict[str, StepPoint] = {"late": "backward", "beside": "batch"}
    by_point: dict[StepPoint, list[Phase]] = {"batch": [], "forward": [], "backward": []}
    for phase in phases:
        by_point[same_point.get(transfers, phase.after)].append(phase)
    delayed = any(phase.after != "backward" for phase in by_point["backward"])
    after_batch, after_forward, after_backward = map(sequence, by_point.values())
    return StepTransfers(after_batch, after_forward, after_backward, delayed)


class OverlappedIteration:
    """Iteration with the stand-in. Transfers have their own stream on a GPU, and their own thread on a CPU."""

    def __init__(
        self,
        phases: Sequence[Phase],
        transfers: str,
        stand_in: StandIn,
        device: torch.device,
        index: ForwardIndex | None = None,
    ) -> None:
        self.transfers = step_transfers(phases, transfers)
        self.stand_in, self.device = stand_in, device
        self.begin_forward = index.begin_forward if index else do_nothing
        self.prepare_next_step = index.prepare_next_step if index else do_nothing
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(max_workers=1) if device.type == "cpu" else None

    def run(self) -> None:
        """Run one iteration; on a GPU queue it, so that the current stream waits for both parts."""
        if self.thread is not None:
            started = [self.thread.submit(self.transfers.after_batch)]
            self.begin_forward()
            self.stand_in.forward()
            started += [self.thread.submit(self.transfers.after_forward), self.thread.submit(self.prepare_next_step)]
            self.stand_in.backward()
            for transfer in started:
                transfer.result()
            self.transfers.after_backward()
            return
        assert self.stream is not None
        compute = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(compute)
        # Queue both passes first: the host's part of the exchange then runs while the GPU is busy.
        self.begin_forward()
        self.stand_in.forward()
        forward_done = compute.record_event()
        self.stand_in.backward()
        self.prepare_next_step()
        with torch.cuda.stream(self.stream):
            self.transfers.after_batch()
            self.stream.wait_event(forward_done)
            self.transfers.after_forward()
            if self.transfers.delayed:
                compute.synchronize()  # the host, too, starts late what could have run early
            self.stream.wait_stream(compute)
            self.transfers.after_backward()
        compute.wait_stream(self.stream)
