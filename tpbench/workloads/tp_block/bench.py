"""What a rank does with the transformer block: make its part, run steps, ask the oracle, find what is exposed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tpbench.measure.gemm import compute_ms
from tpbench.measure.session import Context, Costs, Verdict
from tpbench.measure.stopwatch import Stopwatch
from tpbench.workloads import Variant
from tpbench.workloads.tp_block import costs, exposed_communication, machine_rates, oracle, trace
from tpbench.workloads.tp_block.block import gradients
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.prepared import BlockContext, PreparedBlock
from tpbench.workloads.tp_block.problem import TpBlock


class TpBlockSession:
    """A variant on this rank's part of the block."""

    def __init__(self, problem: TpBlock, variant: Variant, context: Context) -> None:
        self.problem, self.context = problem, context
        self.inputs = BlockInputs(problem, context)
        self.stopwatch = Stopwatch(context)
        self.rates = machine_rates.measure(self.inputs, self.stopwatch)
        self.prepared: PreparedBlock = variant.prepare(problem, BlockContext(problem, self.inputs, self.stopwatch))
        self.output: Tensor | None = None
        self.costs = self._costs()

    def step(self) -> None:
        """One forward and backward pass. The last one's gradients are freed first."""
        self.release()
        self.forward()
        self.backward()

    def forward(self) -> None:
        """Only the forward pass."""
        self.output = self.prepared.run(self.prepared.x)

    def backward(self) -> None:
        """Only the backward pass of the last forward."""
        assert self.output is not None
        self.output.backward(self.prepared.grad)

    def release(self) -> None:
        """Free the last step's output and gradients."""
        self.output = self.prepared.x.grad = None
        self.prepared.module.zero_grad(set_to_none=True)

    def restore(self) -> None:
        """A step writes over none of its inputs."""

    def check(self) -> Verdict:
        """Compare the last step's output and gradients with the oracle, and let go of them."""
        errors = oracle.compare(self.inputs, self._result())
        self.release()
        columns = {
            "loss_value": errors.loss_value,
            "loss_error": errors.loss_error,
            "output_error": errors.output_error,
            "grad_error": errors.grad_error,
            "grad_norm": errors.grad_norm,
            "gemm_tflops": self.rates.gemm_tflops,
            "gather_gb_per_s": self.rates.gather_gb_per_s,
            **self.prepared.facts(),
        }
        return Verdict(columns, errors.complaint(self.problem.dtype))

    def details(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Forward and backward alone, what of the communication is exposed, and a traced step."""
        step_ms = columns.get("device_ms") or columns["time_ms"]
        found: dict[str, Any] = {
            "forward_ms": self.stopwatch.ms(self.forward, self.release),
            "backward_ms": self.stopwatch.ms(self.backward, self._forward_anew),
            "tflops": self.costs.flops / step_ms / 1e9,
        }
        found["gemm_share"] = found["tflops"] / self.rates.gemm_tflops
        self.release()
        found |= exposed_communication.measure(self.inputs, self.prepared, self.stopwatch, self.step, self.release)
        found |= trace.of_step(self.step, self.context, keep=self.problem.profile)
        self.release()
        return found

    def _forward_anew(self) -> None:
        self.release()
        self.forward()

    def _result(self) -> oracle.BlockResult:
        assert self.output is not None and self.prepared.x.grad is not None, "there is no step to check"
        grads = gradients(self.problem, self.prepared.module)
        found = {name: each for name, each in grads.items() if each is not None}
        result = oracle.BlockResult(self.output.detach(), self.prepared.x.grad, found)
        return result if self.prepared.size == self.inputs.size else oracle.own_part(result, self.inputs)

    def _costs(self) -> Costs:
        problem, size = self.problem, self.prepared.size
        item = self.inputs.dtype.itemsize
        sent = costs.bytes_sent(problem, size, item)
        flops = costs.flops(problem, size)
        return Costs(
            bytes_moved=costs.bytes_moved(problem, size, item),
            bytes_communicated=sent,
            flops=flops,
            compute_ms=compute_ms(flops, self.rates.gemm_tflops),
            wire_ms=self.rates.wire_ms(costs.bytes_sent(problem, size, item, least=True)),
        )


def setup(problem: TpBlock, variant: Variant, context: Context) -> TpBlockSession:
    """The session of one cell on this rank."""
    return TpBlockSession(problem, variant, context)
