"""One training step as a CUDA graph: forward and backward passes, clipping and update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tpbench.workloads.train_step.training.batches import Batch
from tpbench.workloads.train_step.training.phases import MarkPhase
from tpbench.workloads.train_step.training.trainer import Trainer

LossAndNorm = tuple[Tensor, Tensor]


class StepGraph:
    """The captured step of a trainer. Collectives over NCCL are part of the graph."""

    def __init__(
        self, trainer: Trainer, batches: Sequence[Batch], mark: MarkPhase, stream: torch.cuda.Stream | None
    ) -> None:
        """Capture a step; nothing is trained. `stream` is the stream of the warm-up steps. Collective."""
        self.batches = [Batch(batch.tokens.clone(), batch.labels.clone()) for batch in batches]

        def step() -> LossAndNorm:
            result = trainer.accumulate(self.batches, mark), trainer.update(mark)
            mark("end")
            return result

        (self.loss, self.norm), self.run = capture(step, stream)

    def replay(self, batches: Sequence[Batch]) -> LossAndNorm:
        """Train one step on these micro-batches. Return the loss and the gradient norm, fp32 scalars on the device."""
        for captured, batch in zip(self.batches, batches, strict=True):
            captured.tokens.copy_(batch.tokens)
            captured.labels.copy_(batch.labels)
        self.run()
        return self.loss.clone(), self.norm.clone()  # the next replay overwrites both


def capture(
    step: Callable[[], LossAndNorm], stream: torch.cuda.Stream | None
) -> tuple[LossAndNorm, Callable[[], None]]:
    """Capture `step` on `stream`. Return the tensors that each replay fills, and the replay."""
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog queries events in a thread of its own, which a global capture would forbid.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = step()
    return result, graph.replay


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run device work on `stream`, after all work of the current stream and before its later work. None: do nothing."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
