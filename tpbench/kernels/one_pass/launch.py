"""Host code of the one-pass kernels: whether they can do a call, the constants they are compiled for, and the launch.

Kernels receive several arguments as named tuples. Triton compiles the same code as for their fields one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2

from tpbench.kernels import COMPARING_LOSSES, symmetric
from tpbench.kernels.cached_launch import CachedLaunch, Form, cached_launch
from tpbench.kernels.kernel_arguments import LossConstants, RowInputs, RowOutputs, Scales, Strides
from tpbench.kernels.one_pass.tiling import Tile, Tiling, machine, tiling
from tpbench.kernels.row_loss import KernelTarget, Vocabulary
from tpbench.kernels.row_terms import numbers_in_state


@dataclass(frozen=True, kw_only=True)
class Specialization(Tile, LossConstants):
    """The constants that a one-pass kernel is compiled for. Kernels receive it as the constant `SPEC`."""

    GRAD: bool
    """The kernel stores the gradient."""
    REDUCE: bool
    """The kernel stores the sum of the row losses."""
    COUNT: bool
    """The sum and the gradient are divided by the number of rows that count. Without REDUCE the caller counted them."""
    WORLD: int
    """Ranks that exchange row states."""
    WHOLE_TILES: int
    """Leading tiles of every part whose columns all belong to the softmax. The other tiles are masked."""
    PADDED: bool
    """Some columns exist, but do not belong to the softmax."""
    ENTROPY_GRAD: bool
    """The entropy has a gradient."""
    YIELDS: bool
    """A program leaves rows whose words come late to `late_rows_kernel`."""


LEAST_NUMBERS = 2**29
"""Least logits, target logits and gradients of a launch that begins with a meeting: 0.3 ms in bf16 on an H100."""
YIELD_NS = 60_000
"""How long a program that yields waits for words. After that it leaves all rows whose words have not come yet.

After the meeting one rank may read logits later than another by the time of a launch, 30 to 55 us. With 20 us most
single calls left rows, and took up to 1.9 times as long."""
LATE_NS = 1_000_000_000
"""How long the kernel of late rows waits. The words are there, unless the meeting before it was in vain."""


class Mailbox(NamedTuple):
    """Memory through which the programs of all ranks exchange row states (see `symmetric.Workspace`)."""

    words: Any
    """int64 (2, half): the words of this rank. Each half holds (numbers, capacity, RANKS * SLOTS) words."""
    peers: Any
    """int64 (WORLD,): the addresses of all ranks' words."""
    control: Any
    """int32 (2,): the epoch, and the number of programs that are done."""
    failed: Any
    """int32 (1,): set if a wait passed its limit. It may lie in the memory of the host."""


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
    meeting: CachedLaunch | None = None
    """The kernel of a meeting of ranks, if the launch begins with one."""
    late_rows: CachedLaunch | None = None
    """The kernel that finishes rows whose words came late, after another meeting. None: programs wait for all words."""


