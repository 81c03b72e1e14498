"""`EntropyLoss` in the graphs of torch.compile: an operator, the shapes of its results, and its derivative.

The operator calls the module, so a graph has the same bits as uncompiled code. Forward computes the gradient, and
backward scales it where it lies. An operator of a graph may not return a tensor that it received, and a copy would cost
as much time as the loss. So the first operator returns a *token* in place of the gradient: a tensor without elements
that owns the gradient's memory. The second operator takes the memory out of the token. No other operator can read or
write that memory meanwhile, and it is freed with the token.
"""

import functools
import itertools
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from tpbench.kernels import checks
from tpbench.kernels.row_loss import TopK
from tpbench.kernels.two_pass.launch import scale_rows

_numbers = itertools.count()


def text_of(settings: dict[str, Any]) -> str:
    """Return the settings of a new module as a text, with the name of the process group.

    Each module has a number, because a first call is collective: modules that are equal on one rank may differ on
    another, and there the second one has a first call, too.
    """
    group = settings.get("group")
    return json.dumps({**settings, "number": next(_numbers), "group": None if group is None else group.group_name})


@functools.lru_cache(maxsize=256)
def _module(settings: str) -> Any:
    """Return the module of graphs with these settings."""
    given: dict[str, Any] = json.loads(settings)
    del given["number"]
    named: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if named["group"] is not None:
        named["group"] = distributed_c10d._resolve_process_group(named["group"])  # type: ignore[attr-defined]
    from tpbench.kernels import EntropyLoss  # late, because its module imports this one

    return EntropyLoss(**named)


def loss_in_graph(settings: str, logits: Tensor, target: Tensor | TopK, rows: dict[str, Tensor], learns: bool) -> Any:
    """Return the loss by the operator. learns: the logits need a gradient."""
    tail = target.tail if isinstance(target, TopK) else ""
    targets = [target.values, target.indices] if isinstance(target, TopK) else [target]
    operator = torch.ops.tpbench.entropy_loss
    return operator(logits, targets, list(rows.values()), ",".join(rows), tail, settings, learns)[0]


# Graphs of torch.compile's mode "reduce-overhead" must not contain these: CUDA graphs keep tensors at fixed addresses.
_operator = functools.partial(torch.library.custom_op, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))


@_operator("tpbench::entropy_loss")
def _entropy_loss(
    logits: Tensor, targets: Sequence[Tensor], rows: Sequence[Tensor], names: str, tail: str, settings: str,
    learns: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the loss, and a token of the gradient if one is needed. names: of the tensors in `rows`."""
    values, *indices = targets
    target = TopK(values, *indices, tail=tail) if indices else values  # type: ignore[arg-type, misc]
    named = dict(zip(names.split(","), rows, strict=True)) if rows else {}
    with torch.no_grad():
        result = _module(settings).call_of(logits, target, named, learns)(logits, target, named)
    return result.loss, logits.new_empty(0) if result.grad is None else result.grad.view(-1)[:0]


@_entropy_loss.register_fake
def _(
    logits: Tensor, targets: Any, rows: Any, names: str, tail: str, settings: str, learns: bool
) -> tuple[Tensor, Tensor]:
    shape = logits.shape[:1] if json.loads(settings).get("reduction") == "none" else ()
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(0)


@_operator("tpbench::entropy_loss_gradient")
def _entropy_loss_gradient(token: Tensor, upstream: Tensor, rows: int, columns: int, settings: str) -> Tensor:
    """Return the gradient of a token, (rows, columns), times the upstream gradient."""
    gradient = token.new_empty(0).set_(token.untyped_storage(), 0, (rows, columns), (columns, 1))
    token.set_()  # type: ignore[call-overload]
    scale_rows(gradient, upstream, _module(settings).options.stored_scale(rows, gradient.dtype))
    return gradient


@_entropy_loss_gradient.register_fake
def _(token: Tensor, upstream: Tensor, rows: int, columns: int, settings: str) -> Tensor:
    return token.new_empty((rows, columns))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    logits, targets, rows, *_, settings, _learns = inputs
    ctx.shape, ctx.settings, ctx.lists = logits.shape, settings, (len(targets), len(rows))


def _backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Any, ...]:
    checks.first_derivative()
    (token,) = ctx.saved_tensors
    gradient = torch.ops.tpbench.entropy_loss_gradient(token, upstream, *ctx.shape, ctx.settings)
    return gradient, *([None] * length for length in ctx.lists), *[None] * 4


_entropy_loss.register_autograd(_backward, setup_context=_save)
