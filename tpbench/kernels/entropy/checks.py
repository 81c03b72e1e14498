"""Checks of the arguments of `entropy_loss` and `linear_entropy_loss`. Errors name the argument and what is valid."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.kernels.losses import LABEL_LOSSES

REDUCTIONS = ("mean", "sum", "none")
GRADS = ("new", "in_place", "none")
EXCHANGES = ("auto", "nccl", "symmetric")
ALGORITHMS = ("auto", "two_reads", "two_kernels", "one_read")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_BLOCK = 65536
MAX_COLUMNS = 2**31 - 1
"""Columns are int32 in the kernels."""
FP32_MAX = torch.finfo(torch.float32).max


def choice(name: str, value: object, valid: tuple[str, ...]) -> None:
    """ValueError unless `value` is one of `valid`."""
    if not (isinstance(value, str) and value in valid):
        raise ValueError(f"{name} must be one of {', '.join(valid)}; got {value!r}")


def number(name: str, value: object, *, low: float = 0.0, positive: bool = False, high: float = math.inf) -> None:
    """TypeError unless a plain number; ValueError unless finite in fp32, >= `low` (`positive`: > 0) and <= `high`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not -FP32_MAX <= value <= FP32_MAX or value < low or value > high or (positive and value == 0):
        limits = " and greater than 0" if positive else f" and at least {low:g}" if low > -math.inf else ""
        limits += "" if high == math.inf else f" and at most {high:g}"
        raise ValueError(f"{name} must be finite in float32{limits}; got {value}")


def whole(name: str, value: object, low: int = -(2**63), high: int = 2**63 - 1) -> None:
    """TypeError unless an int; ValueError below `low` and above `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    if value > high:
        raise ValueError(f"{name} must be at most {high}, got {value}")


def tensor(name: str, value: object) -> Tensor:
    """Return `value`. TypeError unless it is a tensor with memory of its own, unlike a DTensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if hasattr(value, "to_local"):
        raise TypeError(f"{name} must be this rank's tensor, got a DTensor: pass {name}.to_local()")
    return value


def matrix(name: str, value: object) -> None:
    """Raise unless `value` is a dense (rows, columns) tensor of a supported dtype, and not a negative view."""
    value = tensor(name, value)
    if value.dim() != 2:
        raise ValueError(f"{name} must have shape (rows, local vocab), got {tuple(value.shape)}")
    if value.dtype not in DTYPES:
        raise TypeError(f"{name} must be bfloat16, float16 or float32, got {value.dtype}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {value.layout}")
    if value.is_neg():
        raise ValueError(f"{name} must not be a negative view, as of a conjugate: call resolve_neg() on it")


def like(name: str, value: Tensor, logits: Tensor) -> None:
    """ValueError unless `value` has the shape and the device of the logits."""
    if value.shape != logits.shape:
        raise ValueError(f"{name} must have the logits' shape {tuple(logits.shape)}, got {tuple(value.shape)}")
    if value.device != logits.device:
        raise ValueError(f"{name} must be on the logits' device {logits.device}, got {value.device}")


def target(value: Any, logits: Tensor, loss: str) -> None:
    """Raise unless `value` is labels (rows,) for a loss of labels, else target logits like the logits."""
    if loss in LABEL_LOSSES:
        labels(value, logits.shape[0], logits.device, loss)
        return
    matrix("target", value)
    like("target", value, logits)


def labels(value: Any, rows: int, device: torch.device, loss: str) -> None:
    """Raise unless `value` is int32 or int64 labels of so many rows on the device."""
    value = tensor("target", value)
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"target must hold labels, int32 or int64, for loss={loss!r}; got {value.dtype}")
    if value.shape != (rows,):
        raise ValueError(f"target must have shape ({rows},), a label a row; got {tuple(value.shape)}")
    if value.device != device:
        raise ValueError(f"target must be on the logits' device {device}, got {value.device}")


def loss_options(
    loss: str, logits_scale: Any, temperature: Any, label_smoothing: Any, z_loss: Any, softcap: Any, entropy: Any,
    grad_scale: Any,
) -> None:  # fmt: skip
    """Raise unless the options of a row's loss are valid and fit together."""
    for name, value in (("logits_scale", logits_scale), ("temperature", temperature)):
        number(name, value, positive=True)
    number("label_smoothing", label_smoothing, high=1.0)
    number("z_loss", z_loss)
    number("grad_scale", grad_scale, low=-math.inf)
    if softcap is not None:
        number("softcap", softcap, positive=True)
    if not isinstance(entropy, bool):
        raise TypeError(f"entropy must be a bool, got {type(entropy).__name__}")
    if not logits_scale / temperature <= FP32_MAX:
        raise ValueError(f"temperature must leave logits_scale / temperature finite in float32, got {temperature}")
    if loss == "cross_entropy" and temperature != 1.0:
        raise ValueError(f"temperature softens target logits: it must be 1 for loss='cross_entropy', got {temperature}")
    if loss != "cross_entropy" and label_smoothing:
        raise ValueError(f"label_smoothing smooths labels: it must be 0 for loss={loss!r}, got {label_smoothing}")
    if loss == "logprob" and z_loss:
        raise ValueError(f"z_loss is a term of a loss: it must be 0 for loss='logprob', got {z_loss}")


