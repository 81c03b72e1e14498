"""The transformer block on a rank: its inputs, costs, step, check and exposed communication; or a stack in training."""

import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
import torch._dynamo  # optimizers need it: import it before jobs are forked, not in each
import torch.distributed as dist
from torch import Tensor

from tpbench.comm.collectives import gather_rows, nccl_algorithm, scatter_rows
from tpbench.measure import cuda_graph
from tpbench.measure.audit import Inputs
from tpbench.measure.rank_memory import held_bytes
from tpbench.measure.rates import gather_gb_per_s, gemm_tflops
from tpbench.measure.session import Context, Costs, IterationSchedule, Session, Verdict
from tpbench.measure.timers import Stopwatch
from tpbench.workloads import Variant
from tpbench.workloads.step import Step, checked_columns, require
from tpbench.workloads.tp_block import oracle
from tpbench.workloads.tp_block.execution.layers import gradients
from tpbench.workloads.tp_block.execution.prepared import BlockContext, PreparedBlock, graphed, with_gib
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.problem import TOLERANCE, TpBlock
from tpbench.workloads.tp_block.workload import WORKLOAD


@WORKLOAD.inputs
def inputs(problem: TpBlock, rank: Context) -> BlockContext:
    """Return this rank's part of the block, and the rates of the machine. Collective."""
    block, stopwatch = BlockInputs(problem, rank), Stopwatch(rank)
    rates: dict[str, Any] = {"gemm_tflops": rank.once("gemm", lambda: gemm_tflops(block.dtype, rank.device, stopwatch))}
    gather = partial(gather_gb_per_s, rank.device, rank.tp_group, stopwatch)
    rates["gather_gb_per_s"] = rank.once("gather", gather) if rank.tp_size > 1 else 0.0
    if rank.tp_size > 1 and rank.device.type == "cuda":
        shape = problem.tokens // rank.tp_size, problem.hidden
        algorithm = partial(nccl_algorithm, shape, block.dtype, rank.tp_group)
        rates["nccl_algorithm"] = rank.once("nccl_algorithm", algorithm)
    return BlockContext(block, stopwatch, rank.graph, rates)


@WORKLOAD.step(PreparedBlock)
def step(problem: TpBlock, context: BlockContext, prepared: PreparedBlock, rank: Context) -> Step[oracle.BlockResult]:
    """Return one forward and backward pass. Changed inputs are x and the upstream gradient of another seed."""
    block, own_costs = context.inputs, context.costs(prepared.size)

    def run() -> Callable[[], oracle.BlockResult]:
        return partial(_result, block, prepared, prepared.step())

    def activations(seed: int) -> list[Tensor]:
        block.activation_seed = seed
        shard = (0 if prepared.size == 1 else block.rank), prepared.size
        return [block.x(*shard), block.grad(*shard)]

    return Step(
        run,
        own_costs.bytes_communicated,
        prepared.columns,
        release=prepared.free,
        # The weights are inputs that don't change.
        inputs=Inputs([prepared.x, prepared.grad, *prepared.module.parameters()], activations, problem.seed),
        costs=own_costs,
    )


def _result(block: BlockInputs, prepared: PreparedBlock, output: Tensor) -> oracle.BlockResult:
    assert prepared.x.grad is not None, "the step leaves no gradient in x.grad"
    result = oracle.BlockResult(output, prepared.x.grad, gradients(block.problem, prepared.module))
    return result if prepared.size == block.size else oracle.own_part(result, block)


@WORKLOAD.check(oracle.BlockResult)
def check(problem: TpBlock, context: BlockContext, result: oracle.BlockResult, rank: Context) -> Verdict:
    """Compare an output and its gradients with the oracle."""
    verdict = oracle.compare(context.inputs, result)
    return Verdict({**verdict.columns, **context.rates}, verdict.wrong)


