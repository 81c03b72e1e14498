"""Preparation of a call: whether a one-pass kernel can do it, and with which constants and integers."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpbench.kernels.cached_launch import CachedLaunch, cached_launch
from tpbench.kernels.one_pass.parameters import Specialization, Strides
from tpbench.kernels.one_pass.tiling import Tiling, machine, next_power_of_2, tiling


class Form(NamedTuple):
    """The properties of a tensor that decide how a kernel is launched: all but its values and its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    misaligned: int
    """Bytes past a multiple of 16."""


def form(tensor: Tensor) -> Form:
    """Return the `Form` of a tensor."""
    return Form(tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16)


@dataclass(frozen=True)
class Prepared:
    """A call with tensors of certain forms and its options, but without addresses and scales."""

    tiling: Tiling
    kernel: CachedLaunch
    programs: int
    integers: tuple[Any, ...]
    """The kernel's parameters from n_rows to strides."""
    rank: int
    row_words: int
    """Words of a row in a workspace, at least 1."""
    words: int
    """Words that a workspace must have room for. 0: nothing is exchanged."""
    bytes_sent: int
    """Bytes that this rank sends to its peers: a word of 8 bytes for each number and each part of a row."""


@functools.lru_cache(maxsize=256)
def prepare(
    logits: Form, target: Form, out: Form | None, device: int, *, loss: str, logprob: bool, valid: int,
    vocab_start: int, vocab_size: int, ignore_index: int, reduce: bool, count: bool, z_loss: bool,
    label_smoothing: bool, accumulate: bool, block_cap: int | str, share: int, widest: int | None, rank: int,
    world_size: int,
) -> Prepared | str:  # fmt: skip
    """Prepare a call, or return the reason why the one-pass kernels cannot do it.

    Over several ranks the reason depends only on values that are equal on all of them. Results are cached: a call only
    adds its addresses and scales.

    logprob: store log-probabilities of labels, the negative cross-entropies.
    """
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or later"
    if label_smoothing or accumulate:
        return "it has no label_smoothing and accumulates into no tensor"
    if loss != "cross_entropy" and target.dtype != logits.dtype:
        return f"it needs targets of the logits' dtype, got {target.dtype} and {logits.dtype}"
    vectors = aligned(logits, target if loss != "cross_entropy" else None, out)
    if world_size == 1 and not vectors:
        return "its rows must be contiguous and made of whole 16-byte vectors"
    on = machine(device)
    rows, columns = logits.shape
    plan = tiling(rows, columns, share, world_size, logits.dtype.itemsize, loss, block_cap, vectors, on, widest)
    if isinstance(plan, str):
        return plan
    unit = plan.vector
    numbers = 3 if loss == "cross_entropy" else 5  # of a row's state
    slots = next_power_of_2(world_size) * plan.slots
    walkers = min(max(1, on.processors * plan.programs_per_sm // plan.parts), -(-rows // plan.rows))
    full = columns == plan.parts * plan.tiles * plan.columns
    of_target = target.strides if loss != "cross_entropy" else (0, 0)
    of_grad = logits.strides if out is None else out.strides
    constants = Specialization(
        LOSS=loss, LOGPROB=logprob, GRAD=out is not None, REDUCE=reduce, COUNT=count, Z_LOSS=z_loss, ROWS=plan.rows,
        REPEATS=plan.repeats, LANES=plan.lanes, VECTOR=plan.vector, ROW_WARPS=plan.row_warps, WARPS=plan.warps,
        TILES=plan.tiles, WORLD=world_size, SLOTS=plan.slots, FULL=full, MASKED=not full or valid < columns,
        ALIGNED=plan.vector > 1, AHEAD=plan.ahead, WHOLE=plan.whole,
    )  # fmt: skip
    kernel = cached_launch(
        _kernel(plan.whole), SPEC=constants, num_warps=plan.warps, enable_fp_fusion=False,
        launch_cooperative_grid=plan.slots > 0,
        **({"maxnreg": plan.registers} if plan.programs_per_sm > 1 else {}),
    )  # fmt: skip
    return Prepared(
        tiling=plan,
        kernel=kernel,
        programs=walkers * plan.parts,
        integers=(
            rows, columns, plan.parts, plan.part_columns // unit, valid, vocab_start, vocab_size, ignore_index,
            Strides(
                logits.strides[0] // unit, logits.strides[1], of_target[0] // unit, of_target[1], of_grad[0] // unit,
                of_grad[1],
            ),
        ),
        rank=rank,
        row_words=numbers * max(1, slots),
        words=numbers * rows * slots,
        bytes_sent=(world_size - 1) * rows * numbers * plan.slots * 8,
    )  # fmt: skip


def _kernel(whole: bool) -> Any:
    # Imported on first use: kernels in Gluon are not needed in Triton's interpreter.
    if whole:
        return importlib.import_module("tpbench.kernels.one_pass.whole_row_kernel").whole_row_kernel
    return importlib.import_module("tpbench.kernels.one_pass.kernel").one_pass_kernel


def aligned(*tensors: Form | None) -> bool:
    """Return whether all rows are contiguous, consist of whole 16-byte vectors, and start at multiples of 16 bytes."""
    return all(
        each is None
        or (
            each.strides[1] == 1
            and each.shape[1] * each.dtype.itemsize % 16 == 0
            and each.strides[0] * each.dtype.itemsize % 16 == 0
            and each.misaligned == 0
        )
        for each in tensors
    )
