"""A workload that declares its inputs, a reference and its costs as functions, on a rank: set up, run, check."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.comm.collectives import gather_objects
from tpbench.measure.audit import Inputs
from tpbench.measure.clock import Stopwatch
from tpbench.measure.rates import compute_ms, gather_gb_per_s, gemm_tflops
from tpbench.measure.session import Context, Costs, Verdict
from tpbench.workloads import NAMES, Variant, Workload
from tpbench.workloads.differences import Differences, malformed, place_of
from tpbench.workloads.step import Step, StepSession, WrongReturn, count

TOLERANCES = {"bfloat16": 2.0**-6, "float16": 2.0**-9, "float32": 2.0**-15, "float64": 2.0**-36}
"""By dtype, the largest error of a correct output, unless the workload says otherwise. The first two are four times the
error of one rounding. That of float32 leaves room for sums of 10^5 terms in any order."""

ERRORS = ("output_error", "loss_value", "loss_error", "grad_error")
"""Columns that the check of a user's workload may set."""


class CheckedSession(StepSession[Any]):
    """A variant of a workload that compares the outputs itself, on this rank's inputs."""

    def __init__(self, workload: Workload, problem: Any, variant: Variant, context: Context) -> None:
        self.workload, self.problem, self.rank = workload, problem, replace(context, seed=problem.seed)
        self.inputs = workload.functions["inputs"](problem, self.rank)
        self.counted = counted_costs(workload, problem, self.rank)
        arguments = (problem, self.inputs, self.rank)
        step = variant.prepare(*arguments[: len(inspect.signature(variant.prepare).parameters)])
        if callable(step) and not isinstance(step, Step):
            declared = variant.bytes_communicated
            step = Step(step, declared(problem, self.rank) if declared else self.counted.bytes_communicated)
        super().__init__(variant, step, workload.output, self.inputs_of(self.inputs))

    @property
    def costs(self) -> Costs:
        """The costs that the workload counts, and the bytes that the variant sends, maybe known only after a step."""
        in_kernels = self.run.communicates_in_kernels()
        return replace(self.counted, bytes_communicated=self.bytes_communicated, communicates_in_kernels=in_kernels)

    def check(self) -> Verdict:
        """Let the workload compare the output of the last step, then free it."""
        function = self.workload.functions["check"]
        verdict: Verdict = function(self.problem, self.inputs, self.take_output(), self.rank)
        if self.workload.name not in NAMES:
            require_verdict(verdict, function)
        verdict.columns.update(self.columns_of_variant(self.workload))
        return verdict


class OperationSession(StepSession[dict[str, Tensor]]):
    """A variant on this rank's inputs."""

    def __init__(self, workload: Workload, problem: Any, variant: Variant, context: Context) -> None:
        self.workload, self.problem = workload, problem
        self.rank = replace(context, seed=problem.seed)
        self.inputs = self._computed("inputs", problem, self.rank)
        dtypes = {tensor.dtype for tensor in self.inputs.values() if tensor.is_floating_point()}
        self.dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)
        """The least precise dtype of the inputs, whose tolerance holds for all outputs."""
        self.compared = False
        self.costs = self._counted()
        if (declared := variant.bytes_communicated) is not None:
            self.costs = replace(self.costs, bytes_communicated=count(declared(problem, self.rank), variant))
        step = variant.prepare(problem, self.inputs, self.rank)
        if not callable(step):
            kind = type(step).__name__
            raise WrongReturn(variant, f"{variant.name} must return its step, a function without arguments, not {kind}")
        super().__init__(variant, Step(step), dict, Inputs(list(self.inputs.values())))

    def check(self) -> Verdict:
        """Compare the output of the last step with the reference on all ranks, then free it."""
        got = self.take_output()
        inputs = {tensor.untyped_storage().data_ptr() for tensor in self.inputs.values()}
        for name, value in got.items():
            if isinstance(value, Tensor) and value.numel() and value.untyped_storage().data_ptr() in inputs:
                raise WrongReturn(self.variant, f"the output {name} of {self.variant.name} lies in memory of an input")
        right = self._computed("reference", self.problem, self.inputs, self.rank, twice=not self.compared)
        self.compared = True
        error, wrong = self._compare(got, right)
        ranks = gather_objects((error if math.isfinite(error) else None, wrong), _all_ranks())
        worst = max(math.inf if value is None else value for value, _ in ranks)
        return Verdict({"output_error": worst}, next((text for _, text in ranks if text), None))

    def _computed(self, what: str, *arguments: Any, twice: bool = True) -> dict[str, Tensor]:
        """Return the tensors that a function of the workload returns. Raises WrongReturn for anything else.

        `twice`: compute them again, and raise WrongReturn if they differ.
        """
        function = self.workload.functions[what]
        first = {name: value.cpu() for name, value in _tensors(function, *arguments).items()} if twice else None
        values = _tensors(function, *arguments)
        for name in {**(first or values), **values}:
            if first and not (name in first and name in values and _same_bits(first[name], values[name].cpu())):
                raise WrongReturn(function, f"{function.__name__} computes another {name} when it is called twice")
        return values

    def _counted(self) -> Costs:
        """Return the costs of the busiest rank, with their times at the rates of this machine. Collective."""
        counted = counted_costs(self.workload, self.problem, self.rank)
        counts = (counted.bytes_moved, counted.bytes_communicated, counted.flops)
        moves, sends, operations = zip(*gather_objects(counts, _all_ranks()), strict=True)
        moved, sent, flops = None if None in moves else max(moves), max(sends), max(operations)
        stopwatch = Stopwatch(self.rank)
        times: dict[str, Any] = {"wire_beside_memory": True}
        if flops and self.dtype is not None:
            times["compute_ms"] = compute_ms(flops, gemm_tflops(self.dtype, self.rank.device, stopwatch))
        if sent and self.rank.world_size > 1:
            times["wire_ms"] = sent / gather_gb_per_s(self.rank.device, _all_ranks(), stopwatch) / 1e6
        return replace(counted, bytes_moved=moved, bytes_communicated=sent, flops=flops, **times)

    def _compare(self, got: Mapping[str, Any], right: Mapping[str, Tensor]) -> tuple[float, str | None]:
        """Return the largest error of this rank's outputs, and why the first wrong one is wrong."""
        if got.keys() != right.keys():
            names = [", ".join(map(str, sorted(outputs))) or "none" for outputs in (got, right)]
            return math.inf, f"rank {self.rank.rank}: the step returns the outputs {names[0]}, expected {names[1]}"
        worst, wrong = 0.0, None
        tolerances = {**TOLERANCES, **self.workload.tolerances}
        for name, expected in right.items():
            dtype = None if expected.dtype == torch.float64 else expected.dtype
            if text := malformed(name, got[name], tuple(expected.shape), dtype, expected.device):
                worst, wrong = math.inf, wrong or f"rank {self.rank.rank}: {text}"
                continue
            of_dtype = str(self.dtype or got[name].dtype).removeprefix("torch.")
            limit = tolerances.get(of_dtype, 0.0 if not got[name].is_floating_point() else None)
            if limit is None:
                function = self.workload.functions["reference"]
                raise WrongReturn(function, f"Workload(..., tolerances=...) has none for {of_dtype}")
            errors = relative_errors(got[name], expected)
            error, found = float(errors.max()) if errors.numel() else 0.0, Differences()
            found.add(got[name], expected, errors > limit, 0)
            worst = max(worst, error)
            if found.count and wrong is None:
                place = place_of(self.rank.rank, name, **vars(found))
                wrong = f"output_error {error:.3g} is above {limit:.3g} ({of_dtype}): {place}"
                wrong += " (nan: memory that was never written)" if math.isnan(found.got) else ""
        return worst, wrong


