"""The linear loss on a rank: its shard, its costs, the products alone, and an oracle, whose logits aren't rounded."""

import contextlib
import functools
import math
from collections.abc import Callable
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor

from tpbench.comm.collectives import gather_rows
from tpbench.kernels import COMPARING_LOSSES
from tpbench.measure.ranks import gather_number
from tpbench.measure.session import Context, Costs, Verdict
from tpbench.measure.timers import do_nothing
from tpbench.workloads.differences import Compared, Comparison, smallest
from tpbench.workloads.linear_loss.inputs import Output, Shard, make_shard
from tpbench.workloads.linear_loss.noise import ARITHMETIC, PRODUCTS, LogitNoise, ProductNoise
from tpbench.workloads.linear_loss.problem import WORKLOAD, LinearLoss
from tpbench.workloads.losses.formulas import objective_losses
from tpbench.workloads.losses.inputs import EDGE_LOGIT, edges
from tpbench.workloads.losses.oracle import Blocks, LossOracle, set_policy_rows, weighted
from tpbench.workloads.sizes import ITEM_BYTES

LOSS_TOLERANCE = {"bfloat16": 2.0**-5, "float16": 2.0**-8, "float32": 2.0**-14}
"""Tolerance of a row's loss, relative to the larger of it and 1. A logit of 8 in bf16 has a rounding error of 2^-6. For
a policy it is four times as large, since its ratio has the error of the label's logit: 0.046 in bf16 on a GPU."""

ENTROPY_TOLERANCE = {"bfloat16": 2.0**-3, "float16": 2.0**-6, "float32": 2.0**-12}
"""Tolerance of a row's entropy, likewise. A logit's error counts p * |log p + entropy| times, which may exceed 1.
Measured in bf16 on a GPU, with 2^17 columns: 0.043."""

GRADIENT_TOLERANCE = {"bfloat16": 2.0**-3, "float16": 2.0**-6, "float32": 2.0**-11}
"""Tolerance of the gradients of a row of hidden states, by norm, where the noise that rounding explains (`noise.py`)
isn't more. Measured in bf16 on GPUs with 2^17 columns: 0.070 for reverse_kl, and 0.066 for `linear_cce`, which leaves
probabilities out. It is four times as large for the weight, whose rows may come from few logits: those of 16 to 32 have
errors of up to 2^-4. Seen once for reverse_kl in bf16, with 16 rows of 2^15 columns: 0.249."""


