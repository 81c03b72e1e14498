"""The reference of a run, and the comparison of a run with it.

The reference is the same training by one process or, if that costs too much, a forward pass. It starts from the same
bits and uses the micro-batches of all replicas and the same dtypes. It runs eagerly, with torch's loss and nothing
sharded. Rank 0 trains the first `STEPS` steps if two estimates are small enough. The whole model's parameters,
gradients, states and activations must fit into `MEMORY_SHARE` of that rank's free memory, and the steps must take at
most `MAX_FLOPS` operations. Otherwise every rank computes only the first step's loss, by a forward pass that holds the
weights of one layer at a time. This is possible for any model but checks no gradients.

For a variant from outside this package, rank 0 trains all steps if they take at most `MAX_FLOPS`, too. The reference's
`source` says what it checks.

Losses and norms hardly show a wrong gradient of a small weight, so the norm of each parameter's gradient in the first
step is compared, if the trainer's model has it (`gradient_norms`). Nor do they show a small weight that each replica
trains for itself, so `differing_replicas` compares the weights of all replicas after the last step.
"""

import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, median_low
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpbench.comm.collectives import gather_objects
from tpbench.measure import rank_memory
from tpbench.measure.session import Context
from tpbench.workloads.train_step.estimates import Distribution, estimate_memory, parameters, step_flops
from tpbench.workloads.train_step.model import models
from tpbench.workloads.train_step.model.inputs import micro_batch, model_inputs, replica_batches
from tpbench.workloads.train_step.model.models import allocate, fill, place_buffers
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.training.losses import torch_loss
from tpbench.workloads.train_step.training.trainer import TorchTrainer, Trainer, autocast

STEPS = 3
UNCHECKED = "; later steps are not checked"
"""End of the `source` of a reference that is cheaper than a variant from outside needs."""
MEMORY_SHARE = 0.7
MAX_FLOPS = {"cpu": 2e12, "cuda": 3e16}
"""By kind of device: about half a minute."""
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-3, "float16": 2e-3}
"""Relative tolerance of each compared step's loss, by dtype. Sums over shards round differently; after an update in
bf16, weights do too."""
NORM_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2, "float16": 2e-2}
"""Relative tolerance of the first step's gradient norm, by dtype."""
NORM_GROWTH = 2.0
"""Factor of that tolerance from step to step. Adam's first updates move every weight by a whole learning rate, so
rounding differences grow."""
TIMED_TOLERANCE = {"float32": 5e-4, "bfloat16": 5e-3, "float16": 5e-3}
"""Least tolerance of the median error of timed losses, by dtype. The largest median error of correct rows on GPUs is
1.5e-3 in bf16 and, with a moderate learning rate on a CPU, 1e-5 in fp32."""
TIMED_SHARE = 0.2
"""Tolerance of the median error as a share of what training changes. In tiny models with a far too high learning rate
(1e-2), the losses of correct variants differ by 0.08 of it."""
TIMED_OUTLIER = 10.0
"""A single error may be this many times the tolerance of the median error. Right after a spike of the gradient norm,
correct rows differ by up to 1.3e-2 in bf16 and 3e-3 in fp32."""

PARAMETER_TOLERANCE = {"float32": 1e-2, "bfloat16": 1e-1, "float16": 1e-1}
"""Relative tolerance of the norm of each parameter's gradient in the first step, by dtype."""
PARAMETER_SHARE = {"float32": 1e-4, "bfloat16": 1e-3, "float16": 1e-3}
"""Share of the whole gradient's norm that a parameter's counts as at least, by dtype. Gradients of some parameters,
such as the bias of keys, cancel to rounding errors.

Norms of correct variants of tiny models differ by up to 1e-6 and 2e-2.
"""

GradientNorms: TypeAlias = dict[str, tuple[float, int]]
"""The norm of each parameter's gradient and its number of elements, by the plain model's names."""
Trained: TypeAlias = tuple[list[float], list[float], GradientNorms]
"""The loss and the gradient norm of each step, and the norms of the first step's gradients."""


