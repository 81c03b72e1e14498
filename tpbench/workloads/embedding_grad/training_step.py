"""A training step around the exchange: stand-in passes, the hashed index of the forward pass, and other transfers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.comm import collectives
from tpbench.measure.clock import Stopwatch
from tpbench.workloads.embedding_grad.exchanges import Phase, StepPoint, sequence
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs, bigram_rows, text_tokens
from tpbench.workloads.embedding_grad.problem import EmbeddingGrad

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


class ForwardIndex:
    """The table row of each token, which the forward pass reads. Later work of the current stream has it.

    With index=late the CPU hashes right before the forward pass, and the host waits for the copy from pageable memory.
    With index=device the tokens are on the GPU, which hashes in the forward pass.
    """

    def __init__(self, inputs: EmbeddingGradInputs) -> None:
        problem = inputs.problem
        self.table_rows, self.device = problem.table_rows, inputs.device
        self.expected = inputs.own_tokens
        self.tokens = text_tokens(problem, inputs.rank)
        if problem.index == "device":
            self.tokens = self.tokens.to(self.device)
        self.rows: Tensor | None = None
        """(accumulate, tokens) int32 on the device."""

    def begin_forward(self) -> None:
        """Set `rows` for the forward pass, which is queued next."""
        self.rows = bigram_rows(self.tokens, self.table_rows).to(self.device)

    def prepare_next_step(self) -> None:
        """Begin the index of the next step. The host calls this after it has queued both passes of this step."""

    def run_alone(self) -> None:
        """Compute the index of one step, without the passes."""
        self.prepare_next_step()
        self.begin_forward()

    def complaint(self) -> str | None:
        """Return why the index of the last step is wrong, or None."""
        assert self.rows is not None
        wrong = int((self.rows.cpu() != self.expected).sum())
        return f"{wrong} rows of the forward pass's index are wrong" if wrong else None


class EarlyIndex(ForwardIndex):
    """Hash on the CPU into pinned memory and copy on a stream, both during the step before.

    Two buffers alternate. The host writes a pinned buffer again only after the copy out of it has ended. A copy
    overwrites rows on the GPU only after the passes that read them.
    """

    def __init__(self, inputs: EmbeddingGradInputs) -> None:
        super().__init__(inputs)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        pinned = self.stream is not None
        self.buffers = [torch.empty(self.tokens.shape, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self.copied = [torch.empty_like(self.tokens, device=self.device) for _ in range(2)]
        self.copy_ends: list[Any] = [None, None]
        self.passes_end: list[Any] = [None, None]
        self.slot = 0
        self.prepare_next_step()

    def begin_forward(self) -> None:
        self.rows = self.copied[self.slot]
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copy_ends[self.slot])

    def prepare_next_step(self) -> None:
        """Hash the tokens of the next step and start their copy."""
        if self.stream is not None:
            self.passes_end[self.slot] = torch.cuda.current_stream(self.device).record_event()
        slot = self.slot = 1 - self.slot
        if self.copy_ends[slot] is not None:
            self.copy_ends[slot].synchronize()
        bigram_rows(self.tokens, self.table_rows, out=self.buffers[slot])
        if self.stream is None:
            self.copied[slot].copy_(self.buffers[slot])
            return
        with torch.cuda.stream(self.stream):
            if self.passes_end[slot] is not None:
                self.stream.wait_event(self.passes_end[slot])
            self.copied[slot].copy_(self.buffers[slot], non_blocking=True)
            self.copy_ends[slot] = self.stream.record_event()


def forward_index(inputs: EmbeddingGradInputs) -> ForwardIndex | None:
    """Return the index of the forward pass, or None if the problem leaves it out."""
    if inputs.problem.index == "none":
        return None
    return EarlyIndex(inputs) if inputs.problem.index == "early" else ForwardIndex(inputs)


class OtherParameters:
    """Parameters of one size, each sharded over all ranks. Their transfers use the exchange's process group."""

    def __init__(self, inputs: EmbeddingGradInputs) -> None:
        problem, ranks = inputs.problem, inputs.partition.world_size
        dtype = inputs.grad.dtype
        shard = max(1, round(problem.other_mib * 2**20 / dtype.itemsize / ranks))
        self.group = inputs.group
        self.count = problem.other_count if problem.other_mib else 0
        self.whole = torch.zeros(self.count, ranks * shard, dtype=dtype, device=inputs.device)
        """The gradients, then the parameters: only the times of their transfers matter."""
        self.shards = torch.zeros(self.count, shard, dtype=dtype, device=inputs.device)

    def gather(self, number: int) -> Any:
        """Start the all-gather of a parameter and return its work."""
        return collectives.all_gather(self.whole[number], self.shards[number], group=self.group, async_op=True)

    def scatter(self, number: int) -> Any:
        """Start the reduce-scatter of a parameter's gradient and return its work."""
        return collectives.reduce_scatter(
            self.shards[number], self.whole[number], op=dist.ReduceOp.AVG, group=self.group, async_op=True
        )


