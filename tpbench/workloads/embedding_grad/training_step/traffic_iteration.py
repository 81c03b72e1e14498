"""An iteration whose exchange takes place among the transfers of other parameters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from tpbench.workloads.embedding_grad.exchanges.base import Phase
from tpbench.workloads.embedding_grad.problem import EmbeddingGrad
from tpbench.workloads.embedding_grad.training_step.beside_exchange import ForwardIndex, OtherParameters
from tpbench.workloads.embedding_grad.training_step.overlap import StandIn, step_transfers


class TrafficIteration:
    """An iteration of both passes, the exchange, and all-gathers and reduce-scatters of other parameters.

    With transfer_order=passes each pass has a part for each parameter: an all-gather precedes each part of the forward
    pass, and a reduce-scatter follows each part of the backward pass. The other orders have all transfers after the
    backward pass, as in the speed record: all reduce-scatters, then all all-gathers. The exchange's phases that need
    the gradient come before both, between them, or after both.

    A communicator runs its collectives in the order in which the host queues them. On a CPU nothing runs beside the
    passes. `overlap.OverlappedIteration` differs: without other transfers it can queue both passes before the exchange.
    """

    def __init__(
        self,
        problem: EmbeddingGrad,
        phases: Sequence[Phase],
        stand_in: StandIn,
        others: OtherParameters,
        index: ForwardIndex | None,
        device: torch.device,
    ) -> None:
        self.transfers = step_transfers(phases, problem.transfers)
        self.stand_in, self.others, self.index, self.device = stand_in, others, index, device
        self.order = problem.transfer_order
        on_gpu = device.type == "cuda"
        self.exchange_stream = torch.cuda.Stream(device) if on_gpu else None
        self.others_stream = torch.cuda.Stream(device) if on_gpu else None

    def run(self) -> None:
        """Run one iteration; on a GPU queue it, so that the current stream waits for all parts."""
        self._wait_for_compute(self.exchange_stream)
        self._wait_for_compute(self.others_stream)
        if self.index is not None:
            self.index.begin_forward()
        self._forward()
        with self._on(self.exchange_stream):
            self.transfers.after_batch()
        self._wait_for_compute(self.exchange_stream)
        with self._on(self.exchange_stream):
            self.transfers.after_forward()
        self._backward()
        if self.index is not None:
            self.index.prepare_next_step()
        if self.transfers.delayed and self.exchange_stream is not None:
            torch.cuda.current_stream(self.device).synchronize()  # the host, too, starts late
        self._wait_for_compute(self.exchange_stream)
        self._step()
        if self.exchange_stream is not None and self.others_stream is not None:
            compute = torch.cuda.current_stream(self.device)
            compute.wait_stream(self.exchange_stream)
            compute.wait_stream(self.others_stream)

    def _forward(self) -> None:
        if self.order != "passes":
            self.stand_in.forward()
            return
        with self._on(self.others_stream):
            gathers = [self.others.gather(number) for number in range(self.others.count)]
        for gather in gathers:
            gather.wait()
            self.stand_in.forward(1 / self.others.count)

    def _backward(self) -> None:
        if self.order != "passes":
            self.stand_in.backward()
            return
        scatters = []
        for number in range(self.others.count):
            self.stand_in.backward(1 / self.others.count)
            self._wait_for_compute(self.others_stream)
            with self._on(self.others_stream):
                scatters.append(self.others.scatter(number))
        with self._on(self.others_stream):
            for scatter in scatters:
                scatter.wait()

    def _step(self) -> None:
        """Run what follows the backward pass."""
        if self.order in ("passes", "first"):
            self._exchange()
        if self.order == "passes":
            return
        self._wait_for_compute(self.others_stream)
        numbers = range(self.others.count)
        with self._on(self.others_stream):
            for scatter in [self.others.scatter(number) for number in numbers]:
                scatter.wait()
        if self.order == "between":
            self._exchange()
        with self._on(self.others_stream):
            for gather in [self.others.gather(number) for number in numbers]:
                gather.wait()
        if self.order == "last":
            self._exchange()

    def _exchange(self) -> None:
        """Run the phases that need the gradient, after the transfers queued so far."""
        if self.exchange_stream is not None and self.order in ("between", "last"):
            assert self.others_stream is not None
            self.exchange_stream.wait_stream(self.others_stream)
        with self._on(self.exchange_stream):
            self.transfers.after_backward()

    def _wait_for_compute(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))

    def _on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)