@WORKLOAD.details
def details(problem: TpBlock, context: BlockContext, session: Any, rank: Context) -> dict[str, Any]:
    """Return columns about forward and backward alone, each a CUDA graph with graph=true, and exposed communication."""
    stopwatch = context.stopwatch
    prepared = graphed(session.prepared) if context.graph else session.prepared
    outputs: list[Tensor] = []

    def forward() -> None:
        outputs[:] = [prepared.forward()]

    def fresh_forward() -> None:
        prepared.free()
        forward()

    forward_ms = stopwatch.ms(forward, prepared.free)
    backward_ms = stopwatch.ms(lambda: prepared.backward(outputs.pop()), fresh_forward)
    outputs.clear()
    prepared.free()
    products = product_columns(context, session.costs, session.columns)
    exposed = exposed_communication(context.inputs, prepared, stopwatch, context.graph)
    return {"forward_ms": forward_ms, "backward_ms": backward_ms, **products, **exposed}


def product_columns(context: BlockContext, costs: Costs, columns: Mapping[str, Any]) -> dict[str, float]:
    """Return the rate of the step's products, given the columns of its times."""
    tflops = costs.flops / (columns.get("device_ms") or columns["time_ms"]) / 1e9
    return {"tflops": tflops, "gemm_share": tflops / context.rates["gemm_tflops"]}


