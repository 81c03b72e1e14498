"""Run the transformer block on a rank: set up, step, check, and measure exposed communication; or train a stack."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpbench.measure import cuda_graph
from tpbench.measure.audit import GeneratedInputs
from tpbench.measure.clock import Stopwatch
from tpbench.measure.rank_memory import held_bytes
from tpbench.measure.session import Context, IterationSchedule, Verdict
from tpbench.workloads import Variant
from tpbench.workloads.step import checked_columns, require
from tpbench.workloads.tp_block import oracle
from tpbench.workloads.tp_block.execution import measurements
from tpbench.workloads.tp_block.execution.layers import RMSNorm, gradients
from tpbench.workloads.tp_block.execution.prepared import BlockContext, PreparedBlock, with_gib
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.problem import TpBlock
from tpbench.workloads.tp_block.workload import WORKLOAD

CAPTURED_STEP = 1
"""The step of a stack that is captured in a graph and then replayed, counted from 0. The optimizer has its states by
then."""


class _Session:
    """The part that both kinds of sessions have: inputs, rates of the machine, and the variant ready to run."""

    def __init__(self, problem: TpBlock, variant: Variant, context: Context) -> None:
        self.problem, self.variant, self.context = problem, variant, context
        self.inputs = BlockInputs(problem, context)
        self.stopwatch = Stopwatch(context)
        self.rates = measurements.machine_rates(self.inputs, self.stopwatch)
        prepared = variant.prepare(problem, BlockContext(self.inputs, self.stopwatch, context.graph))
        self.prepared: PreparedBlock = require(prepared, PreparedBlock, variant, "the function")
        self.costs = self.rates.costs(problem, self.prepared.size)

    def columns(self) -> dict[str, Any]:
        """Return the rates of the machine, and the columns of the variant after a step."""
        return {
            **asdict(self.rates),
            **checked_columns(self.prepared.columns(), self.variant, WORKLOAD.variant_columns),
        }

    def product_columns(self, columns: Mapping[str, Any]) -> dict[str, float]:
        """Return the rate of the step's products, given the columns of its times."""
        tflops = self.costs.flops / (columns.get("device_ms") or columns["time_ms"]) / 1e9
        return {"tflops": tflops, "gemm_share": tflops / self.rates.gemm_tflops}