@dataclass(frozen=True)
class Reference:
    """Correct losses and gradient norms of the first steps or, for a variant from outside, of the whole run."""

    source: str
    """The computation that gave them."""
    losses: Sequence[float]
    norms: Sequence[float] = ()
    """Empty if only a forward pass was affordable."""
    of_parameters: GradientNorms = field(default_factory=dict)
    """Those of the first step. Empty if `norms` is."""
    timed_from: int | None = None
    """The number of warm-up steps. None: only the first steps are compared."""

    def errors(self, losses: Sequence[float], norms: Sequence[float]) -> dict[str, float | None]:
        """Return the largest relative errors of the first steps, by column. None: no norm was compared."""
        return {
            "loss_error": max(_errors(losses, self.losses[:STEPS])),
            "grad_error": max(_errors(norms, self.norms[:STEPS]), default=None),
        }

    def complaint(self, losses: Sequence[float], norms: Sequence[float], dtype: str) -> str | None:
        """Return why a run is wrong, with the first step whose loss or norm differs, or None."""
        wrong = []
        for column, name, got, expected, tolerance, growth in (
            ("loss_error", "loss", losses, self.losses, LOSS_TOLERANCE[dtype], 1.0),
            ("grad_error", "gradient norm", norms, self.norms, NORM_TOLERANCE[dtype], NORM_GROWTH),
        ):
            for step, error in enumerate(_errors(got, expected[:STEPS])):
                if not error <= (limit := tolerance * growth**step):
                    values = f"the {name} of step {step + 1} is {got[step]:.6g}, expected {expected[step]:.6g}"
                    wrong.append(f"{column} {error:.3g} is above {limit:.3g} ({dtype}): {values}")
                    break
        # In fp16 a step without an update has an infinite norm.
        finite = [
            math.isfinite(loss if dtype == "float16" else loss + norm)
            for loss, norm in zip(losses, norms, strict=False)
        ]
        if not wrong and not all(finite):
            step = finite.index(False)
            values = f"a loss of {losses[step]:.6g} and a gradient norm of {norms[step]:.6g}"
            wrong.append(f"step {step + 1} has {values}: a lower learning_rate may help")
        return " and ".join(wrong) or self.timed_complaint(losses, dtype)

    def gradient_complaint(self, got: Mapping[str, float], norm: float, dtype: str) -> str | None:
        """Return why the gradients of the first step are wrong, with the parameter whose norm differs most, or None.

        They are compared if they are those of every parameter and together have the norm that the variant returned.
        Otherwise the variant keeps its gradients elsewhere.
        """
        total = math.sqrt(math.fsum(each**2 for each in got.values()))
        if not got or got.keys() != self.of_parameters.keys() or abs(total - norm) > NORM_TOLERANCE[dtype] * norm:
            return None
        least = PARAMETER_SHARE[dtype] * self.norms[0]
        errors = {name: abs(got[name] - right) / max(right, least) for name, (right, _) in self.of_parameters.items()}
        worst = max(errors, key=lambda name: errors[name])
        if errors[worst] <= PARAMETER_TOLERANCE[dtype]:
            return None
        return (
            f"the gradient norm of {worst} in step 1 is {got[worst]:.6g}, expected {self.of_parameters[worst][0]:.6g}: "
            f"its error {errors[worst]:.3g} is above {PARAMETER_TOLERANCE[dtype]:.3g} ({dtype})"
        )

    def timed_complaint(self, losses: Sequence[float], dtype: str) -> str | None:
        """Return why the losses of the timed steps, among those of all steps, are wrong, or None.

        Small differences grow with each update, so that these steps are not compared as closely as the first ones. How
        fast they grow depends on the learning rate. The tolerance is therefore a share of what training changes: the
        difference between the correct losses and the last one of the warm-up. Errors are shares of the first loss. The
        second half is compared by itself, too: a variant that stops to update there would have small errors before.
        """
        if self.timed_from is None:
            return None
        first, expected, got = self.losses[0], self.losses[self.timed_from :], losses[self.timed_from :]
        changes = _errors([self.losses[max(self.timed_from - 1, 0)]] * len(expected), expected, first)
        errors, half = _errors(got, expected, first), len(expected) // 2
        for kind, steps, start, typical, factor in (
            ("median", "", 0, median, 1.0),
            ("median", "second half of the ", half, median_low, 1.0),
            ("largest", "", 0, max, TIMED_OUTLIER),
        ):
            limit = factor * max(TIMED_TOLERANCE[dtype], TIMED_SHARE * median(changes[start:]))
            if (error := typical(errors[start:])) > limit:
                step = next(step for step in range(start, len(errors)) if errors[step] > limit)
                return (
                    f"the {kind} error of the losses of the {steps}timed steps is {error:.3g} of the first loss, above "
                    f"{limit:.3g} ({dtype}): the variant does not train in every step as in the first ones; the loss "
                    f"of timed step {step + 1} is {got[step]:.6g}, expected {expected[step]:.6g}"
                )
        return None