@functools.lru_cache(maxsize=256)
def prepare(
    logits: Form, target: Form, out: Form | None, device: int, vocabulary: Vocabulary, *, ignore_index: int,
    block_cap: int | str, reduce: bool, count: bool, entropy_grad: bool = False, yields: bool = False, **of_loss: Any,
) -> Prepared | str:  # fmt: skip
    """Prepare a call, or return the reason why the one-pass kernels cannot do it.

    of_loss: `RowLoss.constants`. Over several ranks the reason depends only on values that are equal on all of them.
    Results are cached: a call only adds its addresses and scales.
    """
    loss, top_k = of_loss["LOSS"], of_loss.get("TOP_K", 0)
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or later"
    if loss != "cross_entropy" and target.dtype != logits.dtype:
        return f"it needs targets of the logits' dtype, got {target.dtype} and {logits.dtype}"
    if yields and loss in COMPARING_LOSSES:
        return f"exchange='yielding' has no {loss}, whose ranks wait twice for a row"
    matrices = [logits, *([] if loss == "cross_entropy" else [target]), *([] if out is None else [out])]
    vectors = all(matrix.aligned for matrix in matrices)
    world_size, valid = vocabulary.world_size, vocabulary.valid
    if world_size == 1 and not vectors:
        return "its rows must be contiguous and made of whole 16-byte vectors"
    on = machine(device)
    rows, columns = logits.shape
    options = any(map(of_loss.get, ("SMOOTHED", "ENTROPY", "SOFTCAP")))
    plan = tiling(
        rows, columns, vocabulary.share, world_size, logits.dtype.itemsize, loss, block_cap, vectors, on,
        vocabulary.widest, top_k > 0, options,
    )  # fmt: skip
    if isinstance(plan, str):
        return plan
    unit = plan.VECTOR
    slots = next_power_of_2(world_size) * plan.SLOTS
    walkers = min(max(1, on.processors * plan.programs_per_sm // plan.parts), -(-rows // plan.ROWS))
    fewest = min(plan.part_columns, valid - (plan.parts - 1) * plan.part_columns)
    whole_tiles = min(plan.TILES - 1, max(0, fewest) // plan.columns)
    whole_tiles += fewest >= plan.room
    of_target = target.strides if loss != "cross_entropy" else (0, 0)
    of_grad = logits.strides if out is None else out.strides
    if top_k and plan.WARPS > 8:
        of_loss["TOP_BLOCK"] = max(of_loss["TOP_BLOCK"], plan.LANES)
    constants = Specialization(
        **of_loss, **{field.name: getattr(plan, field.name) for field in fields(Tile)}, GRAD=out is not None,
        REDUCE=reduce, COUNT=count, WORLD=world_size, WHOLE_TILES=whole_tiles, PADDED=valid < columns,
        ENTROPY_GRAD=entropy_grad, YIELDS=yields,
    )  # fmt: skip
    numbers = numbers_in_state(constants) + 2 * (loss in COMPARING_LOSSES)
    kernel = cached_launch(
        _kernel(plan.KERNEL), SPEC=constants, num_warps=plan.WARPS, enable_fp_fusion=False,
        launch_cooperative_grid=plan.SLOTS > 0 and not yields,
        **({"maxnreg": plan.registers} if plan.programs_per_sm > 1 else {}),
    )  # fmt: skip
    meeting = late_rows = None
    # Ranks must decide alike, although one of them may want no gradient: only numbers that are equal on all count.
    read_or_written = 2 if loss == "cross_entropy" else 3
    if yields or (world_size > 1 and rows * vocabulary.share * read_or_written >= LEAST_NUMBERS):
        meeting = cached_launch(_kernel("meeting"), WORLD=world_size, RANKS=next_power_of_2(world_size), num_warps=1)
    if yields:
        late_rows = cached_launch(_kernel("late_rows"), SPEC=constants, num_warps=plan.WARPS, enable_fp_fusion=False)
    return Prepared(
        tiling=plan,
        kernel=kernel,
        programs=walkers * plan.parts,
        integers=(
            rows, columns, plan.parts, plan.part_columns // unit, valid, vocabulary.start, vocabulary.size,
            ignore_index,
            Strides(
                logits.strides[0] // unit, logits.strides[1], of_target[0] // unit, of_target[1], of_grad[0] // unit,
                of_grad[1],
            ),
        ),
        rank=vocabulary.rank,
        row_words=numbers * max(1, slots),
        words=numbers * rows * slots,
        bytes_sent=(world_size - 1) * rows * numbers * plan.SLOTS * 8,
        meeting=meeting,
        late_rows=late_rows,
    )  # fmt: skip


def _kernel(name: str) -> Any:
    # Imported on first use: kernels in Gluon are not needed in Triton's interpreter.
    from tpbench.kernels.one_pass import exchange, kernels, shared_rows

    modules = {"meeting": exchange, "mixture": shared_rows, "shared_rows": shared_rows}
    return getattr(modules.get(name, kernels), f"{name}_kernel")


@dataclass
class OnePassLaunch:
    """The launch of a prepared call, for any tensors of its forms."""

    prepared: Prepared
    peers: symmetric.Workspace | None
    """The workspace of the group. None: one rank, which has a workspace for each stream."""
    device: torch.device
    scales: Scales
    kept: tuple[Any, ...] | None = None
    """The workspace, its size and the longest wait, for which `queue` was made."""
    queue: Sequence[tuple[Any, ...]] = ()
    """The launches in order, each with how many tensors of the call it takes, and the mailbox after them."""

    def __call__(
        self, logits: Tensor, target: KernelTarget, grad: Tensor | None, inputs: RowInputs, outputs: RowOutputs,
        total: Tensor | None, inverse_count: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Queue the kernels on the current stream of the device, which must be the current one.

        It stores outputs and, where they are not None, grad and total. inverse_count: (1,) fp32, 1 / the rows that
        count. It is needed if they are counted and `total` is None. Returns the compiled kernel.
        """
        workspace = symmetric.local_workspace(self.device) if self.peers is None else self.peers
        workspace.enter()
        total = inverse_count if total is None else total
        # Any address stands for a missing tensor.
        grad, total = logits if grad is None else grad, outputs.loss if total is None else total
        tensors = (logits, target, grad, inputs, outputs, total)
        if (workspace, workspace.half, symmetric.WAIT_LIMIT_S) != self.kept:
            workspace.reserve(self.prepared.words)
            self.kept, self.queue = (workspace, workspace.half, symmetric.WAIT_LIMIT_S), [*self._kernels(workspace)]
        compiled = [launch(*tensors[:count], mailbox) for launch, count, mailbox in self.queue]
        return compiled[self.prepared.meeting is not None]

    def _kernels(self, workspace: symmetric.Workspace) -> Iterator[tuple[Any, ...]]:
        """Yield what `queue` lists."""
        prepared, half, limit_ns = self.prepared, workspace.half, int(symmetric.WAIT_LIMIT_S * 1e9)
        mailbox = Mailbox(workspace.words, workspace.peers, workspace.control, workspace.failed)

        def reads(kernel: CachedLaunch, mailbox: Mailbox, limit_ns: int) -> tuple[Any, ...]:
            exchange = prepared.rank, half // prepared.row_words, half, limit_ns
            return kernel.bound(prepared.programs, prepared.integers, self.scales, exchange), 6, mailbox

        def meets(kernel: Any, place: int, ahead: int) -> tuple[Any, ...]:
            return kernel.bound(1, (), (), (prepared.rank, place, ahead, limit_ns)), 0, mailbox

        if prepared.meeting is not None:
            yield meets(prepared.meeting, 2 * half, 1)
        if prepared.late_rows is None:
            yield reads(prepared.kernel, mailbox, limit_ns)
        else:
            # A wait that passes its limit makes the later kernels look for late rows.
            yield reads(prepared.kernel, mailbox._replace(failed=workspace.control[2:]), YIELD_NS)
            yield meets(prepared.meeting, 2 * half + symmetric.MOST_RANKS, 0)
            yield reads(prepared.late_rows, mailbox, LATE_NS)