def counted_costs(workload: Workload, problem: Any, rank: Context) -> Costs:
    """Return what the workload's function counts, or no costs without one. Raises WrongReturn for anything else."""
    if (function := workload.functions.get("costs")) is None:
        return Costs(None, 0)
    costs = function(problem, rank)
    if not isinstance(costs, Costs):
        raise WrongReturn(function, f"{function.__name__} must return tpbench.api.Costs, not {type(costs).__name__}")
    names = ("bytes_communicated", "flops", *(() if costs.bytes_moved is None else ("bytes_moved",)))
    return replace(costs, **{name: count(getattr(costs, name), function, name) for name in names})


def require_verdict(verdict: Any, function: Callable[..., Any]) -> None:
    """Raise WrongReturn unless a user's check returned a verdict that a row can hold."""
    if not (
        isinstance(verdict, Verdict) and isinstance(verdict.columns, dict) and isinstance(verdict.wrong, str | None)
    ):
        raise WrongReturn(function, f"{function.__name__} must return tpbench.api.Verdict(columns, None or a text)")
    if not verdict.columns.keys() <= set(ERRORS):
        raise WrongReturn(function, f"{function.__name__} may set the columns {', '.join(ERRORS)} only")
    for name, value in verdict.columns.items():
        if not isinstance(value, (float, int)):
            raise WrongReturn(function, f"{function.__name__} sets {name}: it must be a float, not {value!r:.40}")


def setup(workload: Workload, problem: Any, variant: Variant, context: Context) -> OperationSession | CheckedSession:
    """Return the session of one cell on this rank."""
    session = CheckedSession if "check" in workload.functions else OperationSession
    return session(workload, problem, variant, context)


def relative_errors(got: Tensor, right: Tensor) -> Tensor:
    """Return the error of each element, relative to the larger of its size and the root mean square of its row.

    A row is along the last dimension. Errors below half the smallest number of the dtype count as 0: no variant can
    avoid underflow. Whole numbers must be equal. NaN and other infinities have an infinite error.
    """
    equal = got == right
    slack = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps / 2 if got.is_floating_point() else 0.0
    if not right.is_floating_point():
        return torch.where(equal, 0.0, math.inf).double()
    got, right = got.double(), right.double()
    size = right.abs()
    if right.dim():
        finite = right.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        size = size.maximum(finite.square().mean(-1, keepdim=True).sqrt())
    error = ((got - right).abs() - slack).clamp(min=0.0) / size
    return torch.where(equal, 0.0, torch.where((got - right).abs() <= slack, 0.0, error).nan_to_num(math.inf, math.inf))


def _all_ranks() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _tensors(function: Callable[..., Any], *arguments: Any) -> dict[str, Tensor]:
    values = function(*arguments)
    if isinstance(values, dict) and all(isinstance(value, Tensor) for value in values.values()):
        return values
    kind = type(values).__name__
    if isinstance(values, dict):
        kind = f"a dictionary with {', '.join(sorted({type(value).__name__ for value in values.values()}))}"
    raise WrongReturn(function, f"{function.__name__} must return a dictionary of tensors, not {kind}")


def _same_bits(left: Tensor, right: Tensor) -> bool:
    bits = (tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in (left, right))
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(*bits)