class Oracle(LossOracle):
    """Compares outputs of one problem."""

    BLOCK: ClassVar = {"cpu": 2**20, "cuda": 2**26}
    """About six float64 temporaries of a block exist at once: 3 GiB on a GPU."""

    def __init__(self, problem: LinearLoss, shard: Shard) -> None:
        super().__init__(problem, shard)
        self.hidden, self.weight, self.dtype = self._whole(shard.hidden), shard.weight.double(), shard.weight.dtype
        self.teacher = shard.teacher and (self._whole(shard.teacher[0]), shard.teacher[1].double())
        # The probabilities of the last block, times what a logit's error counts, if terms of the gradient cancel.
        self.mass: Tensor | None = None

    def logits(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        target = None if self.teacher is None else self.teacher[0][rows].double() @ self.teacher[1].t()
        self.last_logits = self.hidden[rows].double() @ self.weight.t(), target
        return self.last_logits

    def limits(self) -> dict[str, float]:
        problem, is_policy, of_logits = self.problem, self.problem.is_policy, self.problem.rounded_to
        # Of a policy, a ratio's relative error: its logarithm may be wrong by two roundings of logits below 32.
        of_ratio = is_policy * math.expm1(16 * torch.finfo(getattr(torch, of_logits)).eps * self.scale)
        loss = LOSS_TOLERANCE[of_logits] * self.steep * (4 if is_policy else 1)
        limits = {"loss_error": max(loss, of_ratio)}
        if problem.entropy:
            limits["entropy_error"] = ENTROPY_TOLERANCE[of_logits] * self.steep
        if problem.trains:
            gradient = max(GRADIENT_TOLERANCE[problem.dtype] * self.steep, of_ratio)
            limits |= {"hidden_grad_error": gradient, "weight_grad_error": 4 * gradient}
        return limits

    def gradients(self, output: Output) -> dict[str, Compared]:
        hidden = Compared(output.grad_hidden, tuple(self.shard.hidden.shape), None, "hidden_grad_error")
        weight = Compared(output.grad_weight, tuple(self.weight.shape), None, "weight_grad_error")
        return {"grad_hidden": hidden, "grad_weight": weight} if self.problem.trains else {}

    def compare_gradients(self, comparison: Comparison, output: Output, blocks: Blocks) -> None:
        """Record the errors of rows of both gradients, and judge rows, columns and tiles by the noise of rounding."""
        for name, (right, of_product) in self.products(blocks, output.omits_below).items():
            if name in comparison.got:
                got = self._whole(comparison.got[name]) if name == "grad_hidden" else comparison.got[name]
                slack, explained = torch.finfo(got.dtype).smallest_normal, of_product.allowed(1, right, self.dtype)
                least = explained / comparison.limits[comparison.columns[name]]
                comparison.matrix(name, right, slack, got=got, least=least)
                of_product.judge(comparison, name, got.double(), right, self.dtype)

    def products(self, blocks: Blocks, omits_below: float) -> dict[str, tuple[Tensor, ProductNoise]]:
        """Return the right gradients by name, each with the noise of rounding."""
        right_weight, right_hidden = torch.zeros_like(self.weight), self.weight.new_zeros(self.hidden.shape)
        of_weight, of_hidden = ProductNoise.zeros(right_weight), ProductNoise.zeros(right_hidden)
        for rows, grad, terms in blocks:
            noise = self._logit_noise(grad, terms, omits_below)
            hidden = self.hidden[rows].double()
            right_weight.addmm_(grad.t(), hidden)
            of_weight.add(noise, grad, hidden, is_transposed=True)
            partial = grad @ self.weight
            part = ProductNoise(of_hidden.rows[:, rows], of_hidden.columns)
            part.add(noise, grad, self.weight, is_transposed=False)
            part.rows[2] += partial.square().sum(1)
            part.columns[2] += partial.square().sum(0)
            right_hidden[rows] = self.sum(partial)
        of_hidden = ProductNoise(self.sum(of_hidden.rows), self.sum(of_hidden.columns))
        return {"grad_hidden": (right_hidden, of_hidden), "grad_weight": (right_weight, of_weight)}

    def _logit_noise(self, grad: Tensor, terms: tuple[Tensor, Tensor], omits_below: float) -> LogitNoise:
        """Return the errors of the gradient of the last block's logits, from its absolute terms."""
        problem, (slopes, shares) = self.problem, terms
        logits, target = self.last_logits
        logits = logits.abs() * self.scale
        if target is not None:
            logits = logits.maximum(target.abs() * problem.target_scale)
        is_simple = problem.loss == "cross_entropy" or (problem.loss == "logprob" and not problem.entropy)
        moved = shares if is_simple else slopes + shares
        arithmetic = self.steep * max(ARITHMETIC, PRODUCTS * math.sqrt(problem.hidden))
        of_sum: Tensor | float = 0.0
        if self.mass is not None:  # terms of these gradients cancel, and so do their errors
            mass = self.mass.mul_(self.scale * self.inverse_count)
            of_sum = (shares + mass) * arithmetic  # errors of the sum of exponentials don't: they change the loss
            # A logarithm changes with each logit, a sign hardly ever does.
            moved, shares = grad.abs() + (mass if self.signs is None else 0.0), mass
        deviation = logits.mul_(torch.finfo(self.dtype).eps / math.sqrt(12)).add_(arithmetic)
        spread, whole = self.sum(torch.stack(((moved * deviation).square().sum(1), shares.sum(1))))
        common = (spread.sqrt() / whole).nan_to_num_(0.0)
        if problem.is_policy:  # the error of a ratio counts in each column
            common += self.maximum(deviation.amax(1))
        omitted = shares.where(shares < omits_below * self.scale * self.inverse_count, 0.0) if omits_below else None
        flips: Tensor | float = 0.0
        if self.signs is not None:  # of total variation: where rounding decides the sign, it moves the element by p
            _, gap = self.signs
            of_sums = self.sum((mass * (1.0 + (-gap).exp()) * deviation).square().sum(1)).sqrt() / whole  # of p and q
            undecided = gap.abs() < 4.0 * (deviation + of_sums[:, None])
            flips = mass.where(undecided, 0.0).square() / 4.0  # the variance of a fair choice between 0 and p
            of_sum += mass * common.hypot(self.sum(flips.sum(1)).sqrt() / whole)[:, None]  # of the mean sign
            common = of_sums
        eps, underflow = torch.finfo(self.dtype).eps, self.steep * smallest(self.dtype)
        variance = (moved * deviation).square_().add_((grad * eps).square_().div_(12)).add_(underflow**2 / 4) + flips
        shared = (moved * common[:, None]).add_(underflow / 2) + of_sum
        if problem.top_k:  # other columns may get the rounding errors of a sum over the k, times their p
            shared += arithmetic * self.maximum((slopes + shares).amax(1))[:, None]
        return LogitNoise(variance, shared, omitted)

    def losses(self, log_p: Tensor, log_q: Tensor | None, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return the losses of rows and their terms, also of an upstream objective, or of a function as the loss."""
        loss, slopes, shares = super().losses(log_p, log_q, rows)
        is_divergence = self.problem.loss in ("reverse_kl", *COMPARING_LOSSES) and self.top is None
        self.mass = log_p.exp() if is_divergence else None
        upstream: Any = self.shard.upstream
        if self.problem.objective:
            objective = self.objective
            loss, upstream = objective[0][rows], [factor * self.inverse_count for factor in objective[1:]]
        if upstream is not None:
            # `gradient_of_mean` divides by the number of rows, and these gradients include that.
            of_logprob, of_entropy = (grad[rows].double()[:, None] / self.inverse_count for grad in upstream)
            slopes, shares = slopes * of_logprob, shares * of_logprob
            if self.problem.entropy or self.problem.objective:
                p = log_p.exp()
                slopes -= of_entropy * weighted(p, log_p)
                shares += of_entropy * self.entropies(log_p)[:, None] * p
                self.mass = p * (of_logprob.abs() + of_entropy.abs())
        return loss, slopes, shares

    @functools.cached_property
    def objective(self) -> tuple[Tensor, Tensor, Tensor]:
        """The losses of a user's own function, and their derivatives by log-probabilities and entropies: (tokens,)."""
        parts = []
        for rows in self.blocks():
            log_p, _ = self.log_probabilities(rows)
            parts.append((super().losses(log_p, None, rows)[0] * self.counts[rows], self.entropies(log_p)))
        logprobs, entropy = (torch.cat(values).requires_grad_() for values in zip(*parts, strict=True))
        with torch.enable_grad():
            losses, _ = objective_losses(self.problem, logprobs, entropy, self.shard.rows)
        grads = torch.autograd.grad(losses, (logprobs, entropy), self.counts.double(), materialize_grads=True)
        loss, of_logprob, of_entropy = (values.detach().where(self.counts, 0.0) for values in (losses, *grads))
        return loss, of_logprob, of_entropy

    def _whole(self, rows: Tensor) -> Tensor:
        """Return all rows of a matrix that ranks may hold parts of."""
        is_part = self.shard.group is not None and self.problem.sequence_parallel
        return gather_rows(rows, self.shard.group) if is_part else rows


MOST_ROWS = 8192
"""Rows of a product: the logits of more would perhaps not fit."""


@WORKLOAD.inputs
def inputs(problem: LinearLoss, context: Context) -> Shard:
    """Return this rank's inputs. Collective, because those of a policy loss follow the log-probabilities."""
    shard = make_shard(problem, context)
    set_policy_rows(problem, shard, Oracle)
    return shard


@WORKLOAD.refresh
def refresh(problem: LinearLoss, shard: Shard, rank: Context) -> None:
    """Give the first and last column of each shard a large logit in some rows: of the weight, a multiple of a state."""
    teacher = [] if shard.teacher is None else [(*shard.teacher, problem.target_scale)]
    for which, (hidden, weight, scale) in enumerate([(shard.hidden, shard.weight, problem.scale), *teacher]):
        for row, column in edges(shard, len(hidden), which):
            state = hidden[row].double()
            weight[column] = state * (EDGE_LOGIT / scale / state.square().sum())
    set_policy_rows(problem, shard, Oracle)


@WORKLOAD.costs
def costs(problem: LinearLoss, rank: Context) -> Costs:
    """Return the unavoidable costs of a rank with the most columns. Rows of ignored labels cost nothing.

    For training, the floor is the time of the products, then a pass of the loss: a gradient needs its row's sum,
    so that each logit is stored, read once and its gradient written once. A product hides the sum of gradients over
    ranks. Without gradients, the floor is the time of the products, or that of reading their factors.
    """
    columns, models = -(-problem.vocab // rank.tp_size), problem.matrices
    rows = round(problem.tokens * (1.0 - problem.ignored))
    elements = models * (rows + columns) * problem.hidden
    if problem.trains:
        elements = (1 + models) * rows * columns
    products = models + (2 if problem.trains else 0)
    flops = products * 2 * rows * problem.hidden * columns
    return Costs(elements * ITEM_BYTES[problem.dtype], 0, flops, consecutive=problem.trains)


@WORKLOAD.check(Output)
def check(problem: LinearLoss, shard: Shard, output: Output, rank: Context) -> Verdict:
    return Oracle(problem, shard).compare(output)


@WORKLOAD.details
def details(problem: LinearLoss, shard: Shard, session: Any, rank: Context) -> dict[str, Any]:
    """Return columns about the products alone, timed alternately with the step. Collective."""
    # About 3 s of steps, within limits. The products are timed as often.
    most = int(3000 / max(gather_number(session.step_ms, rank)))
    iterations = max(6, min(40, most)) if rank.device.type == "cuda" else 1
    # The gradients that a step allocates: of the weight only without main_grad.
    outputs = problem.trains * (shard.hidden.nbytes + (not problem.main_grad) * shard.weight.nbytes)
    columns = {
        "tflops": session.costs.flops / session.step_ms / 1e9,
        "above_outputs_gib": max(gather_number(session.columns["peak_gib"] - outputs / 2**30, rank)),
    }
    products = None
    with contextlib.suppress(torch.OutOfMemoryError):  # a step may need less memory than its products by themselves
        products = products_of(problem, shard)
    if any(gather_number(products is None, rank)) or products is None:
        return columns
    timed = ((session.step, session.restore), (products, do_nothing))
    step, alone = session.stopwatch.interleaved_ms(*timed, iterations=iterations)
    own_step, own_alone = session.stopwatch.blocks_ms(*timed, iterations=iterations)
    return columns | {
        "products_ms": median(alone),
        "over_products": median(step) / median(alone),
        "over_products_alone": median(own_step) / median(own_alone),
    }


def products_of(problem: LinearLoss, shard: Shard) -> Callable[[], None]:
    """Return a function that queues the products of a problem alone: for logits and both gradients."""
    most, weight = min(problem.tokens, MOST_ROWS), shard.weight
    hidden = shard.hidden.repeat(-(-most // len(shard.hidden)), 1)[:most].contiguous()
    logits = torch.empty(most, shard.columns, dtype=hidden.dtype, device=hidden.device)
    grad = logits
    if problem.trains:
        # Probabilities of this shard, like those in a step: the power of a product depends on its numbers.
        grad = torch.softmax(torch.mm(hidden, weight.t(), out=logits), dim=1)
        hidden_grad, weight_grad = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        for first in range(0, problem.tokens, most):
            rows = slice(0, min(most, problem.tokens - first))
            torch.mm(hidden[rows], weight.t(), out=logits[rows])
            if shard.teacher is not None:
                torch.mm(hidden[rows], shard.teacher[1].t(), out=logits[rows])
            if problem.trains:
                torch.mm(grad[rows], weight, out=hidden_grad[rows])
                torch.mm(grad[rows].t(), hidden[rows], out=weight_grad)

    return run
