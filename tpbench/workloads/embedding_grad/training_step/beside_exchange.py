"""What else a training step does beside the exchange: the hashed index of its forward pass, and other transfers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.comm import collectives
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs
from tpbench.workloads.embedding_grad.tokens import bigram_rows, text_tokens


class ForwardIndex(ABC):
    """The table row of each token, which the forward pass reads. Later work of the current stream has it."""

    def __init__(self, inputs: EmbeddingGradInputs) -> None:
        problem = inputs.problem
        self.table_rows, self.device = problem.table_rows, inputs.device
        self.expected = inputs.own_tokens
        self.tokens = text_tokens(problem, inputs.rank)
        self.rows: Tensor | None = None
        """(accumulate, tokens) int32 on the device."""

    @abstractmethod
    def begin_forward(self) -> None:
        """Set `rows` for the forward pass, which is queued next."""

    def prepare_next_step(self) -> None:  # noqa: B027  # only the early index begins before its step
        """Begin the index of the next step. The host calls this after it has queued both passes of this step."""

    def complaint(self) -> str | None:
        """Return why the index of the last step is wrong, or None."""
        assert self.rows is not None
        wrong = int((self.rows.cpu() != self.expected).sum())
        return f"{wrong} rows of the forward pass's index are wrong" if wrong else None


class LateIndex(ForwardIndex):
    """Hash on the CPU right before the forward pass, then copy from pageable memory. The host waits for the copy."""

    def begin_forward(self) -> None:
        self.rows = bigram_rows(self.tokens, self.table_rows).to(self.device)


class DeviceIndex(ForwardIndex):
    """Hash on the GPU in the forward pass. The tokens are already there."""

    def __init__(self, inputs: EmbeddingGradInputs) -> None:
        super().__init__(inputs)
        self.tokens = self.tokens.to(self.device)

    def begin_forward(self) -> None:
        self.rows = bigram_rows(self.tokens, self.table_rows)


class EarlyIndex(ForwardIndex):
    """Hash on the CPU into pinned memory and copy on a stream, both during the step before.

    Two buffers alternate. The host writes a pinned buffer again only after the copy out of it has ended. A copy
    overwrites rows on the GPU only after the passes that read them.
    """

    def __init__(self, inputs: EmbeddingGradInputs) -> None:
        super().__init__(inputs)
        on_gpu = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if on_gpu else None
        self.buffers = [torch.empty(self.tokens.shape, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
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


KINDS: dict[str, type[ForwardIndex]] = {"early": EarlyIndex, "late": LateIndex, "device": DeviceIndex}
"""By the problem's field `index`."""


class OtherParameters:
    """Parameters of one size, each sharded over all ranks. Their transfers use the exchange's process group."""

    def __init__(self, inputs: EmbeddingGradInputs) -> None:
        problem, ranks = inputs.problem, inputs.partition.world_size
        dtype = inputs.grad.dtype
        shard = max(1, round(problem.other_mib * 2**20 / dtype.itemsize / ranks))
        self.group = inputs.group
        self.count = problem.other_count
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