def row_gradients(row_grad: Any, entropy_grad: Any, rows: int, device: torch.device, entropy: bool) -> None:
    """Raise unless each is None or a contiguous (rows,) fp32 tensor."""
    for name, value in (("row_grad", row_grad), ("entropy_grad", entropy_grad)):
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
        if value.shape != (rows,) or value.dtype != torch.float32 or not value.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous and float32 of shape ({rows},), a number a row; "
                f"got {value.dtype} of shape {tuple(value.shape)}"
            )
        if value.device != device:
            raise ValueError(f"{name} must be on the logits' device {device}, got {value.device}")
    if entropy_grad is not None and not entropy:
        raise ValueError("entropy_grad needs entropy=True")


def call_options(
    group_: Any, vocab_start: Any, vocab_size: Any, reduction: Any, ignore_index: Any, block_cap_: Any, exchange: Any
) -> None:
    """Raise unless the options that concern no tensor are valid."""
    choice("reduction", reduction, REDUCTIONS)
    choice("exchange", exchange, EXCHANGES)
    group(group_)
    whole("ignore_index", ignore_index)
    block_cap(block_cap_)
    if vocab_start is not None:
        whole("vocab_start", vocab_start, 0, MAX_COLUMNS)
    if vocab_size is not None:
        whole("vocab_size", vocab_size, 1, MAX_COLUMNS)


def runnable(name: str, value: Tensor, interpreted: bool) -> None:
    """Raise unless the kernels can run on the tensor's device."""
    if value.device.type not in ("cuda", "cpu"):
        raise ValueError(f"{name} must be on a CUDA device, or on a CPU in Triton's interpreter; got {value.device}")
    if not interpreted and value.device.type != "cuda":
        raise RuntimeError(
            f"{name} must be on a CUDA device, got {value.device}; on a CPU the kernels run in Triton's interpreter "
            "only: set TRITON_INTERPRET=1 before triton is imported"
        )