def _errors(got: Sequence[float], expected: Sequence[float], scale: float | None = None) -> list[float]:
    """Return the error of each expected number relative to itself or to `scale`. NaN becomes infinite."""
    pairs = zip(got, expected, strict=False)
    errors = (0.0 if a == b else abs(a - b) / (scale or max(abs(b), 1e-12)) for a, b in pairs)
    return [error if error == error else float("inf") for error in errors]


@torch.no_grad()
def gradient_norms(trainer: Trainer, right: GradientNorms, context: Context) -> dict[str, float]:
    """Return the norm of each parameter's gradient, which the trainer has accumulated, by the plain model's names.

    The parameters are those of the trainer's attribute `model`. A tensor that is not a DTensor is whole, or a shard of
    a tensor-parallel rank, by its size. A gradient that a rank has whole has this rank's norm. The result is empty if a
    rank lacks some gradient. Collective.
    """
    model = getattr(trainer, "model", None)
    named = model.named_parameters() if isinstance(model, nn.Module) else ()
    whole, shards = dict[str, float](), dict[str, float]()
    for name, grad in ((name.removeprefix("module."), _full_gradient(parameter)) for name, parameter in named):
        if grad is not None and name in right:
            norms = whole if grad.numel() == right[name][1] else shards
            norms[name] = _norm(grad) / scale_of(trainer)
    on_ranks = gather_objects((whole, shards))
    if any(names.keys() | more.keys() != right.keys() for names, more in on_ranks):
        return {}
    sums = {name: math.hypot(*(of_rank.get(name, 0.0) for _, of_rank in on_ranks)) for name in shards}
    return whole | {name: norm / math.sqrt(context.dp_size) for name, norm in sums.items()}


def _full_gradient(parameter: Tensor) -> Tensor | None:
    """Return a gradient from where the trainer keeps it, without the partitions of ZeRO or a DTensor. Collective."""
    if hasattr(parameter, "_hp_mapping"):
        from deepspeed.utils import safe_get_full_grad

        full: Tensor | None = safe_get_full_grad(parameter)
        return full
    return parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad


def _norm(grad: Tensor) -> float:
    return float(torch.linalg.vector_norm(grad, dtype=torch.float32))


def scale_of(trainer: Trainer) -> float:
    """Return the factor of the trainer's gradients: that of the loss, if it scales the loss."""
    scale = getattr(trainer, "loss_scale", None)
    return 1.0 if scale is None else float(scale)


@torch.no_grad()
def differing_replicas(trainer: Trainer, problem: TrainStep, context: Context) -> str | None:
    """Return why the weights of the replicas are wrong, or None. Collective.

    Each plain tensor of the trainer's model must have nearly the same sum on all replicas. AdamW moves a weight by
    about the learning rate, so one update in random directions moves a sum by the limit. On CPUs, the sums of this
    package's variants are equal. Where ranks add bf16 gradients in different orders they differ by up to 0.5 of the
    limit, and without a reduction by 1 to 34 limits.
    """
    if context.dp_size == 1:
        return None
    model = getattr(trainer, "model", None)
    named = list(model.named_parameters()) if isinstance(model, nn.Module) else []
    plain = {name: each for name, each in named if each.numel() and not isinstance(each, DTensor)}
    # A GPU would copy a whole matrix to float64, but not the sums of its rows.
    sums = {
        name: (float(each.sum(-1, dtype=torch.float32).double().sum()), each.numel()) for name, each in plain.items()
    }
    held = sum(each.numel() for _, each in named) * context.tp_size
    (_, first), *others = replicas = gather_objects((held, sums), context.dp_group)
    if min(held for held, _ in replicas) < 0.7 * parameters(problem):  # plain tensors are shards, as in FSDP1
        return None
    for name, (right, size) in first.items():
        for _, other in others:
            total, as_large = other.get(name, (0.0, 0))
            if as_large == size and not abs(total - right) <= problem.learning_rate * math.sqrt(size):
                return (
                    f"the replicas' weights differ, the first in {name.removeprefix('module.')}: reduce its gradient "
                    "over the data-parallel ranks"
                )
    return None


