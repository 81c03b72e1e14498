"""The loss of a row with its options, this rank's part of the vocabulary, and the rows of a call."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.kernels import COMPARING_LOSSES, KERNEL_LOSSES, LABEL_LOSSES
from tpbench.kernels.distributed import gather_by_rank
from tpbench.kernels.kernel_arguments import RowInputs, RowOutputs, Scales, TopTarget
from tpbench.kernels.objective import Objective, RowObjective


@dataclass(frozen=True)
class LossResult:
    """The losses of a call."""

    loss: Tensor
    """fp32 scalar, or (rows,) with reduction="none". Every rank of the group has the same bits."""
    row_loss: Tensor
    """(rows,) fp32: each row's loss (or log-probability), like the next three 0 for a row that does not count."""
    entropy: Tensor | None
    """(rows,) fp32: entropy of each row's p in nats. None without `entropy=True`."""
    logprobs: Tensor | None
    """(rows,) fp32: log-probability of each label for loss="policy" and for a function. Else None."""
    clipped: Tensor | None
    """(rows,) bool: for loss="policy" true where the clip decides the loss, so that the ratio has no gradient."""
    correct: Tensor | None
    """(rows,) bool: with `correct=True` whether the label's logit is the largest of its row, or one of several."""
    metrics: dict[str, Tensor] | None = field(default=None, kw_only=True)
    """(rows,) each: for a function what it returned beside its losses, 0 for a row that does not count. Else None."""


@dataclass(frozen=True)
class LaunchRecord:
    """A record of the algorithm and the kernels that computed a loss, and of the bytes that they sent to other ranks.

    `How` is its earlier name.
    """

    algorithm: Literal["two_reads", "two_kernels", "one_read"]
    block: int
    """Columns of the kernels' block."""
    bytes_sent: int = 0
    """Bytes that this rank sent to its peers."""
    kernels: tuple[Any, ...] = ()
    """The compiled kernels that read the logits. Each is None in the interpreter."""
    relaunch: Any = field(default=None, repr=False, compare=False)
    """Does the same for other tensors of the same form, unless other tensors of a call decide what is launched."""


class TopK(NamedTuple):
    """The target of a loss against a teacher of which only k columns of each row are known, equal on all ranks."""

    values: Tensor
    """(rows, k): the teacher's logits, or log-probabilities. With a bucket they must be log-probabilities."""
    indices: Tensor
    """(rows, k) int32 or int64: their global columns, which differ within a row. A column that is outside of the
    vocabulary, or ignore_index, is left out. A row whose first one is left out does not count."""
    tail: Literal["drop", "bucket"] = "drop"
    """drop: q is normalised over the k columns. bucket: all other columns are one more column. Its p is 1 - the sum of
    the others in fp32. If it is about 1e-4, a loss is off by up to 1e-3."""


KernelTarget = Tensor | TopTarget
"""The target as kernels receive it: labels, target logits, or a teacher's top k."""


def kernel_target(target: Tensor | TopK, loss: RowLoss) -> KernelTarget:
    """Return a target as kernels receive it. Labels and a top k become contiguous."""
    if isinstance(target, TopK):
        return TopTarget(target.indices.contiguous(), target.values.contiguous())
    return target.contiguous() if loss.has_labels else target.detach()


def labels_of(target: KernelTarget) -> Tensor:
    """Return labels, (rows,): of a top k the first columns, which say whether a row counts."""
    return target if isinstance(target, Tensor) else target.indices[:, 0].contiguous()


