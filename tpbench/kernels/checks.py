"""Checks of the arguments of `entropy_loss` and `linear_entropy_loss`. Errors name the argument and what is valid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from tpbench.kernels import COMPARING_LOSSES, KERNEL_LOSSES, LABEL_LOSSES
from tpbench.kernels.cached_launch import INTERPRETED
from tpbench.kernels.kernel_arguments import RowInputs
from tpbench.kernels.row_loss import LARGEST_SCALE, Options, TopK

POLICY_TENSORS = ("old_logprobs", "advantages", "ref_logprobs")
"""The tensors of rows that only loss="policy" has."""
LINEAR_INPUTS = ("hidden", "weight", "bias")
"""The inputs of a linear loss that have gradients."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
TOP_LOSSES = ("soft_cross_entropy", "forward_kl", "reverse_kl")
"""The losses whose target may be a teacher's top k."""
MAX_TOP_K = 1024


def choice(name: str, value: object, *valid: object) -> None:
    """ValueError unless `value` is one of `valid`."""
    if not isinstance(value, (str, bool, type(None))) or value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(map(str, valid))}; got {value!r}")


def number(
    name: str, value: Any, kind: type[float] = float, low: float | None = 0.0, high: float | None = None,
    open_low: bool = False,
) -> None:  # fmt: skip
    """Raise unless an int or a number of `kind`, finite in fp32, and from `low` (open_low: above it) to `high`."""
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        is_number = hasattr(value, "__float__") and not isinstance(value, bool)
        advice = f": pass {kind.__name__}({name})" if is_number else ""
        kinds = "an int" if kind is int else "an int or a float of Python"
        raise TypeError(f"{name} must be {kinds}, got {type(value).__name__}{advice}")
    largest = torch.finfo(torch.float32).max if kind is float else 2**63 - 1
    is_low = low is not None and (value < low or (open_low and value == low))
    if not -largest <= value <= largest or is_low or (high is not None and value > high):
        limits = "" if low is None else f" and {'greater than' if open_low else 'at least'} {low}"
        limits += "" if high is None else f" and at most {high}"
        raise ValueError(f"{name} must be finite in {'float32' if kind is float else 'int64'}{limits}; got {value}")


def options(given: Options) -> None:
    """Raise unless the options that concern no tensor are valid and fit together."""
    loss, group, algorithm, exchange = given.loss, given.group, given.algorithm, given.exchange
    if loss not in KERNEL_LOSSES:
        raise ValueError(f"loss must be one of {', '.join(KERNEL_LOSSES)} or a function; got {loss!r}")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed process group that this rank is in, or None; got {group!r}")
    if not isinstance(given.clip, (tuple, list)) or len(given.clip) != 2:
        raise TypeError(f"clip must be two numbers, how far the ratio may fall below 1 and rise above: {given.clip!r}")
    for option in fields(Options):
        if option.metadata:
            _option(option.name, getattr(given, option.name), option.default, given, **option.metadata)
    if (cap := given.block_cap) != "auto" and cap & (cap - 1):
        raise ValueError(f"block_cap must be 'auto' or a power of two, got {cap}")
    if not isinstance(given.temperature, Tensor) and given.logits_scale > LARGEST_SCALE * given.temperature:
        least = given.logits_scale / LARGEST_SCALE
        raise ValueError(f"temperature must be at least {least:g}, 1e-6 * logits_scale; got {given.temperature}")
    if loss == "jsd" and given.beta >= 1.0:
        raise ValueError(f"beta must be less than 1 for loss='jsd', which is 0 for beta=0 and beta=1: {given.beta}")
    several = group is not None and group.size() > 1
    if algorithm == "two_reads" and (several or loss in COMPARING_LOSSES):
        raise ValueError(
            "algorithm='two_reads' makes loss and gradient in one kernel, on one rank, and not for loss='jsd' or "
            "'total_variation': use 'two_kernels', 'one_read' or 'auto'"
        )
    if given.objective is not None and algorithm not in ("auto", "two_kernels"):
        raise ValueError(f"loss={given.objective} needs algorithm='two_kernels' or 'auto', got {algorithm!r}")
    if given.objective is not None and exchange == "symmetric":
        raise ValueError(f"loss={given.objective} has no exchange='symmetric': use 'yielding', 'nccl' or 'auto'")
    needed = {"two_kernels": ("nccl",), "one_read": ("symmetric", "yielding")}.get(algorithm)
    if several and needed and exchange not in ("auto", *needed):
        raise ValueError(f"algorithm={algorithm!r} over ranks is exchange={needed[0]!r}, got exchange={exchange!r}")