def compute_reference(problem: TrainStep, context: Context, *, whole_run: bool = False) -> Reference:
    """Return the reference, with `whole_run` of all steps if one process can train them. Keep no memory. Collective."""
    total, warmup = problem.warmup_steps + problem.steps, problem.warmup_steps
    plain = replace(problem, activation_checkpointing=True, compile=False, train_loss="torch")
    if whole_run and (trained := _trained(plain, total, context)):
        reference = Reference(f"all {total} steps by one process", *trained, timed_from=warmup)
        if reference.timed_complaint([reference.losses[max(warmup - 1, 0)]] * total, problem.dtype) is None:
            reference = replace(reference, source=f"{reference.source}; skipped updates would not show")
        return reference
    unchecked = UNCHECKED if whole_run else ""
    if trained := _trained(plain, min(STEPS, total), context):
        return Reference(f"{len(trained[0])} steps by one process{unchecked}", *trained)
    context.say("oracle: the first step's loss by a forward pass")
    loss = first_loss(plain, context)
    _free_memory(context.device)
    return Reference(f"loss of the first step by a forward pass{unchecked}", [loss])


def _trained(problem: TrainStep, steps: int, context: Context) -> Trained | None:
    """Return what `train_first_steps` returns on rank 0, on every rank, or None if it costs too much. Collective."""
    context.say(f"oracle: {steps} steps by one process, if these are not too many")
    needed = estimate_memory(problem, Distribution(replicas="ddp"), 1, 1).total
    fits = needed <= MEMORY_SHARE * rank_memory.available_bytes(context.device)
    flops = step_flops(problem) * context.dp_size * steps
    trained = None
    if context.rank == 0 and fits and flops <= MAX_FLOPS[context.device.type]:
        trained = train_first_steps(problem, steps, context)
        _free_memory(context.device)
    first: Trained | None = gather_objects(trained)[0]
    return first


def single_process_trainer(problem: TrainStep, context: Context) -> TorchTrainer:
    """Return a trainer of the whole model on this rank, with nothing distributed and with transformers' own norms."""
    model = models.build(problem, fused_norms=False)
    models.materialise(model, context.device, problem.seed)
    return TorchTrainer(problem, model, context, torch_loss)


def train_first_steps(problem: TrainStep, steps: int, context: Context) -> Trained | None:
    """Train on the micro-batches of all replicas. Return None if memory does not suffice, or for infinite losses."""
    losses, norms, of_parameters = list[float](), list[float](), GradientNorms()
    try:
        trainer = single_process_trainer(problem, context)
        for step in range(steps):
            batches = [
                micro_batch(problem, step, micro, replica, context.dp_size, context.device)
                for micro in range(problem.accumulate)
                for replica in range(context.dp_size)
            ]
            losses.append(float(trainer.accumulate(batches)))
            if step == 0:
                of_parameters = {
                    name: (_norm(each.grad) / scale_of(trainer), each.numel())
                    for name, each in trainer.model.named_parameters()
                    if each.grad is not None
                }
            norms.append(float(trainer.update()))
    except (RuntimeError, MemoryError) as error:
        if rank_memory.shortage(error) is None:
            raise
        return None
    return (losses, norms, of_parameters) if all(map(math.isfinite, [*losses, *norms])) else None


@torch.no_grad()
def first_loss(problem: TrainStep, context: Context) -> float:
    """Return the first step's mean loss by a forward pass. A rank holds one layer's weights at a time. Collective."""
    model = models.build(replace(problem, activation_checkpointing=False)).eval()
    place_buffers(model, context.device)
    names = {module: f"{name}." for name, module in model.named_modules()}
    if problem.tied:
        names[model.lm_head] = names[model.get_input_embeddings()]
    for part in models.modules_in_order(model):
        _hold_weights_only_in_forward(part, names[part], problem.seed, context.device)
    inputs = model_inputs(problem, context.device)
    total = torch.zeros((), dtype=torch.float64)
    for batch in replica_batches(problem, 0, context.dp_rank, context.dp_size, context.device):
        with autocast(problem, context.device):
            logits = model(input_ids=batch.tokens, **inputs).logits
        total += float(torch_loss(logits, batch.labels)) / problem.accumulate
        del logits
    dist.all_reduce(total, group=context.dp_group)
    return float(total) / context.dp_size


def _hold_weights_only_in_forward(part: nn.Module, name: str, seed: int, device: torch.device) -> None:
    def make(module: nn.Module, inputs: Any) -> None:
        allocate(module, device)
        fill(module, name, seed)

    def drop(module: nn.Module, inputs: Any, output: Any) -> None:
        for owner in module.modules():
            for parameter_name, parameter in list(owner.named_parameters(recurse=False)):
                setattr(owner, parameter_name, nn.Parameter(parameter.detach().to("meta")))

    part.register_forward_pre_hook(make)
    part.register_forward_hook(drop)


def _free_memory(device: torch.device) -> None:
    """Free the memory of models that are no longer used."""
    gc.collect()  # the hooks and the parameters of a module refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()
