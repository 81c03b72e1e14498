"""Arguments that kernels receive as one: Triton compiles the same code as for their fields one by one."""

from dataclasses import dataclass
from typing import Any, NamedTuple


class Scales(NamedTuple):
    """The factors of losses and gradients."""

    logits: Any
    """On logits, whose products are exponents. `target`: on target logits."""
    target: Any
    grad: Any
    """On the gradient of losses. `entropy`: on that of entropies. `total`: on the sum of the row losses."""
    entropy: Any
    total: Any
    label: Any
    """On log p[label] in the loss. `smoothing`: on the mean of -log p over the columns."""
    smoothing: Any
    column: Any
    """`smoothing` divided by the columns of the vocabulary."""
    z_loss: Any
    clip_low: Any
    """The least ratio that is not clipped. `clip_high`: the largest one."""
    clip_high: Any
    kl: Any
    """On the estimate of the divergence from the reference. `entropy_term`: on the negative entropy in the loss."""
    entropy_term: Any


class RowInputs(NamedTuple):
    """Numbers of each row, (rows,) fp32 or None."""

    row_grad: Any = None
    """Upstream gradients of the rows' losses."""
    entropy_grad: Any = None
    """Upstream gradients of the rows' entropies."""
    row_weight: Any = None
    """A row with the weight 0 does not count."""
    old_logprobs: Any = None
    advantages: Any = None
    ref_logprobs: Any = None
    divergence_p: Any = None
    """For jsd: KL(p || mixture). `divergence_q`: KL(q || mixture). For total variation: the sums over the columns of
    sign(p - q) p / 2 and of sign(q - p) q / 2."""
    divergence_q: Any = None
    row_temperature: Any = None
    """The temperature of each row, which divides its logits. None: all rows have one temperature."""


class RowOutputs(NamedTuple):
    """The results of each row, (rows,) fp32, or None if the caller does not want this one."""

    loss: Any
    entropy: Any = None
    logprobs: Any = None
    clipped: Any = None
    """bool. `correct`: bool, the label's logit is the largest of the row."""
    correct: Any = None


class Strides(NamedTuple):
    """Strides of the logits, target logits and gradient in elements, 0 for one that is missing.

    The one-pass kernels have the strides of rows in vectors.
    """

    logits_row: Any
    logits_column: Any
    target_row: Any
    target_column: Any
    grad_row: Any
    grad_column: Any


class TopTarget(NamedTuple):
    """A teacher's top k in place of labels, contiguous (rows, k)."""

    indices: Any
    """Global columns."""
    log_q: Any
    """Log-probabilities, or logits unless there is a bucket."""


class Shard(NamedTuple):
    """The columns of this rank, and the labels of rows that do not count."""

    n_valid: Any
    """Columns without padding."""
    vocab_start: Any
    vocab_size: Any
    ignore_index: Any


@dataclass(frozen=True, kw_only=True)
class LossConstants:
    """The constants of kernels that follow from the loss: a part of `SPEC`."""

    LOSS: str
    SMOOTHED: bool = False
    """Labels are smoothed."""
    ENTROPY: bool = False
    """The entropy of each row is wanted."""
    Z_LOSS: bool = False
    SOFTCAP: float = 0.0
    """0: no cap."""
    TARGET_SOFTCAP: float = 0.0
    BETA: float = 0.0
    """For jsd: the weight of the target distribution."""
    TOP_K: int = 0
    """The teacher's columns of a row. 0: the target is of another kind."""
    TOP_BLOCK: int = 0
    """A power of two, at least TOP_K."""
    TOP_LOSS: str = ""
    BUCKET: bool = False
    """The columns outside of the top k are one more column."""