def writable(name: str, value: Tensor) -> None:
    """ValueError if two elements share memory: programs that write them would race."""
    reach = 0
    for stride, size in sorted(
        (stride, size) for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1
    ):
        if stride <= reach:
            raise ValueError(f"{name} must not overlap itself: shape {tuple(value.shape)}, strides {value.stride()}")
        reach += (size - 1) * stride


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Return true if the tensors start at the same address or, if both are contiguous, overlap.

    Tensors with gaps may be separate parts of one tensor, for example halves of its columns.
    """
    start_a, start_b = a.data_ptr(), b.data_ptr()
    if not a.numel() or start_a == start_b:
        return bool(a.numel())
    if not (a.is_contiguous() and b.is_contiguous()):
        return False
    return start_a < start_b + b.numel() * b.itemsize and start_b < start_a + a.numel() * a.itemsize


def gradient(grad: Any, logits: Tensor, target: Tensor) -> None:
    """Raise unless `grad` is one of GRADS, or a tensor like the logits to accumulate into.

    The overwritten tensor may be the target itself, since each element is read before it is written. It may not be a
    shifted view of the target.
    """
    if isinstance(grad, Tensor):
        matrix("grad", grad)
        like("grad", grad, logits)
        writable("grad", grad)
        if _share_memory(grad, logits):
            raise ValueError("grad must not share the logits' memory; to write over the logits say grad='in_place'")
    elif not (isinstance(grad, str) and grad in GRADS):
        raise ValueError(f"grad must be one of {', '.join(GRADS)}, or a tensor to accumulate into; got {grad!r}")
    elif grad == "in_place":
        writable("logits", logits)
    written = grad if isinstance(grad, Tensor) else logits if grad == "in_place" else None
    if written is not None and _share_memory(written, target):
        if (written.data_ptr(), written.stride(), written.dtype) != (target.data_ptr(), target.stride(), target.dtype):
            name = "grad" if isinstance(grad, Tensor) else "logits"
            raise ValueError(f"target must not share memory with {name}, which are written over, unless it is the same")


def block_cap(value: Any) -> None:
    """Raise unless `value` is 'auto' or a power of two within the limits."""
    if value == "auto":
        return
    whole("block_cap", value)
    if not 16 <= value <= MAX_BLOCK or value & (value - 1):
        raise ValueError(f"block_cap must be 'auto' or a power of two from 16 to {MAX_BLOCK}, got {value}")


def algorithm(value: object, exchange: str, world_size: int) -> None:
    """ValueError unless `value` is a known algorithm that can use the exchange over so many ranks."""
    choice("algorithm", value, ALGORITHMS)
    if world_size == 1:
        return
    if value == "two_reads":
        raise ValueError(
            "algorithm='two_reads' makes loss and gradient in one kernel, on one rank: over ranks the exchange lies "
            "between them; use 'two_kernels', 'one_read' or 'auto'"
        )
    needed = {"two_kernels": "nccl", "one_read": "symmetric"}.get(str(value), exchange)
    if exchange not in ("auto", needed):
        raise ValueError(f"algorithm={value!r} over ranks is exchange={needed!r}, got exchange={exchange!r}")


def group(value: Any) -> None:
    """TypeError unless `value` is None or a process group that this rank is in."""
    if value is not None and not isinstance(value, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed process group that this rank is in, or None; got {value!r}")


def linear_tensors(hidden: Any, weight: Any, target: Any, loss: str, bias: Any, rows_per_hidden: int) -> None:
    """Raise unless the inputs fit together. rows_per_hidden: ranks that share the rows of the hidden states."""
    _factor("hidden", hidden, "(rows, h)")
    _factor("weight", weight, "(local vocab, h)")
    _product("hidden", hidden, "weight", weight)
    rows = len(hidden) * rows_per_hidden
    if bias is not None:
        _factor("bias", bias, "(local vocab,)", dimensions=1)
        if bias.shape != weight.shape[:1] or bias.dtype != weight.dtype or bias.device != weight.device:
            raise ValueError(
                f"bias must be {weight.dtype} of shape ({len(weight)},) on {weight.device}, like the weight; "
                f"got {bias.dtype} of shape {tuple(bias.shape)} on {bias.device}"
            )
    if loss in LABEL_LOSSES:
        labels(target, rows, hidden.device, loss)
    elif isinstance(target, (tuple, list)):
        if len(target) != 2:
            raise ValueError(f"target must be (teacher_hidden, teacher_weight) or logits, got {len(target)} values")
        _factor("teacher_hidden", target[0], "(rows, teacher's h)")
        _factor("teacher_weight", target[1], "(local vocab, teacher's h)")
        _product("teacher_hidden", target[0], "teacher_weight", target[1])
        if len(target[0]) != len(hidden) or len(target[1]) != len(weight):
            raise ValueError(
                f"teacher_hidden must have {len(hidden)} rows and teacher_weight {len(weight)}, like hidden and weight;"
                f" got {len(target[0])} and {len(target[1])}"
            )
        if target[0].device != hidden.device:
            raise ValueError(f"teacher_hidden must be on the device {hidden.device}, got {target[0].device}")
    else:
        matrix("target", target)
        if target.shape != (rows, len(weight)):
            raise ValueError(f"target must have shape ({rows}, {len(weight)}), got {tuple(target.shape)}")
        if target.device != hidden.device:
            raise ValueError(f"target must be on the device {hidden.device}, got {target.device}")


def weight_gradient(value: Any, weight: Tensor) -> None:
    """Raise unless `value` is None, or a tensor like the weight, in its dtype or fp32, to add to."""
    if value is None:
        return
    _factor("weight_grad", value, "(local vocab, h)")
    writable("weight_grad", value)
    if value.shape != weight.shape or value.device != weight.device:
        raise ValueError(
            f"weight_grad must have the weight's shape {tuple(weight.shape)} and device {weight.device}; "
            f"got {tuple(value.shape)} on {value.device}"
        )
    if value.dtype not in (weight.dtype, torch.float32):
        raise TypeError(f"weight_grad must be {weight.dtype}, like the weight, or float32; got {value.dtype}")


def _factor(name: str, value: Any, shape: str, dimensions: int = 2) -> None:
    value = tensor(name, value)
    if value.dim() != dimensions:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(value.shape)}")
    if value.dtype not in DTYPES:
        raise TypeError(f"{name} must be bfloat16, float16 or float32, got {value.dtype}")


def _product(name: str, left: Tensor, other: str, right: Tensor) -> None:
    if left.shape[1] != right.shape[1] or left.shape[1] == 0:
        raise ValueError(f"{name} and {other} must have the same width h > 0, got {left.shape[1]} and {right.shape[1]}")
    if left.dtype != right.dtype:
        raise TypeError(f"{name} and {other} must have the same dtype, got {left.dtype} and {right.dtype}")
    if left.device != right.device:
        raise ValueError(f"{name} and {other} must be on one device, got {left.device} and {right.device}")