class TpBlockSession(_Session):
    """Session of a variant on this rank's part of the block. Variants from outside this package are audited."""

    fresh = keeps_output = False

    def __init__(self, problem: TpBlock, variant: Variant, context: Context) -> None:
        super().__init__(problem, variant, context)
        self.output: Tensor | None = None
        self.trusted, self.audited = variant.place is None, variant.place is not None
        inputs = [self.prepared.x, self.prepared.grad, *self.prepared.module.parameters()]  # weights do not change
        self.audited_inputs = GeneratedInputs(inputs, problem.seed, self._activations_of)

    def step(self) -> None:
        """Run one forward and backward pass, after freeing the results of the last one."""
        self.release()
        self.forward()
        self.backward()

    def forward(self) -> None:
        """Run only the forward pass."""
        self.output = self.prepared.run(self.prepared.x)

    def backward(self) -> None:
        """Run only the backward pass of the last forward pass."""
        assert self.output is not None
        self.output.backward(self.prepared.grad)

    def outputs(self) -> list[Tensor]:
        """Return the last step's output and gradients."""
        grads = [self.prepared.x.grad, *(weight.grad for weight in self.prepared.module.parameters())]
        return [tensor for tensor in (self.output, *grads) if tensor is not None]

    def release(self) -> None:
        """Free the last step's output and gradients."""
        if not self.keeps_output:
            self.output = self.prepared.x.grad = None
            self.prepared.module.zero_grad(set_to_none=True)

    def restore(self) -> None:
        """Change the inputs if every iteration gets fresh ones. A step does not overwrite them."""
        if self.fresh:
            self.audited_inputs.change()

    def check(self) -> Verdict:
        """Compare the last step's output and gradients with the oracle, then free them."""
        verdict = oracle.compare(self.inputs, self._result())
        self.release()
        return replace(verdict, columns={**verdict.columns, **self.columns()})

    def details(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return columns about forward and backward alone, exposed communication and a traced step."""
        details: dict[str, Any] = {
            "forward_ms": self.stopwatch.ms(self.forward, self.release),
            "backward_ms": self.stopwatch.ms(self.backward, self._fresh_forward),
            **self.product_columns(columns),
        }
        self.release()
        details |= measurements.exposed_communication(
            self.inputs, self.prepared, self.stopwatch, self.step, self.release
        )
        details |= measurements.trace_step(self.step, self.context, keep=self.problem.profile)
        self.release()
        return details

    def _activations_of(self, seed: int) -> list[Tensor]:
        """The input and the upstream gradient of another seed, for the oracle too."""
        self.inputs = self.inputs.with_activations_of(seed)
        size = self.prepared.size
        shard = (0 if size == 1 else self.inputs.rank), size
        return [self.inputs.x(*shard), self.inputs.grad(*shard)]

    def _fresh_forward(self) -> None:
        self.release()
        self.forward()

    def _result(self) -> oracle.BlockResult:
        assert self.output is not None and self.prepared.x.grad is not None, "no step has run"
        grads = gradients(self.problem, self.prepared.module)
        present = {name: grad for name, grad in grads.items() if grad is not None}
        result = oracle.BlockResult(self.output.detach(), self.prepared.x.grad, present)
        return result if self.prepared.size == self.inputs.size else oracle.own_part(result, self.inputs)


class StackSession(_Session):
    """Session of a variant that trains this rank's part of a stack. The loss is the mean squared error to a target."""

    def __init__(self, problem: TpBlock, variant: Variant, context: Context) -> None:
        held = held_bytes(context.device)
        super().__init__(problem, variant, context)
        # A new process would take longer than all steps of a stack.
        self.schedule = IterationSchedule(problem.warmup_steps, problem.steps, held, traced=False)
        self.target = self.inputs.target(0 if self.prepared.size == 1 else self.inputs.rank, self.prepared.size)
        self.optimizer = torch.optim.AdamW(
            self.prepared.module.parameters(),
            problem.learning_rate,
            oracle.BETAS,
            oracle.ADAM_EPS,
            oracle.WEIGHT_DECAY,
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
        if self.context.graph and self.steps_done == CAPTURED_STEP:
            captured, self.graph_columns["graph_gib"] = with_gib(lambda: cuda_graph.capture(self._train))
            self.replay = captured.replay
        (self.replay or self._train)()
        self.steps_done += 1

    def restore(self) -> None:
        """Keep the last step's loss and gradient norm, which the next step overwrites."""
        if len(self.history) < self.steps_done:
            self.history.append(self.now.clone())

    def release(self) -> None:
        """Nothing to do: a step frees its gradients."""

    def check(self) -> Verdict:
        """Compare the losses and gradient norms of all steps with the oracle."""
        self.restore()
        trained, expected = self._trajectory(), oracle.expected_trajectory(self.inputs, self.steps_done)
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
            **self.columns(),
            **self.graph_columns,
        }
        return Verdict(columns, oracle.complaint(errors, self.problem.dtype))

    def details(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rate of the products, and the columns of a further step that is traced."""
        traced = measurements.trace_step(self.step, self.context, keep=self.problem.profile)
        return {**self.product_columns(columns), **traced}

    def _train(self) -> None:
        prepared, module = self.prepared, self.prepared.module
        loss = self._loss(prepared.run(prepared.x))
        loss.backward()
        self.now[0] = loss.detach()
        self.now[1] = _squared_norm(module, counts_norms=prepared.size == 1 or self.inputs.rank == 0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        prepared.x.grad = None

    def _loss(self, output: Tensor) -> Tensor:
        """This rank's rows' part of the mean squared error, in fp32 or more."""
        difference = output.to(torch.promote_types(output.dtype, torch.float32)) - self.target
        return difference.square().sum() / (self.problem.tokens * self.problem.hidden)

    def _trajectory(self) -> Tensor:
        """The losses and gradient norms of all steps so far, over all ranks: (2, steps)."""
        parts = torch.stack(self.history).cpu()
        dist.all_reduce(parts, group=self.inputs.group)
        if self.prepared.size == 1:  # each rank has the whole
            parts /= self.inputs.size
        return torch.stack((parts[:, 0], parts[:, 1].sqrt()))


def _squared_norm(module: nn.Module, *, counts_norms: bool) -> Tensor:
    """This rank's part of the squared norm of all gradients. The norms' weights are whole on every rank."""
    skipped = {id(norm.weight) for norm in module.modules() if isinstance(norm, RMSNorm) and not counts_norms}
    parameters = (parameter for parameter in module.parameters() if id(parameter) not in skipped)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
    return torch.stack(norms).square().sum()


def setup(problem: TpBlock, variant: Variant, context: Context) -> TpBlockSession | StackSession:
    """Return the session of one cell on this rank."""
    return (StackSession if problem.layers else TpBlockSession)(problem, variant, context)
