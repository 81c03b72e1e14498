"""Train a stack of blocks with AdamW: the loss, gradient norm, time and memory of each step, and their oracle.

The oracle trains the same stack in float64, by the plain formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpbench.measure import cuda_graph
from tpbench.measure.clock import Stopwatch
from tpbench.measure.rank_memory import held_bytes
from tpbench.measure.session import Context, IterationSchedule, Verdict
from tpbench.workloads import Variant
from tpbench.workloads.step import checked_columns, require
from tpbench.workloads.tp_block.execution import measurements
from tpbench.workloads.tp_block.execution.layers import RMSNorm
from tpbench.workloads.tp_block.execution.prepared import BlockContext, PreparedBlock, with_gib
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.oracle import ForwardPass, complaint, squared_norm
from tpbench.workloads.tp_block.problem import TpBlock
from tpbench.workloads.tp_block.workload import WORKLOAD

CAPTURED_STEP = 1
"""The step that is captured in a graph and then replayed, counted from 0. The optimizer has its states by then."""

BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.01
"""Arguments of AdamW beside the learning rate: torch's defaults."""


class StackSession:
    """Session of a variant that trains this rank's part of a stack. The loss is the mean squared error to a target."""

    def __init__(self, problem: TpBlock, variant: Variant, context: Context) -> None:
        held = held_bytes(context.device)
        # A new process would take longer than all steps of a stack.
        self.schedule = IterationSchedule(problem.warmup_steps, problem.steps, held, traced=False)
        self.problem, self.variant, self.context = problem, variant, context
        self.inputs = BlockInputs(problem, context)
        stopwatch = Stopwatch(context)
        self.rates = measurements.machine_rates(self.inputs, stopwatch)
        prepared = variant.prepare(problem, BlockContext(self.inputs, stopwatch, context.graph))
        self.prepared: PreparedBlock = require(prepared, PreparedBlock, variant, "the function")
        self.target = self.inputs.target(0 if self.prepared.size == 1 else self.inputs.rank, self.prepared.size)
        self.optimizer = torch.optim.AdamW(
            self.prepared.module.parameters(),
            problem.learning_rate,
            BETAS,
            EPS,
            WEIGHT_DECAY,
            fused=True,
            capturable=context.device.type == "cuda",
        )
        self.costs = self.rates.costs(problem, self.prepared.size)
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
        trained, expected = self._trajectory(), expected_trajectory(self.inputs, self.steps_done)
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
            **asdict(self.rates),
            **checked_columns(self.prepared.columns(), self.variant, WORKLOAD),
            **self.graph_columns,
        }
        return Verdict(columns, complaint(errors, self.problem.dtype))

    def details(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rate of the products, and the columns of a further step that is traced."""
        tflops = self.costs.flops / (columns.get("device_ms") or columns["time_ms"]) / 1e9
        traced = measurements.trace_step(self.step, self.context, keep=self.problem.profile)
        return {"tflops": tflops, "gemm_share": tflops / self.rates.gemm_tflops, **traced}

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


def expected_trajectory(inputs: BlockInputs, steps: int) -> Tensor:
    """Train for `steps` steps in float64. Collective over the tp group, with the same result on every rank.

    Returns the loss and gradient norm of each step: (2, steps).

    After each step the weights are rounded to the dtype in which a variant stores them: in bf16 a small update of a
    large weight is lost, and others become larger.
    """
    problem = inputs.problem
    layers = [
        {name: part.double().requires_grad_() for name, part in parts.items()}
        for parts in (inputs.weights_of(inputs.rank, inputs.size, layer) for layer in range(problem.layers))
    ]
    x, target = inputs.x(0, 1).double(), inputs.target(0, 1).double()
    weights = [weight for layer in layers for weight in layer.values()]
    moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
    losses, grad_norms = [], []
    for step in range(1, steps + 1):
        y = x
        for layer in layers:
            y = ForwardPass(inputs, layer).run(y)
        loss = (y - target).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        grad_norms.append(_grad_norm(inputs, layers))
        with torch.no_grad():
            for weight, (mean, square) in zip(weights, moments, strict=True):
                _update(weight, mean, square, step, problem.learning_rate)
                weight.copy_(weight.to(inputs.dtype))
    return torch.tensor([losses, grad_norms], dtype=torch.float64)


def _update(weight: Tensor, mean: Tensor, square: Tensor, step: int, learning_rate: float) -> None:
    """One step of AdamW. The decay is decoupled from the gradient."""
    grad = weight.grad
    assert grad is not None
    first, second = BETAS
    mean.mul_(first).add_((1 - first) * grad)
    square.mul_(second).add_((1 - second) * grad**2)
    weight.mul_(1 - learning_rate * WEIGHT_DECAY)
    weight.sub_(learning_rate * mean / (1 - first**step) / ((square / (1 - second**step)).sqrt() + EPS))
    weight.grad = None


def _grad_norm(inputs: BlockInputs, layers: list[dict[str, Tensor]]) -> float:
    """The norm of the gradients of all layers' weights, over all ranks."""
    grads = ({name: part.grad for name, part in layer.items() if part.grad is not None} for layer in layers)
    square = torch.tensor(math.fsum(squared_norm(of_layer, inputs) for of_layer in grads), dtype=torch.float64)
    dist.all_reduce(square, group=inputs.group)
    return math.sqrt(square)