@dataclass(frozen=True)
class Vocabulary:
    """This rank's columns of the vocabulary."""

    start: int
    """The first global column of this rank."""
    size: int
    """Columns of the whole vocabulary, without padding."""
    columns: int
    """Columns of this rank, with padding."""
    widest: int | None
    """The most columns of a rank. None: unknown."""
    world_size: int
    rank: int

    @property
    def share(self) -> int:
        """Columns of each rank if the vocabulary is split evenly: equal on all ranks."""
        return -(-self.size // self.world_size)

    @property
    def valid(self) -> int:
        """Columns of this rank without padding."""
        return min(max(self.size - self.start, 0), self.columns)

    @classmethod
    def of_shard(
        cls, options: Options, columns: int, device: torch.device, name: str, check: bool = False
    ) -> Vocabulary:
        """Return this rank's columns. Collective, unless there is one rank, or start and size are given without check.

        name: the argument that has the columns. Raises ValueError on all ranks if their columns do not fit together.
        """
        group, start, size = options.group, options.vocab_start, options.vocab_size
        world_size, rank = (1, 0) if group is None else (group.size(), group.rank())
        total, widest, first = columns, columns, 0
        if group is not None and world_size > 1:
            if start is not None and size is not None and not check:
                return cls(start, size, columns, None, world_size, rank)
            # Not cached by local size: if it changed on some ranks only, those would gather alone.
            shard = torch.tensor([columns, *(-1 if each is None else each for each in (start, size))], device=device)
            sizes, given, totals = gather_by_rank(shard, group, world_size).T.tolist()
            starts = [0, *itertools.accumulate(sizes)]
            if len(set(totals)) > 1 or given not in (starts[:-1], [-1] * world_size):
                raise ValueError(
                    "vocab_start and vocab_size must be given on all ranks or on none. vocab_size must be equal, and "
                    f"vocab_start where the columns of the ranks before end, {starts[:-1]} by rank; got vocab_size "
                    f"{totals} and vocab_start {given}, where -1 is None"
                )
            first, total, widest = starts[rank], starts[-1], max(sizes)
        elif start not in (None, 0):
            raise ValueError(f"vocab_start must be 0 or None without a group of ranks that hold the rest, got {start}")
        if total == 0:
            raise ValueError(f"{name} must have a column, here or on another rank of the group")
        if size is not None and size > total:
            raise ValueError(f"vocab_size must be at most the {total} columns held in all, got {size}")
        return cls(first, total if size is None else size, columns, widest, world_size, rank)


LARGEST_SCALE = 1e6
"""Largest factor on logits. With it logits up to 1000 have exponents whose rounding stays in the range of fp32."""
MAX_COLUMNS = 2**31 - 1
"""Columns are int32 in the kernels."""
_EXCEPT = {name: tuple(loss for loss in KERNEL_LOSSES if loss != name) for name in ("cross_entropy", "logprob")}


def declare(default: Any, role: str = "", losses: Sequence[str] = KERNEL_LOSSES, **valid: Any) -> Any:
    """Declare an option: its default, and what is valid: `choices`, or the limits of `checks.number`.

    role: what the option does for `losses`. The other losses need the default.
    """
    return field(default=default, metadata={"role": role, "losses": losses, **valid})


@dataclass
class Options:
    """The options of `entropy_loss` that are numbers or names. `checks.options` checks them by their declarations.

    Nothing changes an option. The class isn't frozen, because that would cost every call some microseconds.
    """

    loss: str
    group: dist.ProcessGroup | None
    entropy: bool
    block_cap: int | Literal["auto"] = declare("auto", kind=int, low=16, high=65536)
    logits_dtype: str | None = declare(None, choices=(None, "float32"))
    workspace_gib: float | Literal["auto"] = declare("auto", open_low=True)
    vocab_start: int | None = declare(None, kind=int, low=0, high=MAX_COLUMNS)
    vocab_size: int | None = declare(None, kind=int, low=1, high=MAX_COLUMNS)
    reduction: str = declare("mean", choices=("mean", "sum", "none"))
    ignore_index: int = declare(-100, kind=int, low=None)
    exchange: str = declare("auto", choices=("auto", "nccl", "symmetric", "yielding"))
    algorithm: str = declare("auto", choices=("auto", "two_reads", "two_kernels", "one_read"))
    objective: Objective | None = None
    """The function that was given as the loss. It is one of log-probabilities: `loss` is "logprob" then."""
    logits_scale: float = declare(1.0, open_low=True, high=LARGEST_SCALE)
    temperature: float | Tensor = declare(1.0, "softens target logits", _EXCEPT["cross_entropy"], open_low=True)
    label_smoothing: float = declare(0.0, "smooths labels", ("cross_entropy",), high=1.0)
    z_loss: float = declare(0.0, "is a term of a loss", _EXCEPT["logprob"])
    softcap: float | None = declare(None, open_low=True)
    correct: bool = declare(False, "needs labels", LABEL_LOSSES, choices=(False, True))
    grad_scale: float = declare(1.0, low=None)
    clip: tuple[float, float] = declare((0.2, 0.2), "belongs to loss='policy'", ("policy",))
    kl_weight: float = declare(0.0, "is a term of loss='policy'", ("policy",), low=None)
    entropy_weight: float = declare(0.0, "is a term of loss='policy'", ("policy",), low=None)
    beta: float = declare(0.5, "is the target's weight in the mixture of loss='jsd'", ("jsd",), open_low=True)

    @classmethod
    def of_arguments(cls, arguments: Mapping[str, Any]) -> Options:
        """Return the options among the arguments of a function by name. Raises if the loss is a wrong function."""
        options = {name: arguments[name] for name in cls.__dataclass_fields__ if name in arguments}
        if not isinstance(options["loss"], str):
            options |= {"objective": Objective.of(options["loss"]), "loss": "logprob"}
        return cls(**options)

    def stored_scale(self, rows: int, dtype: torch.dtype) -> float:
        """Return the factor that a gradient of a mean over `rows` rows contains in memory: for fp16 a power of two.

        The division by the rows would round small gradients to zero (Micikevicius et al. 2018, arXiv:1710.03740,
        section 3.2), so the factor is near the number of rows. It is smaller if other factors already increase the
        gradient, and for functions and the policy loss, whose ratios and advantages the host does not know. It leaves
        room even if one row of many counts.
        """
        if dtype != torch.float16 or self.reduction != "mean":
            return 1.0
        unknown = 16.0 if self.loss == "policy" or self.objective is not None else 1.0
        increase = max(abs(self.grad_scale * self.logits_scale) * unknown, 1.0)
        return float(2 ** max(0, math.floor(math.log2(max(min(rows, 2**14) / increase, 1.0)))))


@dataclass(kw_only=True)
class RowLoss(Options):
    """The loss of a row, with the options that are the same for all rows."""

    vocabulary: Vocabulary
    target_softcap: float | None = None
    """The softcap of target logits."""
    top: tuple[int, int, str, bool] = (0, 0, "", False)
    """For a teacher's top k the constants TOP_K, TOP_BLOCK (a power of two), TOP_LOSS and BUCKET of the kernels."""

    @classmethod
    def of_call(
        cls, options: Options, columns: int, device: torch.device, name: str, target: Any, **changes: Any
    ) -> RowLoss:
        """Return the loss of a call, with changed options. Collective, as `Vocabulary.of_shard`."""
        loss = options.loss
        if isinstance(target, TopK):
            k = target.values.shape[1]
            changes["top"] = (k, 1 << (k - 1).bit_length(), loss, target.tail == "bucket")
        if loss in ("logprob", "policy"):  # the temperature is that of the logits
            temperature = 1.0 if isinstance(options.temperature, Tensor) else options.temperature
            changes |= {"logits_scale": options.logits_scale / temperature, "temperature": 1.0}
        if options.objective is not None:
            changes["algorithm"] = "two_kernels"
        vocabulary = Vocabulary.of_shard(options, columns, device, name)
        return cls(**{**vars(options), **changes}, vocabulary=vocabulary)

    @functools.cached_property
    def has_labels(self) -> bool:
        """True if each row has a label, or a top k, that says whether it counts."""
        return self.loss in LABEL_LOSSES or self.top[0] > 0

    def ignored(self, target: KernelTarget, row_weight: Tensor | None) -> Tensor | None:
        """Return which rows do not count, (rows,) bool, or None if all count."""
        has_no_weight = None if row_weight is None else row_weight == 0.0
        if not self.has_labels:
            return has_no_weight
        labels = labels_of(target)
        ignored = (labels == self.ignore_index) | (labels < 0) | (labels >= self.vocabulary.size)
        return ignored if has_no_weight is None else ignored | has_no_weight

    def row_objective(self, target: KernelTarget, arguments: Mapping[str, Any]) -> RowObjective | None:
        """Return the function as the loss with a call's tensors of rows, as `RowObjective.of_call`."""
        if self.objective is None:
            return None
        ignored = self.ignored(target, arguments["row_weight"])
        assert ignored is not None  # rows have labels
        return RowObjective.of_call(self.objective, arguments, ignored, self.vocabulary.size, self.group)

    @property
    def wants_entropy(self) -> bool:
        objective = self.objective
        return self.entropy or self.entropy_weight != 0.0 or (objective is not None and "entropy" in objective.computed)

    @functools.cached_property
    def formula(self) -> str:
        """The loss whose kernels compute this one: "cross_entropy" for all losses of labels."""
        return "cross_entropy" if self.has_labels else self.loss

    def constants(self, entropy: bool) -> dict[str, Any]:
        """Return the constants of this loss in the kernels' `SPEC`. entropy: it is wanted."""
        return {
            "LOSS": self.formula, "SMOOTHED": self.label_smoothing > 0, "ENTROPY": entropy, "Z_LOSS": self.z_loss > 0,
            "SOFTCAP": self.softcap or 0.0, "TARGET_SOFTCAP": self.target_softcap or 0.0,
            "BETA": self.beta if self.loss == "jsd" else 0.0,
            **dict(zip(("TOP_K", "TOP_BLOCK", "TOP_LOSS", "BUCKET"), self.top, strict=True)),
        }  # fmt: skip

    @property
    def two_pass_algorithm(self) -> Literal["two_reads", "two_kernels"]:
        several = self.algorithm == "two_kernels" or self.vocabulary.world_size > 1 or self.loss in COMPARING_LOSSES
        return "two_kernels" if several else "two_reads"

    def scales(self, mean: float, unit: float = 1.0) -> Scales:
        """Return the factors that kernels receive. mean: of the reduction. unit: of exponents, in nats."""
        grad = self.grad_scale * self.logits_scale
        label = {"logprob": 1.0, "policy": 0.0}.get(self.loss, self.label_smoothing - 1.0)
        return Scales(
            self.logits_scale / unit, self.logits_scale / self.temperature / unit, grad * mean, grad, mean,
            label, self.label_smoothing, self.label_smoothing / self.vocabulary.size, self.z_loss, 1.0 - self.clip[0],
            1.0 + self.clip[1], self.kl_weight, self.entropy_weight,
        )  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Some rows of a call: tensors that the kernels read and fill for them, and the factors of the reduction."""

    outputs: RowOutputs
    inputs: RowInputs = RowInputs()
    grad: Tensor | None = None
    """(rows, local vocab), or None if no gradient is wanted. It may be the logits."""
    accumulate: bool = False
    """Add to `grad` instead of overwriting it."""
    total: Tensor | None = None
    """fp32 scalar: the sum or the mean of the row losses. None: it is not wanted."""
    mean: float = 1.0
    """Factor of the reduction on the total and the gradient, if the host knows it."""
    count: bool = False
    """Divide both by the number of rows that count, which the device counts."""
    inverse_count: Tensor | None = None
    """(1,) fp32: 1 / that number, if it was counted before, over other rows than these, or 1 / a divisor."""
    objective: RowObjective | None = None
    """A function as the loss, with its tensors. The two kernels call it."""

    @classmethod
    def of_call(
        cls, loss: RowLoss, rows: int, device: torch.device, inputs: RowInputs, divisor: float | Tensor | None,
        grad: Tensor | None = None, accumulate: bool = False, objective: RowObjective | None = None,
    ) -> Rows:  # fmt: skip
        """Return all rows of a call, with new memory for their results. With reduction="none" there is no total."""

        def empty(wanted: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
            return torch.empty(shape, dtype=dtype, device=device) if wanted else None

        policy = loss.loss == "policy"
        outputs = RowOutputs(
            empty(True, rows), empty(loss.wants_entropy, rows), empty(policy or loss.objective is not None, rows),
            empty(policy, rows, dtype=torch.bool), empty(loss.correct, rows, dtype=torch.bool),
        )  # fmt: skip
        is_mean = loss.reduction == "mean" and rows > 0
        count = is_mean and (loss.has_labels or inputs.row_weight is not None)
        mean = 1.0 / rows if is_mean and not count else 1.0
        inverse_count = None
        if isinstance(divisor, Tensor):
            count, inverse_count = True, divisor.detach().float().reciprocal().view(1)
        elif divisor is not None:
            mean = 1.0 / divisor
        elif count and inputs.row_weight is not None and not loss.has_labels:
            total = inputs.row_weight.sum(0, keepdim=True)
            inverse_count = torch.where(total == 0.0, 0.0, total.reciprocal())
        return cls(
            outputs, inputs, grad, accumulate, empty(loss.reduction != "none"), mean, count, inverse_count, objective
        )  # fmt: skip