class TrainingStep:
    """An iteration of both passes, the exchange, and all-gathers and reduce-scatters of other parameters, if any.

    On a GPU the exchange and the other transfers have a stream each. A communicator runs its collectives in the order
    in which the host queues them. Without other parameters the host queues both passes first, so that its part of the
    exchange runs while the GPU is busy. On a CPU nothing runs beside the passes.

    With transfer_order=passes each pass has a part for each other parameter: an all-gather precedes each part of the
    forward pass, and a reduce-scatter follows each part of the backward pass. The other orders have all transfers after
    the backward pass, as in the speed record: all reduce-scatters, then all all-gathers. The exchange's phases that
    need the gradient come before both, between them, or after both.
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
        same_point: dict[str, StepPoint] = {"late": "backward", "beside": "batch"}
        by_point: dict[StepPoint, list[Phase]] = {"batch": [], "forward": [], "backward": []}
        for phase in phases:
            by_point[same_point.get(problem.transfers, phase.after)].append(phase)
        self.after_batch, self.after_forward, self.after_backward = map(sequence, by_point.values())
        self.delayed = any(phase.after != "backward" for phase in by_point["backward"])
        """True if a phase starts after the backward pass that could start before."""
        self.stand_in, self.others, self.index, self.device = stand_in, others, index, device
        self.order, self.numbers = problem.transfer_order, range(others.count)
        on_gpu = device.type == "cuda"
        self.exchange_stream = torch.cuda.Stream(device) if on_gpu else None
        self.others_stream = torch.cuda.Stream(device) if on_gpu and others.count else None

    def run(self) -> None:
        """Run one iteration; on a GPU queue it, so that the current stream waits for all parts."""
        compute = torch.cuda.current_stream(self.device) if self.exchange_stream else None
        self._wait(self.exchange_stream, compute)
        self._wait(self.others_stream, compute)
        if self.index is not None:
            self.index.begin_forward()
        self._forward()
        forward_end = compute.record_event() if compute else None
        if not self.numbers:
            self._backward(compute)
        with self._on(self.exchange_stream):
            self.after_batch()
            if self.exchange_stream and forward_end:
                self.exchange_stream.wait_event(forward_end)
            self.after_forward()
        if self.numbers:
            self._backward(compute)
        if self.delayed and compute is not None:
            compute.synchronize()  # the host, too, starts late what could have run early
        self._wait(self.exchange_stream, compute)
        self._after_backward(compute)
        self._wait(compute, self.exchange_stream)
        self._wait(compute, self.others_stream)

    def _forward(self) -> None:
        if self.order != "passes" or not self.numbers:
            self.stand_in.forward()
            return
        with self._on(self.others_stream):
            gathers = [self.others.gather(number) for number in self.numbers]
        for gather in gathers:
            gather.wait()
            self.stand_in.forward(1 / len(self.numbers))

    def _backward(self, compute: torch.cuda.Stream | None) -> None:
        """Run the backward pass, then what the host does while the device is busy with it."""
        if self.order != "passes" or not self.numbers:
            self.stand_in.backward()
        else:
            scatters = []
            for number in self.numbers:
                self.stand_in.backward(1 / len(self.numbers))
                self._wait(self.others_stream, compute)
                with self._on(self.others_stream):
                    scatters.append(self.others.scatter(number))
            with self._on(self.others_stream):
                for scatter in scatters:
                    scatter.wait()
        if self.index is not None:
            self.index.prepare_next_step()

    def _after_backward(self, compute: torch.cuda.Stream | None) -> None:
        if self.order in ("passes", "first"):
            self._exchange()
        if self.order == "passes":
            return
        self._wait(self.others_stream, compute)
        self._all(self.others.scatter)
        if self.order == "between":
            self._exchange()
        self._all(self.others.gather)
        if self.order == "last":
            self._exchange()

    def _all(self, transfer: Any) -> None:
        """Start a transfer of each parameter, then wait for all of them."""
        with self._on(self.others_stream):
            for work in [transfer(number) for number in self.numbers]:
                work.wait()

    def _exchange(self) -> None:
        """Run the phases that need the gradient, after the transfers queued so far."""
        if self.order in ("between", "last"):
            self._wait(self.exchange_stream, self.others_stream)
        with self._on(self.exchange_stream):
            self.after_backward()

    @staticmethod
    def _wait(waiting: torch.cuda.Stream | None, other: torch.cuda.Stream | None) -> None:
        if waiting is not None and other is not None:
            waiting.wait_stream(other)

    @staticmethod
    def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)
