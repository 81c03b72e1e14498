"""Variants that cheat: their first results are right, and their times are not."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tpbench.api import EntropyLoss, Output, Shard, Step
from tpbench.api.embedding_grad import EmbeddingGrad, ExchangeContext
from tpbench.api.examples import embedding_grad as exchange_example
from tpbench.api.examples import entropy_loss as example
from tpbench.api.examples import tp_block as block_example
from tpbench.api.examples import train_step as train_example
from tpbench.api.tp_block import BlockContext, PreparedBlock, TpBlock
from tpbench.api.train_step import Context, TorchTrainer, TrainStep
from tpbench.measure import clock
from tpbench.workloads.entropy_loss import limits, oracle
from tpbench.workloads.train_step.model.inputs import replica_batches


def honest(problem: EntropyLoss, shard: Shard) -> Step:
    """The example, which does not cheat."""
    return example.fast_tp(problem, shard)


def returns_a_stored_answer(problem: EntropyLoss, shard: Shard) -> Step:
    step, answers = honest(problem, shard), []

    def run() -> Output:
        if not answers:
            answers.append(step())
        return answers[0]

    return Step(run)


def returns_copies_of_a_stored_answer(problem: EntropyLoss, shard: Shard) -> Step:
    step, answers = honest(problem, shard), []

    def run() -> Output:
        if not answers:
            answers.append(step())
        return _copy(answers[0])

    return Step(run)


def returns_early_once_it_was_checked(problem: EntropyLoss, shard: Shard) -> Step:
    step, calls = honest(problem, shard), []

    def run() -> Output:
        calls.append(None)
        return step() if len(calls) <= 3 else _unwritten(shard)

    return Step(run)


def writes_to_its_input(problem: EntropyLoss, shard: Shard) -> Step:
    """The next iteration gets constant logits, of which the result is simple."""
    step = honest(problem, shard)

    def run() -> Output:
        result = step()
        shard.logits.zero_()
        return result

    return Step(run)


def prepares_a_simpler_input(problem: EntropyLoss, shard: Shard) -> Step:
    shard.logits.zero_()
    return honest(problem, shard)


def leaves_work_to_a_thread(problem: EntropyLoss, shard: Shard) -> Step:
    step = honest(problem, shard)
    answer, left = step(), list[threading.Thread]()

    def run() -> Output:
        for each in left:
            each.join()
        result = _unwritten(shard)

        def work() -> None:
            time.sleep(0.02)
            for name in ("loss", "row_loss", "grad"):
                getattr(result, name).copy_(getattr(answer, name))

        left[:] = [threading.Thread(target=work)]
        left[0].start()
        return result

    return Step(run)


class _Lazy(Tensor):
    """A tensor that is computed when something reads it."""

    compute: Callable[[], Tensor]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda each: each.compute() if type(each) is _Lazy else each, (args, kwargs or {}))
        return function(*args, **kwargs)


def returns_a_tensor_that_computes_when_read(problem: EntropyLoss, shard: Shard) -> Step:
    step = honest(problem, shard)

    def run() -> Output:
        grad = torch.empty_like(shard.logits).as_subclass(_Lazy)
        object.__setattr__(grad, "compute", lambda: step().grad)
        result = step()
        return Output(result.loss, result.row_loss, grad)

    return Step(run)


def replaces_the_clock(problem: EntropyLoss, shard: Shard) -> Step:
    now = [0.0]

    def perf_counter() -> float:
        now[0] += 1e-9
        return now[0]

    time.perf_counter = perf_counter
    return honest(problem, shard)


def stops_the_clock(problem: EntropyLoss, shard: Shard) -> Step:
    """Every time is 0 ms, by which nothing can be divided."""
    time.perf_counter = lambda: 5.0
    return honest(problem, shard)


def replaces_a_comparison(problem: EntropyLoss, shard: Shard) -> Step:
    torch.Tensor.abs = torch.Tensor.abs_ = lambda self: torch.zeros_like(self)  # type: ignore[method-assign]
    torch.equal = lambda one, other: True
    return Step(lambda: _unwritten(shard))


def replaces_the_oracle(problem: EntropyLoss, shard: Shard) -> Step:
    right = oracle.Errors(1.0, 0.0, 0.0, True)
    oracle.Oracle.compare = lambda self, output: right  # type: ignore[method-assign]
    return Step(lambda: _unwritten(shard))


def replaces_the_code_of_the_oracle(problem: EntropyLoss, shard: Shard) -> Step:
    """The function is the same object as before."""

    def compare(self: Any, output: Any) -> Any:
        from tpbench.workloads.entropy_loss.oracle import Errors

        return Errors(1.0, 0.0, 0.0, True)

    oracle.Oracle.compare.__code__ = compare.__code__
    return Step(lambda: _unwritten(shard))


def replaces_the_module_of_the_clock(problem: EntropyLoss, shard: Shard) -> Step:
    """The module time itself is the same as before."""
    now = [0.0]

    def perf_counter() -> float:
        now[0] += 1e-9
        return now[0]

    clock.time = SimpleNamespace(perf_counter=perf_counter)  # type: ignore[assignment]
    return honest(problem, shard)


def raises_the_tolerances(problem: EntropyLoss, shard: Shard) -> Step:
    limits.LOSS_TOLERANCE = float("inf")
    limits.GRADIENT_TOLERANCE[problem.dtype] = float("inf")
    return Step(lambda: _copy(Output(torch.zeros(()), torch.zeros(shard.tokens), torch.zeros_like(shard.logits))))


def looks_at_its_callers(problem: EntropyLoss, shard: Shard) -> Step:
    """Return a stored answer to the loop of a clock, and compute elsewhere."""
    step, answers = honest(problem, shard), list[Output]()

    def run() -> Output:
        frame, timed = sys._getframe(), False
        while frame.f_back is not None:
            frame = frame.f_back
            timed = timed or frame.f_code.co_name == "samples"
        if not timed or not answers:
            answers[:] = [step()]
        return _copy(answers[0])

    return Step(run)


def replaces_the_events(problem: EntropyLoss, shard: Shard) -> Step:
    torch.cuda.Event.elapsed_time = lambda self, end: 1e-3  # type: ignore[method-assign]
    return honest(problem, shard)


def ends_on_a_side_stream(problem: EntropyLoss, shard: Shard) -> Step:
    """The current stream, and so the end event, does not wait for the work."""
    step, side = honest(problem, shard), torch.cuda.Stream()

    def run() -> Output:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return step()

    return Step(run)


def begins_early_on_a_side_stream(problem: EntropyLoss, shard: Shard) -> Step:
    """The work does not wait for the current stream, and so not for the start event."""
    step, side = honest(problem, shard), torch.cuda.Stream()

    def run() -> Output:
        with torch.cuda.stream(side):
            result = step()
        torch.cuda.current_stream().wait_stream(side)
        return result

    return Step(run)


def recognises_its_input(problem: EntropyLoss, shard: Shard) -> Step:
    """Look at some logits, and compute only if they are new."""
    step, seen = honest(problem, shard), list[Any]()
    places = torch.arange(0, shard.logits.numel(), max(1, shard.logits.numel() // 4096), device=shard.device)

    def run() -> Output:
        now = shard.logits.view(-1)[places]
        if not seen or not torch.equal(seen[0], now):
            seen[:] = [now, step()]
        return _copy(seen[1])

    return Step(run)


def computes_while_it_restores(problem: EntropyLoss, shard: Shard) -> Step:
    step, answers = honest(problem, shard), list[Output]()

    def restore() -> None:
        answers[:] = [step()]

    return Step(lambda: answers[0], restore=restore)


class ExchangeWithStoredAnswer(exchange_example.FastExchange):
    """The first answer, and the bytes that it took."""

    answer: Tensor | None = None

    def reduce(self) -> None:
        if self.answer is None:
            super().reduce()
            assert self.output is not None
            self.answer, self.sent = self.output.clone(), self.comm.sent_bytes
        self.output, self.comm.sent_bytes = self.answer.clone(), self.sent


class ExchangeThatWritesToItsInput(exchange_example.FastExchange):
    """The result stays right: zeros of the padding get another sign."""

    def reduce(self) -> None:
        super().reduce()
        self.inputs.grad[-1] = -0.0


def honest_exchange(problem: EmbeddingGrad, context: ExchangeContext) -> exchange_example.FastExchange:
    return exchange_example.FastExchange(context)


def exchange_with_stored_answer(problem: EmbeddingGrad, context: ExchangeContext) -> exchange_example.FastExchange:
    return ExchangeWithStoredAnswer(context)


def exchange_that_writes(problem: EmbeddingGrad, context: ExchangeContext) -> exchange_example.FastExchange:
    return ExchangeThatWritesToItsInput(context)


def honest_block(problem: TpBlock, context: BlockContext) -> PreparedBlock:
    return block_example.fast_block(problem, context)


def block_with_stored_output(problem: TpBlock, context: BlockContext) -> PreparedBlock:
    block, outputs = honest_block(problem, context), list[Tensor]()

    def run(x: Tensor) -> Tensor:
        output = block.run(x)
        outputs.append(output.detach().clone())
        output.data.copy_(outputs[0])
        return output

    return dataclasses.replace(block, run=run)


def block_that_returns_early(problem: TpBlock, context: BlockContext) -> PreparedBlock:
    block, calls = honest_block(problem, context), []

    def run(x: Tensor) -> Tensor:
        calls.append(None)
        return block.run(x) if len(calls) <= 3 else x * 1

    return dataclasses.replace(block, run=run)


TRAINED_STEPS = 3
"""Steps that the oracle has always compared. All of them are warm-up."""


def honest_training(problem: TrainStep, context: Context) -> TorchTrainer:
    return train_example.fast_train(problem, context)


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


def training_that_knows_all_losses(problem: TrainStep, context: Context) -> TorchTrainer:
    """Return losses of an earlier, honest run. The weights stay as they are."""
    earlier = honest_training(problem, context)
    batches = [
        replica_batches(problem, step, context.dp_rank, context.dp_size, context.device)
        for step in range(problem.warmup_steps + problem.steps)
    ]
    known = [(earlier.accumulate(each), earlier.update()) for each in batches]
    trainer, steps = honest_training(problem, context), list[None]()
    compute = trainer.accumulate

    def accumulate(given: Any, mark: Any) -> Tensor:
        steps.append(None)
        return known[len(steps) - 1][0] if len(steps) <= len(known) else compute(given, mark)

    trainer.accumulate = accumulate  # type: ignore[method-assign]
    trainer.update = lambda mark: known[min(len(steps), len(known)) - 1][1]  # type: ignore[method-assign]
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


def training_that_returns_early(problem: TrainStep, context: Context) -> TorchTrainer:
    """After the first steps, return tensors that nothing writes."""
    trainer, steps = honest_training(problem, context), list[None]()
    accumulate, update = trainer.accumulate, trainer.update

    def early(batches: Any, mark: Any) -> Tensor:
        steps.append(None)
        return accumulate(batches, mark) if len(steps) <= TRAINED_STEPS else torch.empty((), device=context.device)

    def no_update(mark: Any) -> Tensor:
        return update(mark) if len(steps) <= TRAINED_STEPS else torch.empty((), device=context.device)

    trainer.accumulate, trainer.update = early, no_update  # type: ignore[method-assign]
    return trainer


def training_that_writes_to_its_batches(problem: TrainStep, context: Context) -> TorchTrainer:
    """The results of the step are right."""
    trainer = honest_training(problem, context)
    compute = trainer.accumulate

    def accumulate(batches: Any, mark: Any) -> Tensor:
        loss = compute(batches, mark)
        batches[0].tokens.zero_()
        return loss

    trainer.accumulate = accumulate  # type: ignore[method-assign]
    return trainer


def training_that_computes_when_read(problem: TrainStep, context: Context) -> TorchTrainer:
    trainer = honest_training(problem, context)
    compute = trainer.accumulate

    def accumulate(batches: Any, mark: Any) -> Tensor:
        loss = torch.empty((), device=context.device).as_subclass(_Lazy)
        computed = compute(batches, mark)
        object.__setattr__(loss, "compute", lambda: computed)
        return loss

    trainer.accumulate = accumulate  # type: ignore[method-assign]
    return trainer


def _copy(output: Output) -> Output:
    assert output.row_loss is not None
    return Output(output.loss.clone(), output.row_loss.clone(), output.grad.clone())


def _unwritten(shard: Shard) -> Output:
    """Return an output in memory that nothing writes."""
    logits = shard.logits
    row_loss = torch.empty(shard.tokens, device=shard.device)
    return Output(torch.empty((), device=shard.device), row_loss, torch.empty_like(logits))
