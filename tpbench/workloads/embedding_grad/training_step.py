"""A training step around the exchange: stand-in passes, the hashed index of the forward pass, and other transfers."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.comm import collectives
from tpbench.measure.timers import Stopwatch
from tpbench.workloads.embedding_grad.exchanges import Phase, StepPoint, sequence
from tpbench.workloads.embedding_grad.exchanges.search import PinnedRing
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs, bigram_rows, text_tokens
from tpbench.workloads.embedding_grad.problem import EmbeddingGrad

SIDE = 3072
"""Side of the square bf16 matrices whose products are the stand-in on a GPU.

They keep the GPU busy as a backward pass would. A product takes about 80 us on an H100, so that the host, which needs a
few microseconds to queue one, stays far ahead of the GPU.
"""

BACKWARD_PRODUCTS: dict[float, int] = {}
"""Products of a backward pass, by its length in ms. All cells of a process have as many, to be comparable."""

FORWARD = 0.5
"""Length of the forward pass over that of the backward pass, which has two products for each of its one."""

AFTER_BACKWARD = {
    "passes": ("exchange",),
    "first": ("exchange", "scatter", "gather"),
    "between": ("scatter", "exchange", "gather"),
    "last": ("scatter", "gather", "exchange"),
}
"""Parts of a step after its backward pass, by `transfer_order`."""


class StandIn:
    """Work of a given length: matrix products on a GPU, sleep on a CPU."""

    def __init__(self, backward_ms: float, device: torch.device, stopwatch: Stopwatch) -> None:
        self.seconds, self.device, self.products = backward_ms / 1e3, device, 0
        if device.type == "cuda":
            self.factor = torch.zeros(SIDE, SIDE, dtype=torch.bfloat16, device=device)
            self.product = torch.empty_like(self.factor)
            if backward_ms not in BACKWARD_PRODUCTS:
                self.products = 100
                BACKWARD_PRODUCTS[backward_ms] = max(2, round(100 * backward_ms / stopwatch.ms(self.backward)))
            self.products = BACKWARD_PRODUCTS[backward_ms]

    def run(self) -> None:
        """Run both passes."""
        self.forward()
        self.backward()

    def forward(self, part: int = 0, parts: int = 1) -> None:
        """Run one of the equal parts of the forward pass; on a GPU only queue it."""
        self.backward(part, parts, FORWARD)

    def backward(self, part: int = 0, parts: int = 1, length: float = 1.0) -> None:
        """Run one of the equal parts of the backward pass, or of `length` times it; on a GPU only queue it."""
        if self.device.type == "cpu":
            time.sleep(length * self.seconds / parts)
        products = round(length * self.products)  # whole, so that all parts of a pass are as long as the pass
        for _ in range(products * part // parts, products * (part + 1) // parts):
            torch.mm(self.factor, self.factor, out=self.product)


class ForwardIndex:
    """The table row of each token, which the forward pass reads. Later work of the current stream has it.

    With index=late the CPU hashes right before the forward pass, and the host waits for the copy from pageable memory.
    With index=pinned it hashes then, too, into pinned memory, and waits for nothing. With index=early it hashes into
    pinned memory and copies on a stream during the step before. With index=device the GPU hashes in the forward pass.
    """

    def __init__(self, inputs: EmbeddingGradInputs) -> None:
        problem = inputs.problem
        self.kind, self.table_rows, self.device = problem.index, problem.table_rows, inputs.device
        self.expected = inputs.own_tokens
        self.tokens = text_tokens(problem, inputs.rank).to(self.device if self.kind == "device" else "cpu")
        self.rows: Tensor | None = None
        """(accumulate, tokens) int32 on the device."""
        self.passes_end: Any = None
        on_gpu = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if self.kind == "early" and on_gpu else None
        self.ring = PinnedRing(self.tokens.numel(), self.device)
        self.copied = [torch.empty_like(self.tokens, device=self.device) for _ in range(2)]
        self.prepare_next_step()

    def begin_forward(self) -> None:
        """Set `rows` for the forward pass, which is queued next."""
        if self.kind in ("late", "device"):
            self.rows = bigram_rows(self.tokens, self.table_rows).to(self.device)
            return
        if self.kind == "pinned":
            self._upload()
        self.rows = self.copied[self.ring.slot]
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_event(self.ring.copy_ends[self.ring.slot])

    def prepare_next_step(self) -> None:
        """Begin the index of the next step. The host calls this after it has queued both passes of this step."""
        if self.kind != "early":
            return
        with torch.cuda.stream(self.stream):
            if self.stream is not None and self.passes_end is not None:
                self.stream.wait_event(self.passes_end)  # the passes of the step before have read what is overwritten
            self._upload()
        if self.stream is not None:
            self.passes_end = torch.cuda.current_stream(self.device).record_event()

    def _upload(self) -> None:
        self.ring.upload(
            lambda buffer: bigram_rows(self.tokens, self.table_rows, out=buffer.view_as(self.tokens)),
            self.copied[1 - self.ring.slot].view(-1),
        )

    def run_alone(self) -> None:
        """Compute the index of one step, without the passes."""
        self.prepare_next_step()
        self.begin_forward()

    def complaint(self) -> str | None:
        """Return why the index of the last step is wrong, or None."""
        assert self.rows is not None
        wrong = int((self.rows.cpu() != self.expected).sum())
        return f"{wrong} rows of the forward pass's index are wrong" if wrong else None


class OtherParameters:
    """Parameters of one size, each sharded over all ranks. Their transfers use the exchange's process group."""

    def __init__(self, inputs: EmbeddingGradInputs) -> None:
        problem, ranks, dtype = inputs.problem, inputs.world_size, inputs.grad.dtype
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
    """Iterations of both passes, an exchange, and all-gathers and reduce-scatters of other parameters, if any.

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
        stand_in: StandIn,
        others: OtherParameters,
        index: ForwardIndex | None,
        device: torch.device,
    ) -> None:
        self.stand_in, self.others, self.index, self.device = stand_in, others, index, device
        self.order, self.numbers = problem.transfer_order, range(others.count)
        self.beside = self.numbers if self.order == "passes" else range(0)
        """Numbers of the parameters whose transfers run beside the passes."""
        on_gpu = device.type == "cuda"
        self.exchange_stream = torch.cuda.Stream(device) if on_gpu else None
        self.others_stream = torch.cuda.Stream(device) if on_gpu and others.count else None

    def with_exchange(self, phases: Sequence[Phase]) -> Callable[[], None]:
        """Return an iteration with an exchange."""
        points: tuple[StepPoint, ...] = get_args(StepPoint)
        parts = {point: sequence([phase for phase in phases if phase.after == point]) for point in points}
        return partial(self._run, parts)

    def _run(self, exchange_after: Mapping[StepPoint, Callable[[], None]]) -> None:
        """Run one iteration; on a GPU queue it, so that the current stream waits for all parts."""
        compute = torch.cuda.current_stream(self.device) if self.exchange_stream else None
        wait(self.exchange_stream, compute)
        wait(self.others_stream, compute)
        if self.index is not None:
            self.index.begin_forward()
        self._forward()
        forward_end = compute.record_event() if compute else None
        if not self.numbers:
            self._backward(compute)
        with torch.cuda.stream(self.exchange_stream):
            exchange_after["batch"]()
            if self.exchange_stream and forward_end:
                self.exchange_stream.wait_event(forward_end)
            exchange_after["forward"]()
        if self.numbers:
            self._backward(compute)
        wait(self.exchange_stream, compute)
        self._after_backward(exchange_after["backward"], compute)
        wait(compute, self.exchange_stream)
        wait(compute, self.others_stream)

    def _forward(self) -> None:
        with torch.cuda.stream(self.others_stream):
            gathers = [self.others.gather(number) for number in self.beside]
        for part, gather in enumerate(gathers):
            gather.wait()
            self.stand_in.forward(part, len(gathers))
        if not gathers:
            self.stand_in.forward()

    def _backward(self, compute: torch.cuda.Stream | None) -> None:
        """Run the backward pass, then what the host does while the device is busy with it."""
        scatters = []
        for number in self.beside:
            self.stand_in.backward(number, len(self.beside))
            wait(self.others_stream, compute)
            with torch.cuda.stream(self.others_stream):
                scatters.append(self.others.scatter(number))
        if not self.beside:
            self.stand_in.backward()
        with torch.cuda.stream(self.others_stream):
            for scatter in scatters:
                scatter.wait()
        if self.index is not None:
            self.index.prepare_next_step()

    def _after_backward(self, exchange: Callable[[], None], compute: torch.cuda.Stream | None) -> None:
        if self.order != "passes":
            wait(self.others_stream, compute)
        for number, part in enumerate(AFTER_BACKWARD[self.order]):
            if part == "exchange":
                if number > 0:
                    wait(self.exchange_stream, self.others_stream)
                with torch.cuda.stream(self.exchange_stream):
                    exchange()
                continue
            transfer = self.others.scatter if part == "scatter" else self.others.gather
            with torch.cuda.stream(self.others_stream):
                for work in [transfer(number) for number in self.numbers]:
                    work.wait()


def wait(waiting: torch.cuda.Stream | None, other: torch.cuda.Stream | None) -> None:
    """Let a stream wait for another one. On a CPU there are none."""
    if waiting is not None and other is not None:
        waiting.wait_stream(other)