def _option(
    name: str, value: Any, default: Any, given: Options, role: str, losses: Sequence[str],
    choices: Sequence[object] = (), **limits: Any,
) -> None:  # fmt: skip
    """Raise unless an option fits its declaration (see `row_loss.declare`)."""
    if isinstance(value, Tensor):
        if given.loss not in ("logprob", "policy"):
            raise TypeError(f"{name} must be a number for loss={given.loss!r}; it is a tensor for those of log p")
        return
    if choices:
        choice(name, value, *choices)
    elif value != "auto" and (value is not None or default is not None):
        for each in value if isinstance(default, tuple) else (value,):
            number(name, each, **limits)
    if given.loss not in losses and (tuple(value) if isinstance(default, tuple) else value) != default:
        raise ValueError(f"{name} {role}: it must be {default} for loss={given.objective or given.loss!r}, got {value}")


def tensor(
    name: str, value: Any, shape: Sequence[int | str], dtypes: tuple[torch.dtype, ...] = FLOATS,
    device: torch.device | None = None, why: str = "",
) -> None:  # fmt: skip
    """Raise unless `value` is a tensor of this shape, in which a name stands for any size, dtype and device.

    It must have memory of its own. why: follows the dtypes in an error.
    """
    memory(name, value)
    fits = [isinstance(wanted, str) or wanted == size for wanted, size in zip(shape, value.shape, strict=False)]
    if value.dim() != len(shape) or not all(fits):
        wanted_shape = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{name} must have shape ({wanted_shape}), got {tuple(value.shape)}")
    if value.dtype not in dtypes:
        names = [str(dtype).removeprefix("torch.") for dtype in (*dtypes, value.dtype)]
        wanted_dtype = " or ".join(filter(None, [", ".join(names[:-2]), names[-2]]))
        raise TypeError(f"{name} must be {wanted_dtype}{why}, got {names[-1]}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be on {device}, got {value.device}")
    if value.is_neg():
        raise ValueError(f"{name} must not be a negative view, as of a conjugate: call resolve_neg() on it")


def first_derivative() -> None:
    """Raise if this backward is to be differentiated: autograd would take its results for constants."""
    if torch.is_grad_enabled():
        raise NotImplementedError("this loss has no second derivatives, which create_graph=True asks for")


def is_traced() -> bool:
    """Return true under torch.jit.trace and make_fx, which would record the results of kernels as constants."""
    proxy = torch._C._TorchDispatchModeKey.PROXY  # type: ignore[attr-defined]
    return torch._C._get_tracing_state() is not None or torch._C._get_dispatch_mode(proxy) is not None


