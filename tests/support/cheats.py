"""Variants whose first results are right, and that do less when they are timed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.api import EntropyLoss, Output, Shard, Step
from tpbench.api.embedding_grad import EmbeddingGrad, ExchangeContext
from tpbench.api.examples import entropy_loss as example
from tpbench.api.tp_block import BlockContext, PreparedBlock, TpBlock, prepare
from tpbench.api.train_step import Context, TorchTrainer, TrainStep
from tpbench.comm.parallel_linears import SequentialSchedule
from tpbench.workloads.embedding_grad.exchanges.by_collectives import DenseReduceScatter
from tpbench.workloads.train_step.training.fsdp import ddp


def honest(problem: EntropyLoss, shard: Shard) -> Step:
    """The example, which does not cheat."""
    return example.fast_tp(problem, shard)


def returns_a_stored_answer(problem: EntropyLoss, shard: Shard) -> Step:
    step, answers = honest(problem, shard), list[Output]()

    def run() -> Output:
        if not answers:
            answers.append(step())
        return answers[0]

    return Step(run)


def returns_copies_of_a_stored_answer(problem: EntropyLoss, shard: Shard) -> Step:
    stored = returns_a_stored_answer(problem, shard)

    def run() -> Output:
        answer = stored()
        assert answer.row_loss is not None
        return Output(answer.loss.clone(), answer.row_loss.clone(), answer.grad.clone())

    return Step(run)


_SET_UPS: list[None] = []


def returns_stored_answers_once_it_is_set_up_twice(problem: EntropyLoss, shard: Shard) -> Step:
    """Only the iterations back to back are on copies of the inputs, for which a variant is set up again."""
    step, answers = honest(problem, shard), list[Output]()
    _SET_UPS.append(None)

    def run() -> Output:
        if not answers or len(_SET_UPS) == 1:
            answers[:] = [step()]
        return answers[0]

    return Step(run)


def computes_while_it_restores(problem: EntropyLoss, shard: Shard) -> Step:
    """The restoring would not be timed, so for such a variant it is a part of the step: the result is right."""
    step, answers = honest(problem, shard), list[Output]()

    def restore() -> None:
        answers[:] = [step()]

    return Step(lambda: answers[0], restore=restore)


def does_not_wait_for_its_collective(problem: EntropyLoss, shard: Shard) -> Step:
    step = honest(problem, shard)

    def run() -> Output:
        result = step()
        assert result.row_loss is not None
        dist.all_reduce(result.row_loss.div_(shard.tp_size), group=shard.group, async_op=True)
        return result

    return Step(run)


def overwrites_its_input(problem: EntropyLoss, shard: Shard) -> Step:
    """The gradient lies where the logits were. What `restore` does comes too late for the oracle."""
    step = honest(problem, shard)

    def run() -> Output:
        result = step()
        shard.logits.copy_(result.grad)
        return Output(result.loss, result.row_loss, shard.logits)

    return Step(run, restore=lambda: None)


def begins_early_on_a_side_stream(problem: EntropyLoss, shard: Shard) -> Step:
    """The work does not wait for the current stream, and so not for the start event."""
    step, side = honest(problem, shard), torch.cuda.Stream()

    def run() -> Output:
        with torch.cuda.stream(side):
            result = step()
        torch.cuda.current_stream().wait_stream(side)
        return result

    return Step(run)


class ExchangeWithStoredAnswer(DenseReduceScatter):
    """The first answer, and the bytes that it took."""

    answer: Tensor | None = None

    def reduce(self) -> None:
        if self.answer is None:
            super().reduce()
            assert self.output is not None
            self.answer, self.sent = self.output.clone(), self.comm.sent_bytes
        self.output, self.comm.sent_bytes = self.answer.clone(), self.sent


def honest_exchange(problem: EmbeddingGrad, context: ExchangeContext) -> DenseReduceScatter:
    return DenseReduceScatter(problem, context)


def exchange_with_stored_answer(problem: EmbeddingGrad, context: ExchangeContext) -> DenseReduceScatter:
    return ExchangeWithStoredAnswer(problem, context)


def honest_block(problem: TpBlock, context: BlockContext) -> PreparedBlock:
    return prepare(context, SequentialSchedule(context.inputs.group))


def block_with_stored_output(problem: TpBlock, context: BlockContext) -> PreparedBlock:
    block, outputs = honest_block(problem, context), list[Tensor]()

    def run(x: Tensor) -> Tensor:
        output = block.run(x)
        outputs.append(output.detach().clone())
        output.data.copy_(outputs[0])
        return output

    return dataclasses.replace(block, run=run)


TRAINED_STEPS = 3
"""Steps that the oracle has always compared. All of them are warm-up."""


def honest_training(problem: TrainStep, context: Context) -> TorchTrainer:
    return ddp(problem, context)


def training_that_stores_losses(problem: TrainStep, context: Context) -> TorchTrainer:
    """Train the first steps, then return their last loss and norm."""
    trainer, results = honest_training(problem, context), dict[str, list[Tensor]](accumulate=[], update=[])

    def stored(name: str, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*arguments: Any) -> Tensor:
            if len(results[name]) < TRAINED_STEPS:
                results[name].append(compute(*arguments))
            return results[name][-1].clone()

        return run

    trainer.accumulate = stored("accumulate", trainer.accumulate)  # type: ignore[method-assign]
    trainer.update = stored("update", trainer.update)  # type: ignore[method-assign]
    return trainer


def training_without_updates(problem: TrainStep, context: Context) -> TorchTrainer:
    """Compute every loss and gradient, but update the weights in the first steps only."""
    trainer, steps = honest_training(problem, context), list[None]()
    optimizer, step = trainer.optimizer, trainer.optimizer.step

    def update() -> None:
        steps.append(None)
        if len(steps) <= TRAINED_STEPS:
            step()

    optimizer.step = update
    return trainer