def step_collectives(inputs: BlockInputs) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return a step's collectives by name, as the sequential schedule runs them, each with their number."""
    problem, group = inputs.problem, inputs.group
    again = 0 if problem.save_gathered else sum(linear.kind == "column" for linear in problem.linears)
    shard = torch.zeros(problem.tokens // inputs.size, problem.hidden, dtype=inputs.dtype, device=inputs.device)
    whole = shard.repeat(inputs.size, 1)
    return {
        "gather": (lambda: gather_rows(shard, group), len(problem.linears) + again),
        "scatter": (lambda: scatter_rows(whole, group), len(problem.linears)),
        "reduce": (lambda: dist.all_reduce(shard[0], group=group), len(problem.norms)),
    }


def exposed_communication(
    inputs: BlockInputs, prepared: PreparedBlock, stopwatch: Stopwatch, graph: bool
) -> dict[str, Any]:
    """Return the columns about exposed communication, none if the block does not communicate. Collective.

    It is the median difference of interleaved pairs of the step and the same step with its communication removed, which
    computes each product in one piece. The cost of chunks therefore counts as exposed. The all-reduces of the norms'
    gradients count as communication that no variant hides. The forward pass is compared in the same way. `graph`: the
    passes of `prepared` are CUDA graphs, so the others must be, too.
    """
    if (silent := prepared.without_communication) is None:
        return {}
    silent = graphed(silent) if graph else silent

    def free() -> None:
        silent.free()
        prepared.free()

    columns: dict[str, float] = {}
    passes: dict[str, Any] = {"": (prepared.step, silent.step), "forward_": (prepared.forward, silent.forward)}
    for name, (whole, alone) in passes.items():
        pair = (whole, free), (alone, free)
        for clock, (times, compute_times) in {
            "": stopwatch.interleaved_ms(*pair),
            "chained_": stopwatch.chained_ms(*pair),
        }.items():
            columns[f"{clock}{name}compute_ms"] = median(compute_times)
            # Of the same pass, so that a clock that falls over time cancels.
            columns[f"{clock}{name}exposed_ms"] = median(map(operator.sub, times, compute_times))
    free()
    collectives = step_collectives(inputs).values()

    def communicate() -> None:
        for run, times in collectives:
            for _ in range(times):
                run()

    communication_ms = stopwatch.ms(communicate)
    hidden_share = 1 - columns["exposed_ms"] / communication_ms
    return {**columns, "communication_ms": communication_ms, "hidden_share": hidden_share}


@WORKLOAD.session
class StackSession(Session):
    """Session of a variant that trains this rank's part of a stack. The loss is the mean squared error to a target."""

    def __init__(self, problem: TpBlock, variant: Variant, context: Context) -> None:
        held = held_bytes(context.device)
        self.problem, self.variant, self.context = problem, variant, context
        self.block = inputs(problem, context)
        prepared = variant.prepare(problem, self.block)
        self.prepared: PreparedBlock = require(prepared, PreparedBlock, variant, "the function")
        self.costs = self.block.costs(self.prepared.size)
        self.schedule = IterationSchedule(problem.warmup_steps, problem.steps, held)
        rank = 0 if self.prepared.size == 1 else context.tp_rank
        self.target = self.block.inputs.target(rank, self.prepared.size)
        self.optimizer = torch.optim.AdamW(
            self.prepared.module.parameters(),
            problem.learning_rate,
            fused=True,
            capturable=context.device.type == "cuda",
        )
        self.graph_columns: dict[str, Any] = {}
        self.replay: Callable[[], None] | None = None
        self.steps_done = 0
        self.now = torch.zeros(2, device=context.device, dtype=torch.float64)
        """This rank's part of the last step's loss and squared gradient norm."""
        self.history: list[Tensor] = []

    def step(self) -> None:
        """Run one training step, from the second one on as the replay of a CUDA graph if the job has graph=true."""
        if self.context.graph and self.steps_done == 1:  # the optimizer has its states
            captured, self.graph_columns["graph_gib"] = with_gib(lambda: cuda_graph.capture(self._train))
            self.replay = captured.replay
        (self.replay or self._train)()
        self.steps_done += 1

    def restore(self) -> None:
        """Keep the last step's loss and gradient norm, which the next step overwrites."""
        if len(self.history) < self.steps_done:
            self.history.append(self.now.clone())

    def check(self) -> Verdict:
        """Compare the losses and gradient norms of all steps with the oracle."""
        self.restore()
        parts = torch.stack(self.history).cpu()
        dist.all_reduce(parts, group=self.context.tp_group)
        if self.prepared.size == 1:  # each rank has the whole
            parts /= self.context.tp_size
        trained = torch.stack((parts[:, 0], parts[:, 1].sqrt()))  # losses and gradient norms: (2, steps)
        expected = oracle.expected_trajectory(self.block.inputs, self.steps_done)
        relative = (trained - expected).abs() / expected.abs().clamp_min(1e-30)
        largest = relative.nan_to_num(nan=math.inf, posinf=math.inf).max(1).values.tolist()
        errors = dict(zip(("loss_error", "grad_error"), largest, strict=True))
        losses, grad_norms = trained.tolist()
        columns = {
            "loss_value": losses[-1],
            "grad_norm": grad_norms[-1],
            "losses": losses,
            "grad_norms": grad_norms,
            **errors,
            **self.block.rates,
            **checked_columns(self.prepared.columns(), self.variant, WORKLOAD.column_types(of_variant=True)),
            **self.graph_columns,
        }
        wrong = oracle.complaint(errors, self.problem.dtype)
        if wrong is not None:
            step, row = (~(relative.t() <= TOLERANCE[self.problem.dtype])).nonzero()[0].tolist()
            values = f"{trained[row, step]:.6g}, expected {expected[row, step]:.6g}"
            wrong += f": all ranks: the {('loss', 'gradient norm')[row]} of step {step + 1} is {values}"
        return Verdict(columns, wrong)

    def details(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rate of the products."""
        return product_columns(self.block, self.costs, columns)

    def _train(self) -> None:
        prepared = self.prepared
        output = prepared.run(prepared.x)
        # This rank's rows' part of the mean squared error, in fp32 or more.
        difference = output.to(torch.promote_types(output.dtype, torch.float32)) - self.target
        loss = difference.square().sum() / (self.problem.tokens * self.problem.hidden)
        loss.backward()
        self.now[0] = loss.detach()
        # The weights of norms are whole on every rank, and count on one.
        counts_norms = prepared.size == 1 or self.context.tp_rank == 0
        counted = [weight for weight in prepared.module.parameters() if weight.dim() > 1 or counts_norms]
        grads = [weight.grad for weight in counted if weight.grad is not None]
        norms = [torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
        self.now[1] = torch.stack(norms).square().sum()
        self.optimizer.step()
        prepared.free()
