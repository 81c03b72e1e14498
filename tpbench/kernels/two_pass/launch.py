"""Host code of the two-pass kernels: their blocks, their launches, and the kernels over rows beside them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from tpbench.kernels import COMPARING_LOSSES
from tpbench.kernels.block_caps import measured_cap
from tpbench.kernels.cached_launch import INTERPRETED, Form, cached_launch, form, launching
from tpbench.kernels.columns import RowColumns
from tpbench.kernels.distributed import gather_by_rank
from tpbench.kernels.kernel_arguments import RowInputs, RowOutputs, Shard, Strides
from tpbench.kernels.row_loss import KernelTarget, LaunchRecord, RowLoss, Rows, labels_of
from tpbench.kernels.row_terms import numbers_in_state
from tpbench.kernels.two_pass import kernels
from tpbench.kernels.two_pass.blocks import TwoPassSpec

_INTERPRETED_TILE = 2**20
"""Elements of a tile in the interpreter, the most that Triton allows: the cost is per operation, not per element."""
_INTERPRETED_CAP = 16384
_REDUCE_BLOCK = 4096
_SCALE_BLOCK = 4096
_SCALE_PROGRAMS = 512
"""Few and small programs start and end quickly where the factor is 1."""


def column_block(
    columns: int, cap: int | Literal["auto"] = "auto", loss: str = "cross_entropy", algorithm: str = "two_kernels",
    share: int | None = None,
) -> int:  # fmt: skip
    """Return the column block of these kernels for `columns` local columns: a power of two, at most the cap.

    share: columns per rank if the vocabulary is split evenly; "auto" chooses by it (default: `columns`).
    """
    if cap == "auto":
        cap = _INTERPRETED_CAP if INTERPRETED else measured_cap(algorithm, loss, share or columns)
    return max(16, min(cap, int(triton.next_power_of_2(columns))))


class Plan:
    """The kernels of a call and their numbers, also for later calls with tensors of the same forms."""

    def __init__(self, loss: RowLoss, logits: Tensor, target: KernelTarget, rows: Rows) -> None:
        n_rows, columns = logits.shape
        vocabulary, ranks = loss.vocabulary, loss.vocabulary.world_size
        self.algorithm = loss.two_pass_algorithm
        self.block = column_block(columns, loss.block_cap, loss.formula, self.algorithm, vocabulary.share)
        tile_rows, options = tile(n_rows, self.block, loss.top[1])
        of_target = target.stride() if isinstance(target, Tensor) and target.dim() == 2 else (0, 0)
        of_grad = (0, 0) if rows.grad is None else rows.grad.stride()
        # Strides of the gradient would only specialise the kernels that don't store it.
        strides, of_gradient = (Strides._make((*logits.stride(), *of_target, *of)) for of in ((0, 0), of_grad))
        shard = Shard(vocabulary.valid, vocabulary.start, vocabulary.size, loss.ignore_index)
        scales = loss.scales(rows.mean if rows.objective is None else 1.0)
        constants = loss.constants(rows.outputs.entropy is not None)
        # A thread reduces its columns of a tile alone, so few threads with many columns each merge less: on an H200
        # statistics with entropies take 0.263 ms with half of the warps, and 0.311 with all.
        reading = options
        if self.algorithm == "two_kernels":
            reading = {name: max(4, warps // 2) for name, warps in options.items()}
        threads = 2 if INTERPRETED else 32 * reading["num_warps"]
        vector = 16 // logits.element_size() if form(logits).aligned else 1
        spec = TwoPassSpec(
            **constants, ROWS=tile_rows, BLOCK=self.block, VECTOR=vector,
            LANES=min(threads, self.block // vector),
            WIDE=is_wide(columns, self.block, logits.stride(), of_target, of_grad),
            TEMPERATURES=rows.inputs.row_temperature is not None,
        )  # fmt: skip
        self.width = numbers_in_state(spec)

        def bound(kernel: Any, *integers: Any, **constants: Any) -> Callable[..., Any]:
            return cached_launch(kernel, **constants, **options).bound(-(-n_rows // tile_rows), integers, scales)

        states = cached_launch(kernels.statistics_kernel, SPEC=spec, **reading)
        self.states = states.bound(-(-n_rows // tile_rows), (n_rows, strides, shard), scales)
        if loss.loss in COMPARING_LOSSES:
            self.mixture = bound(kernels.mixture_kernel, n_rows, ranks, strides, shard, WIDTH=self.width, SPEC=spec)
        self.gradient = bound(
            kernels.loss_and_gradient_kernel, n_rows, columns, ranks, of_gradient, shard, WIDTH=self.width,
            SPEC=replace(spec, ACCUMULATE=rows.accumulate),
        )  # fmt: skip
        # No argument of this kernel differs between ranks: the shard's columns don't matter here.
        block = max(1, (_INTERPRETED_TILE // 256 if INTERPRETED else 128) // max(1, loss.top[1] // 16))
        losses = cached_launch(kernels.row_loss_kernel, WIDTH=self.width, SPEC=TwoPassSpec(**constants, ROWS=block))
        integers = n_rows, ranks, Shard(0, 0, vocabulary.size, loss.ignore_index)
        self.losses = losses.bound(-(-n_rows // block), integers, loss.scales(rows.mean))


def launch(loss: RowLoss, logits: Tensor, target: KernelTarget, rows: Rows, plan: Plan | None = None) -> LaunchRecord:
    """Queue the kernels for rows of logits on the current stream. plan: of an earlier call of the same form."""
    n_rows, world_size = len(logits), loss.vocabulary.world_size
    grad, inverse_count, objective = rows.grad, rows.inverse_count, rows.objective
    if rows.count and inverse_count is None:
        inverse_count = inverse_row_count(labels_of(target), rows.inputs.row_weight, loss)
    if objective is not None:
        target = target.masked_fill(objective.ignored, -1)  # type: ignore[union-attr]
    plan = plan or Plan(loss, logits, target, rows)
    compiled, gathered, inputs, inverse_of_grad, at = [], None, rows.inputs, inverse_count, None
    if plan.algorithm == "two_kernels":
        statistics = torch.empty((plan.width, n_rows), dtype=torch.float32, device=logits.device)
        compiled.append(plan.states(logits, target, statistics, inputs.row_weight, inputs.row_temperature))
        gathered = gather_by_rank(statistics, loss.group, world_size)
        if loss.loss in COMPARING_LOSSES:
            part = torch.empty((2, n_rows), dtype=torch.float32, device=logits.device)
            compiled.append(plan.mixture(logits, target, gathered, inputs.row_weight, part))
            of_p, of_q = gather_by_rank(part, loss.group, world_size).sum(0)
            inputs = inputs._replace(divergence_p=of_p, divergence_q=of_q)
        plan.losses(target, gathered, inputs, rows.outputs)
        if objective is not None:
            factor, inverse_of_grad = rows.mean if inverse_count is None else inverse_count * rows.mean, None
            if objective.columns is not None:
                labels, given = labels_of(target), objective.columns
                at = RowColumns.of_rows(loss, logits, gathered, inputs.row_temperature, labels, given)
            column_logprobs = None if at is None else at.log_p[:, 1:]
            inputs, factors = objective.run(rows.outputs, inputs, factor, grad is not None, column_logprobs)
    before = grad.gather(1, at.local).float() if at is not None and grad is not None and rows.accumulate else None
    if gathered is None or grad is not None:
        compiled.append(plan.gradient(logits, target, gathered, inverse_of_grad, inputs, rows.outputs, grad))
    if at is not None and grad is not None:
        at.store(grad, before, factors, inputs, rows.outputs.entropy, loss.grad_scale)
    reduced(rows, inverse_count)

    def relaunch(
        logits: Tensor, target: KernelTarget, grad: Tensor | None, inputs: RowInputs, outputs: RowOutputs,
        total: Tensor | None, mean: float = rows.mean, count: bool = rows.count,
    ) -> None:  # fmt: skip
        launch(loss, logits, target, Rows(outputs, inputs, grad, False, total, mean, count), plan)

    others = rows.inverse_count, inputs.row_temperature, objective
    repeats = not rows.accumulate and all(each is None for each in others)
    numbers = plan.width + 2 * (loss.loss in COMPARING_LOSSES)  # of each row, for every other rank
    bytes_sent = (world_size - 1) * n_rows * numbers * 4
    if at is not None:  # an all-reduce
        bytes_sent += 2 * at.log_p.nbytes * (world_size - 1) // world_size
    return LaunchRecord(plan.algorithm, plan.block, bytes_sent, tuple(compiled), relaunch if repeats else None)


def tile(rows: int, block: int, top_block: int = 0) -> tuple[int, dict[str, int]]:
    """Return the rows of a tile of `block` columns, and the options of its launch. top_block: of a teacher's top k."""
    if INTERPRETED:
        return min(int(triton.next_power_of_2(rows)), max(1, _INTERPRETED_TILE // max(block, top_block))), {}
    return 1, {"num_warps": min(32, max(4, block // 512))}


def is_wide(columns: int, block: int, *strides: tuple[int, ...]) -> bool:
    """Return whether column offsets need 64 bits: the end of the last block times the largest column stride."""
    return (columns + block) * max(column for _row, column in strides) >= 2**31


def inverse_row_count(labels: Tensor, row_weight: Tensor | None, loss: RowLoss) -> Tensor:
    """Return 1 / the number of rows whose labels count, or 1 / the sum of their weights, (1,) fp32 on the device."""
    inverse = torch.empty(1, dtype=torch.float32, device=labels.device)
    count = cached_launch(kernels.inverse_count_kernel, BLOCK=_REDUCE_BLOCK, num_warps=8)
    with launching(labels.device):
        count(1, (labels, row_weight, inverse), (labels.shape[0], loss.vocabulary.size, loss.ignore_index))
    return inverse


def reduced(rows: Rows, inverse_count: Tensor | None) -> Tensor:
    """Sum the rows' losses in a fixed order if a total is wanted, and return the loss. inverse_count: a factor."""
    row_loss: Tensor = rows.outputs.loss
    if rows.total is None:
        return row_loss
    if not len(row_loss):
        return rows.total.zero_()
    kernel = cached_launch(kernels.reduce_kernel, BLOCK=_REDUCE_BLOCK, num_warps=8)
    with launching(row_loss.device):
        kernel(1, (row_loss, inverse_count, rows.total), (len(row_loss),), (rows.mean,))
    return rows.total


def scale_rows(grad: Tensor, factor: Tensor, divisor: float = 1.0) -> None:
    """Multiply (rows, columns) by factor / divisor, () or (rows,), in place. Rows with the factor 1 aren't written."""
    factor = (factor if divisor == 1.0 else factor / divisor).contiguous()
    if grad.numel():
        with launching(grad.device):
            _scaling(form(grad), form(factor), grad.device)(grad, factor)


@functools.lru_cache(maxsize=256)
def _scaling(grad: Form, factor: Form, device: torch.device) -> Callable[..., Any]:
    """Return the launch of `scale_kernel` for tensors of these forms on a device."""
    rows, columns = grad.shape
    block = column_block(columns, _INTERPRETED_CAP if INTERPRETED else _SCALE_BLOCK)
    tile_rows, options = tile(rows, block)
    wide, per_row = is_wide(columns, block, grad.strides), len(factor.shape)
    scale = cached_launch(kernels.scale_kernel, PER_ROW=per_row, WIDE=wide, ROWS=tile_rows, BLOCK=block, **options)
    return scale.bound(min(-(-rows // tile_rows), _SCALE_PROGRAMS), (rows, columns, *grad.strides))