def memory(name: str, value: Any) -> None:
    """Raise unless `value` is a tensor whose memory kernels can read, and that has no forward-mode derivative."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if is_traced():
        raise TypeError(f"{name} must not be traced: torch.jit.trace and make_fx cannot record the loss's kernels")
    if hasattr(value, "to_local"):
        raise TypeError(f"{name} must be this rank's tensor, got a DTensor: pass {name}.to_local()")
    if value.layout != torch.strided or value.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got {'a nested one' if value.is_nested else value.layout}")
    try:
        has_memory = not hasattr(value, "fake_mode") and (value.is_meta or not value.numel() or value.data_ptr() != 0)
    except RuntimeError:  # a tensor of torch.func
        has_memory = False
    if not has_memory:
        waiting = f": pass {name}.clone()" if hasattr(value, "trigger_wait") else ""
        raise TypeError(
            f"{name} must have memory of its own, got {type(value).__name__}{waiting}. Tensors of torch.func and "
            "parameters that FSDP has freed, outside of their module's forward, have none"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None:  # type: ignore[no-untyped-call]
        raise NotImplementedError(f"{name} has a tangent, but the losses have no forward-mode derivatives")


def _target(value: Any, given: Options, rows: int, columns: int, device: torch.device) -> None:
    """Raise unless `value` is labels (rows,) for a loss of labels, else target logits or a top k."""
    if isinstance(value, TopK):
        if given.loss not in TOP_LOSSES:
            raise ValueError(f"target may be a TopK for {', '.join(TOP_LOSSES)} only, not for loss={given.loss!r}")
        if value.tail == "bucket" and given.temperature != 1.0:
            raise ValueError("temperature must be 1 for a target with tail='bucket', which has log-probabilities")
        choice("target.tail", value.tail, "drop", "bucket")
        tensor("target.values", value.values, (rows, "k"), FLOATS, device)
        tensor("target.indices", value.indices, value.values.shape, (torch.int32, torch.int64), device)
        if not 1 <= value.values.shape[1] <= MAX_TOP_K:
            raise ValueError(f"target must have 1 to {MAX_TOP_K} columns of each row, got {value.values.shape[1]}")
    elif given.loss in LABEL_LOSSES:
        tensor("target", value, (rows,), (torch.int32, torch.int64), device, f", the labels of loss={given.loss!r}")
    else:
        tensor("target", value, (rows, columns), FLOATS, device)


def rows(given: Options, arguments: Mapping[str, Any], rows: int, device: torch.device) -> RowInputs:
    """Return the tensors of rows that kernels receive. Raise unless a call's are valid."""
    shown, temperature = given.objective or given.loss, given.temperature
    inputs = RowInputs(**{name: arguments.get(name) for name in RowInputs._fields if name != "row_temperature"})
    inputs = inputs._replace(row_temperature=temperature if isinstance(temperature, Tensor) else None)
    for name, value in inputs._asdict().items():
        name = "temperature" if name == "row_temperature" else name
        if value is not None:
            tensor(name, value, (rows,), (torch.float32,), device)
            if not value.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got stride {value.stride()}")
        if value is not None and name in POLICY_TENSORS and given.loss != "policy":
            where = "" if given.objective is None else ". A function gets its tensors of rows by row_inputs"
            raise ValueError(f"{name} belongs to loss='policy': it must be None for loss={shown!r}{where}")
        needed = name in ("old_logprobs", "advantages") or (name == "ref_logprobs" and given.kl_weight)
        if value is None and needed and given.loss == "policy":
            raise TypeError(f"{name} must be a tensor for loss='policy'{' with kl_weight' * (name[0] == 'r')}")
    if inputs.entropy_grad is not None and not (given.entropy or given.entropy_weight):
        raise ValueError("entropy_grad needs entropy=True")
    divisor = arguments["divisor"]
    if divisor is not None and given.reduction != "sum":
        raise ValueError(f"divisor divides a sum: it needs reduction='sum', got {given.reduction!r}")
    if isinstance(divisor, Tensor):
        tensor("divisor", divisor, (), (*FLOATS, torch.float64, torch.int32, torch.int64), device)
    elif divisor is not None:
        number("divisor", divisor, open_low=True)
    for name in ("row_inputs", "sequence_lengths", "columns"):
        if arguments[name] is not None and given.objective is None:
            raise ValueError(f"{name} must be None for loss={given.loss!r}: it is for a function as the loss")
    return inputs


