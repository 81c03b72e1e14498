"""A workload that declares functions, on a rank: set up, run, check, and measure details."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import filterfalse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from tpbench.comm.collectives import gather_objects
from tpbench.measure.audit import AuditedSession, Inputs, named_tensors, tensors_of
from tpbench.measure.rates import compute_ms, gather_gb_per_s, gemm_tflops
from tpbench.measure.session import Context, Costs, Session, Verdict
from tpbench.measure.timers import Stopwatch, do_nothing
from tpbench.workloads import NAMES, Variant, Workload
from tpbench.workloads.differences import Compared, Comparison
from tpbench.workloads.step import Step, WrongReturn, checked_columns, count, require

TOLERANCES = {"bfloat16": 2.0**-6, "float16": 2.0**-9, "float32": 2.0**-15, "float64": 2.0**-36}
"""By dtype, the largest error of a correct output, unless the workload says otherwise. The first two are four times the
error of one rounding: for another one, and the arithmetic before it. Others have room for sums of 10^5 terms."""

ERRORS = dict.fromkeys(("output_error", "loss_value", "loss_error", "grad_error"), float)
"""Columns that every workload's check may set, with their type."""


class OperationSession(AuditedSession):
    """A variant of a workload on this rank's inputs. It keeps the output of a step until the check."""

    def __init__(self, workload: Workload, problem: Any, variant: Variant, context: Context) -> None:
        self.workload, self.problem, self.variant = workload, problem, variant
        self.rank = replace(context, seed=problem.seed)
        self.trusted = variant.place is None
        self.confined = not self.trusted and "step" not in workload.functions
        """True if none of the variant's code may run between timed steps, where it could compute the next result."""
        make = workload.functions["inputs"]
        is_dictionary = "reference" in workload.functions
        self.inputs: Any = _computed(make, problem, self.rank) if is_dictionary else make(problem, self.rank)
        tensors = tensors_of(self.inputs)
        _require_dense(make, self.inputs, writable=True)
        self.versions, self.checksums = _versions(tensors), [*map(_checksum, tensors)] if self.confined else []
        self.dtype = least_precise(tensors)
        """The least precise dtype of the inputs, whose tolerance holds for all outputs."""
        self.rates: dict[str, float] = {}  # of this machine that the floor needs, as columns
        self.columns: Mapping[str, Any] = {}  # measured so far, for the workload's `details`
        self.costs = self._counted()
        # A dictionary of its own: the reference reads the entries of the other one.
        inputs = dict(self.inputs) if isinstance(self.inputs, dict) else self.inputs
        arguments = (problem, inputs, self.rank)
        self.prepared = variant.prepare(*arguments[: _parameters(variant.prepare)])
        self.run = self._step()
        self.overwrites_inputs = not self.confined and self.run.restore is not None
        self.audited_inputs = Inputs(tensors, changed=self._refresh)
        if "step" in workload.functions:  # otherwise a variant could state them
            self.costs, self.audited_inputs = self.run.costs or self.costs, self.run.inputs or self.audited_inputs
        self.output: Any = None
        self.compared = False

    @functools.cached_property
    def stopwatch(self) -> Stopwatch:
        """A stopwatch, whose buffer of the size of a cache most sessions don't need."""
        return Stopwatch(self.rank)

    @property
    def step_ms(self) -> float:
        """The time of an iteration, for `details`: by the device clock, on a CPU by the wall clock."""
        return float(self.columns.get("device_ms") or self.columns["time_ms"])

    def _step(self) -> Step[Any]:
        variant, step = self.variant, self.prepared
        if (make := self.workload.functions.get("step")) is not None:
            prepared = require(step, self.workload.prepared, variant, "the function")
            step = make(self.problem, self.inputs, prepared, self.rank)
        if not callable(step):
            expected = "its step, a function without arguments or a Step"
            raise WrongReturn(variant, f"{variant.name} must return {expected}, not {type(step).__name__}")
        if not isinstance(step, Step):
            declared = variant.bytes_communicated
            step = Step(step, declared(self.problem, self.rank) if declared else self.costs.bytes_communicated)
        for name in ("run", "columns", "restore", "communicates_in_kernels", "release"):
            function = getattr(step, name)
            if not (callable(function) or (name == "restore" and function is None)):
                kind = type(function).__name__
                raise WrongReturn(variant, f"{name} of the step of {variant.name} must be a function, not {kind}")
        return step

    def step(self) -> None:
        """Run one iteration. The last output is freed first, so that two never exist at once."""
        if not self.keeps_output:
            self.output = None
        if self.confined:
            self._restore()
        self.output = self.run()

    def _read(self) -> Any:
        return self.output() if callable(self.output) and not self.confined else self.output

    def outputs(self) -> list[Tensor]:
        """Return the tensors of the last step's output that it must compute."""
        output = self._read()
        if not isinstance(output, self.workload.output):
            return []
        return [output] if isinstance(output, Tensor) else tensors_of(output)

    def release(self) -> None:
        """Free the output of the last step."""
        if not self.keeps_output:
            self.output = None
            if not self.confined:
                self.run.release()

    def restore(self) -> None:
        """Restore what a step changes, after changing the inputs if every iteration gets fresh ones."""
        if self.fresh:
            self.checksums = []
            self.audited_inputs.change()
        if not self.confined:  # it restores within its step
            self._restore()

    def _restore(self) -> None:
        (self.run.restore or do_nothing)()

    def _refresh(self) -> None:
        """Let the workload write the inputs that follow from changed ones, unseen by the version counters."""
        if (function := self.workload.functions.get("refresh")) is None:
            return
        with _unsafe_preserve_version_counter(tuple(filterfalse(Tensor.is_inference, self.audited_inputs.tensors))):
            function(self.problem, self.inputs, self.rank)

    def check(self) -> Verdict:
        """Compare the output of the last step with the reference, or let the workload compare it; then free it."""
        workload, run = self.workload, self.run
        output = require(self._read(), workload.output, self.variant, "the step")
        self.release()
        tensors = self.audited_inputs.tensors
        kept = not self.confined or self.versions == _versions(tensors)
        if self.checksums:  # torch does not count writes by NumPy, collectives and kernels
            kept, self.checksums = kept and self.checksums == [*map(_checksum, tensors)], []
        if (function := workload.functions.get("check")) is None:
            verdict = self._against_reference(output)
        else:
            verdict = _checked(function(self.problem, self.inputs, output, self.rank), function, workload)
        if not all(gather_objects(kept)):
            why = "overwrites its inputs, which the reference reads after it: let it write to a copy"
            verdict = replace(verdict, wrong=f"{self.variant.name} {why}")
        sent = run.bytes_communicated() if callable(run.bytes_communicated) else run.bytes_communicated
        busiest = max(gather_objects(count(sent, self.variant)))
        in_kernels = run.communicates_in_kernels()
        self.costs = replace(self.costs, bytes_communicated=busiest, communicates_in_kernels=in_kernels)
        rates = {name: rate for name, rate in self.rates.items() if name in workload.column_types()}
        of_variant = checked_columns(run.columns(), self.variant, workload.column_types(of_variant=True))
        return replace(verdict, columns={**verdict.columns, **rates, **of_variant})

    def details(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of the workload's `details`, given those measured so far. Collective."""
        if (function := self.workload.functions.get("details")) is None:
            return {}
        self.columns = columns
        details = function(self.problem, self.inputs, self, self.rank)
        return checked_columns(details, function, self.workload.column_types())

    def _against_reference(self, got: dict[str, Any]) -> Verdict:
        """Compare an output with the reference on all ranks."""
        inputs = {tensor.untyped_storage().data_ptr() for tensor in self.inputs.values()}
        for name, value in got.items():
            output, is_tensor = f"the output {name} of {self.variant.name}", isinstance(value, Tensor)
            if is_tensor and type(value) not in (Tensor, nn.Parameter):
                # A DTensor, or a functional collective that nothing has waited for.
                raise WrongReturn(self.variant, f"{output} must be a plain tensor, not {type(value).__name__}")
            is_dense = is_tensor and value.layout == torch.strided and value.numel() > 0
            if is_dense and value.untyped_storage().data_ptr() in inputs:
                raise WrongReturn(self.variant, f"{output} lies in memory of an input")
        reference = self.workload.functions["reference"]
        right = _computed(reference, self.problem, self.inputs, self.rank, twice=not self.compared)
        if not any(gather_objects(sum(tensor.numel() for tensor in right.values()))):
            raise WrongReturn(reference, f"{reference.__name__} must return something to compare, got no elements")
        self.compared = True
        got, right = ({name: _real(value) for name, value in outputs.items()} for outputs in (got, right))
        names = [", ".join(sorted(map(str, outputs))) or "none" for outputs in (got, right)]
        other = f"rank {self.rank.rank}: the step returns the outputs {names[0]}, expected {names[1]}"
        if other := next(filter(None, gather_objects("" if got.keys() == right.keys() else other)), ""):
            return Verdict({"output_error": math.inf}, other)
        dtype = str(self.dtype or least_precise(got.values())).removeprefix("torch.")
        limit = {**TOLERANCES, "None": 0.0, **self.workload.tolerances}.get(dtype)
        if limit is None:
            raise WrongReturn(reference, f"Workload(..., tolerances=...) has none for {dtype}")
        outputs = {}
        for name, tensor in right.items():
            of_output = None if tensor.dtype == torch.float64 else tensor.dtype
            outputs[name] = Compared(got[name], tuple(tensor.shape), of_output, "output_error")
        least = str(least_precise([*self.inputs.values(), *got.values()])).removeprefix("torch.")
        dtypes = dtype if least == dtype else f"{dtype}, and an output is {least}"
        comparison = Comparison(outputs, {"output_error": limit}, gather_objects, self.rank.device, dtypes)
        for name in comparison.got:
            comparison.elements(name, relative_errors(got[name], right[name]), right[name])
            _judge_columns(comparison, name, got[name], right[name], limit)
        return comparison.verdict()

    def _counted(self) -> Costs:
        """Return the costs of the busiest rank, with their times at the rates of this machine. Collective."""
        if (function := self.workload.functions.get("costs")) is None:
            return Costs(None, 0)
        inputs = [self.inputs] if _parameters(function) == 3 else []
        counted = function(self.problem, *inputs, self.rank)
        if not isinstance(counted, Costs):
            expected = f"{function.__name__} must return tpbench.api.Costs"
            raise WrongReturn(function, f"{expected}, not {type(counted).__name__}")
        here = None if counted.bytes_moved is None else count(counted.bytes_moved, function, "bytes_moved")
        counts = (here, count(counted.bytes_communicated, function), count(counted.flops, function, "flops"))
        moves, sends, operations = zip(*gather_objects(counts), strict=True)
        moved, sent, flops = None if None in moves else max(moves), max(sends), max(operations)
        times: dict[str, Any] = {}
        if flops and self.dtype is not None and not counted.compute_ms:
            dtype, device = self.dtype, self.rank.device
            tflops = self.rank.once("gemm", lambda: gemm_tflops(dtype, device, self.stopwatch))
            self.rates["gemm_tflops"], times["compute_ms"] = tflops, compute_ms(flops, tflops)
        world = dist.group.WORLD
        # On CPUs gloo's collectives differ too much in speed for one of them to bound the others.
        if sent and world is not None and world.size() > 1 and not counted.wire_ms and self.rank.device.type == "cuda":
            rate = self.rank.once("gather", lambda: gather_gb_per_s(self.rank.device, world, self.stopwatch))
            times |= {"wire_ms": sent / rate / 1e6, "wire_beside_memory": True}
        return replace(counted, bytes_moved=moved, bytes_communicated=sent, flops=flops, **times)


def least_precise(values: Iterable[Any]) -> torch.dtype | None:
    """Return the floating-point dtype of the tensors among the values with the largest error of rounding, or None."""
    dtypes = {value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def scheduled_session(workload: Workload, problem: Any, variant: Variant, context: Context) -> Session:
    """Return the session that a workload makes itself, for iterations that continue the one before."""
    function = workload.functions["session"]
    session: Any = function(problem, variant, replace(context, seed=problem.seed))
    if not isinstance(session, Session) or session.schedule is None:
        expected = "a tpbench.api.Session with a schedule"
        raise WrongReturn(function, f"{function.__name__} must return {expected}, not {type(session).__name__}")
    if workload.name in NAMES:
        return session
    # A user's session sets only the columns that it declares.
    check, details, valid = session.check, session.details, {**ERRORS, **workload.column_types()}
    session.check = lambda: _checked(check(), function, workload)  # type: ignore[method-assign]
    session.details = lambda columns: checked_columns(details(columns), function, valid)  # type: ignore[method-assign]
    return session


def _checked(verdict: Any, function: Callable[..., Any], workload: Workload) -> Verdict:
    """Return what a workload's function returned as its verdict, if it is one and sets declared columns."""
    if not (isinstance(verdict, Verdict) and isinstance(verdict.wrong, str | None)):
        expected = "tpbench.api.Verdict(columns, None or a text)"
        raise WrongReturn(function, f"{function.__name__} must return {expected}, not {verdict!r:.80}")
    valid = {**ERRORS, **workload.column_types()}
    return replace(verdict, columns=checked_columns(verdict.columns, function, valid))


def relative_errors(got: Tensor, right: Tensor) -> Tensor:
    """Return the error of each element, relative to the larger of its size and the root mean square of its row.

    A row is along the last dimension of more than one element. Errors below half the dtype's smallest number are 0.
    Whole numbers must be equal. NaN and other infinities have an infinite error.
    """
    if not right.is_floating_point():
        return torch.where(got == right, 0.0, math.inf).double()
    slack = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps / 2 if got.is_floating_point() else 0.0
    got, right = got.double(), right.double()
    error, size = (got - right).abs(), right.abs()
    if along := [dim for dim, length in enumerate(right.shape) if length > 1][-1:]:
        finite = right.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        size = size.maximum(finite.square().mean(along, keepdim=True).sqrt())
    relative = ((error - slack).clamp(min=0.0) / size).nan_to_num(math.inf, math.inf)
    return relative.masked_fill((got == right) | (error <= slack), 0.0)


MOST_OF_COLUMN, COLUMN_ROWS = 0.5, 4
"""The largest error of a correct column, relative to its norm: a lost one has 1, and two swapped ones about 1.4. Fewer
rows decide nothing about a column."""


def _judge_columns(comparison: Comparison, name: str, got: Tensor, right: Tensor, limit: float) -> None:
    """Judge each column of floating-point numbers by its norm: within its rows' tolerance it could be lost."""
    if not right.is_floating_point() or right.dim() < 2 or right.numel() < COLUMN_ROWS * right.shape[-1]:
        return
    got, right = (values.reshape(-1, right.shape[-1]).double() for values in (got, right))
    finite = got.isfinite() & right.isfinite()
    error = (got - right).where(finite, 0.0).square().sum(0).sqrt()
    square = right.where(finite, 0.0).square()
    # A 16th of the tolerance of rows is a quarter of one rounding.
    allowed = MOST_OF_COLUMN * square.sum(0).sqrt() + limit / 16 * square.mean(1).sum().sqrt()
    least = torch.finfo(comparison.got[name].dtype).smallest_normal * math.sqrt(len(right))
    comparison.groups(name, "column", error, allowed + least)


def _real(value: Any) -> Any:
    """Return an output, a complex one with real and imaginary parts side by side in the last dimension."""
    if not isinstance(value, Tensor) or not value.is_complex():
        return value
    return torch.view_as_real(value.resolve_conj()).flatten(-2 if value.dim() else -1)


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return how often operations of torch have written to each tensor. Audits do not count."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _checksum(tensor: Tensor) -> int:
    """Return a number that depends on all bits of a tensor and on their order."""
    bits = tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    bits = bits.clone() if bits.storage_offset() % 8 else bits  # a view of words begins at a whole one
    words = bits[: bits.numel() // 8 * 8].view(torch.int64)
    side = math.isqrt(words.numel())
    square = words[: side**2].view(side, side)
    weights = 2 * torch.arange(side, device=tensor.device) + 1
    sums = (square.sum(0) * weights).sum() + (square.sum(1) * weights**2).sum() + words[side**2 :].sum()
    return int(sums) + int(bits[words.numel() * 8 :].sum())


def _parameters(function: Callable[..., Any]) -> int:
    return len(inspect.signature(function).parameters)


def _computed(function: Callable[..., Any], *arguments: Any, twice: bool = True) -> dict[str, Tensor]:
    """Return the tensors that a function of a workload returns, computed `twice` to see that they are the same."""
    values = _tensors(function, *arguments)
    if twice:
        first = {name: value.cpu() for name, value in values.items()}
        values = _tensors(function, *arguments)
        for name in first | values:
            if not (name in first and name in values and _same_bits(first[name], values[name].cpu())):
                raise WrongReturn(function, f"{function.__name__} computes another {name} when it is called twice")
    return values


def _tensors(function: Callable[..., Any], *arguments: Any) -> dict[str, Tensor]:
    values = function(*arguments)
    kinds = sorted({type(value).__name__ for value in values.values()}) if isinstance(values, dict) else []
    if isinstance(values, dict) and all(isinstance(value, Tensor) for value in values.values()):
        _require_dense(function, values)
        return values
    kind = f"a dictionary with {', '.join(kinds)}" if kinds else type(values).__name__
    raise WrongReturn(function, f"{function.__name__} must return a dictionary of tensors, not {kind}")


def _require_dense(function: Callable[..., Any], values: Any, *, writable: bool = False) -> None:
    """Raise WrongReturn for a tensor in a value that cannot be read as a whole, or changed in place (writable)."""
    for name, value in named_tensors(values):
        why = ""
        kinds = {"nested": value.is_nested, "on the device meta": value.is_meta, "quantized": value.is_quantized}
        if kind := next(filter(kinds.get, kinds), "" if value.layout == torch.strided else value.layout):
            why = f"is {kind}: return dense tensors with data"
        elif writable and any(size > 1 and not value.stride(dim) for dim, size in enumerate(value.shape)):
            why = "has elements that share memory, as after expand(): return a contiguous() one"
        if why:
            raise WrongReturn(function, f"{function.__name__} returns {name or 'a tensor'}, which {why}")


def _same_bits(left: Tensor, right: Tensor) -> bool:
    bits = (tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in (left, right))
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(*bits)
