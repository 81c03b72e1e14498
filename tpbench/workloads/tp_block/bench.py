"""Run the transformer block on a rank: set up, step, check, and measure exposed communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from tpbench.measure.audit import GeneratedInputs
from tpbench.measure.clock import Stopwatch
from tpbench.measure.session import Context, Verdict
from tpbench.workloads import Variant
from tpbench.workloads.step import checked_columns, require
from tpbench.workloads.tp_block import oracle
from tpbench.workloads.tp_block.execution import measurements
from tpbench.workloads.tp_block.execution.layers import gradients
from tpbench.workloads.tp_block.execution.prepared import BlockContext, PreparedBlock
from tpbench.workloads.tp_block.execution.stack import StackSession
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.problem import TpBlock
from tpbench.workloads.tp_block.workload import WORKLOAD


class ChangedActivations(GeneratedInputs):
    """The input and the upstream gradient of a session. A change takes those of another seed."""

    def __init__(self, session: TpBlockSession) -> None:
        super().__init__([session.prepared.x, session.prepared.grad], session.problem.seed)
        self.session = session

    def generate(self, seed: int) -> list[Tensor]:
        inputs = self.session.inputs = self.session.inputs.with_activations_of(seed)  # the oracle's, too
        size = self.session.prepared.size
        shard = (0 if size == 1 else inputs.rank), size
        return [inputs.x(*shard), inputs.grad(*shard)]


class TpBlockSession:
    """Session of a variant on this rank's part of the block. Variants from outside this package are audited."""

    fresh = keeps_output = False

    def __init__(self, problem: TpBlock, variant: Variant, context: Context) -> None:
        self.problem, self.variant, self.context = problem, variant, context
        self.inputs = BlockInputs(problem, context)
        self.stopwatch = Stopwatch(context)
        self.rates = measurements.machine_rates(self.inputs, self.stopwatch)
        prepared = variant.prepare(problem, BlockContext(self.inputs, self.stopwatch, context.graph))
        self.prepared: PreparedBlock = require(prepared, PreparedBlock, variant, "the function")
        self.output: Tensor | None = None
        self.trusted, self.audited = variant.place is None, variant.place is not None
        self.audited_inputs = ChangedActivations(self)
        self.costs = self.rates.costs(problem, self.prepared.size)

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
        columns = checked_columns(self.prepared.columns(), self.variant, WORKLOAD)
        return replace(verdict, columns={**verdict.columns, **asdict(self.rates), **columns})

    def details(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return columns about forward and backward alone, exposed communication and a traced step."""
        step_ms = columns.get("device_ms") or columns["time_ms"]
        details: dict[str, Any] = {
            "forward_ms": self.stopwatch.ms(self.forward, self.release),
            "backward_ms": self.stopwatch.ms(self.backward, self._fresh_forward),
            "tflops": self.costs.flops / step_ms / 1e9,
        }
        details["gemm_share"] = details["tflops"] / self.rates.gemm_tflops
        self.release()
        details |= measurements.exposed_communication(
            self.inputs, self.prepared, self.stopwatch, self.step, self.release
        )
        details |= measurements.trace_step(self.step, self.context, keep=self.problem.profile)
        self.release()
        return details

    def _fresh_forward(self) -> None:
        self.release()
        self.forward()

    def _result(self) -> oracle.BlockResult:
        assert self.output is not None and self.prepared.x.grad is not None, "no step has run"
        grads = gradients(self.problem, self.prepared.module)
        present = {name: grad for name, grad in grads.items() if grad is not None}
        result = oracle.BlockResult(self.output.detach(), self.prepared.x.grad, present)
        return result if self.prepared.size == self.inputs.size else oracle.own_part(result, self.inputs)


def setup(problem: TpBlock, variant: Variant, context: Context) -> TpBlockSession | StackSession:
    """Return the session of one cell on this rank."""
    return (StackSession if problem.layers else TpBlockSession)(problem, variant, context)