def _runnable(name: str, value: Tensor) -> None:
    """Raise unless the kernels can run on the tensor's device."""
    if value.device.type != "cuda" and not (INTERPRETED and value.device.type == "cpu"):
        raise RuntimeError(
            f"{name} must be on a CUDA device, got {value.device}; on a CPU the kernels run in Triton's interpreter "
            "only: set TRITON_INTERPRET=1 before triton is imported"
        )


def _writable(name: str, value: Tensor) -> None:
    """ValueError if elements share memory, as those of an expanded tensor: programs that write them would race."""
    if torch._debug_has_internal_overlap(value) == 1:  # type: ignore[attr-defined]
        raise ValueError(f"{name} must not overlap itself: shape {tuple(value.shape)}, strides {value.stride()}")


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Return true if tensors start at one address or, if contiguous, overlap. Those with gaps may be halves of one."""
    start_a, start_b = a.data_ptr(), b.data_ptr()
    if not (a.is_contiguous() and b.is_contiguous()):
        return a.numel() > 0 and start_a == start_b
    return a.numel() > 0 and start_a < start_b + b.nbytes and start_b < start_a + a.nbytes


def entropy_tensors(logits: Any, target: Any, given: Options, grad: Any) -> None:
    """Raise unless the tensors of `entropy_loss` are valid and fit together."""
    tensor("logits", logits, ("rows", "local vocab"))
    _target(target, given, logits.shape[0], logits.shape[1], logits.device)
    _runnable("logits", logits)
    if isinstance(grad, Tensor):
        tensor("grad", grad, logits.shape, FLOATS, logits.device)
        _writable("grad", grad)
        if _share_memory(grad, logits):
            raise ValueError("grad must not share the logits' memory; to write over the logits say grad='in_place'")
        overwritten("grad", grad, target)
    else:
        choice("grad", grad, "new", "in_place", "none")
        if grad == "in_place":
            _writable("logits", logits)
            overwritten("logits", logits, target)


def overwritten(name: str, written: Tensor, target: Tensor | TopK) -> None:
    """ValueError if the target shares memory with what is written over. The same tensor may: reads come first."""
    for read in target[:2] if isinstance(target, TopK) else (target,):
        if _share_memory(written, read) and not written.is_set_to(read):
            raise ValueError(f"target must not share memory with {name}, which are written over, unless it is the same")


def linear_tensors(
    hidden: Any, weight: Any, target: Any, given: Options, bias: Any, weight_grad: Any, grad: Any, shards: int
) -> None:
    """Raise unless the tensors of `linear_entropy_loss` are valid. shards: ranks that share the rows of `hidden`."""
    if not isinstance(grad, bool) and not (isinstance(grad, (tuple, list)) and set(grad) <= set(LINEAR_INPUTS)):
        raise ValueError(f"grad must be true, false, or a tuple of names from {', '.join(LINEAR_INPUTS)}; got {grad!r}")
    tensor("hidden", hidden, ("rows", "h"))
    rows, device = len(hidden) * shards, hidden.device
    tensor("weight", weight, ("local vocab", hidden.shape[1]), (hidden.dtype,), device)
    if bias is not None:
        tensor("bias", bias, (len(weight),), (weight.dtype,), device)
    if given.loss not in LABEL_LOSSES and isinstance(target, (tuple, list)) and not isinstance(target, TopK):
        if len(target) != 2:
            raise ValueError(f"target must be (teacher_hidden, teacher_weight) or logits, got {len(target)} values")
        tensor("teacher_hidden", target[0], (len(hidden), "h"), FLOATS, device)
        tensor("teacher_weight", target[1], (len(weight), target[0].shape[1]), (target[0].dtype,), device)
    else:
        _target(target, given, rows, len(weight), device)
    if weight_grad is not None:
        tensor("weight_grad", weight_grad, weight.shape, tuple({weight.dtype, torch.float32}), device)
        _writable("weight_grad", weight_grad)
        if not isinstance(grad, bool) and "weight" not in grad:
            raise ValueError(f"weight_grad needs the weight's gradient, got grad={grad!r}")
    _runnable("hidden", hidden)
