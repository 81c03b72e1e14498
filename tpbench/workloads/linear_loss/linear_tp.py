"""linear_tp and linear_unfused: the kernels of this project."""

from typing import Any, Literal

import torch

from tpbench.kernels import LaunchRecord, LinearEntropyLossResult, LinearLaunchRecord, entropy_loss, linear_entropy_loss
from tpbench.workloads.linear_loss.in_torch import bytes_of_gradient, logits_of_teacher, with_products
from tpbench.workloads.linear_loss.inputs import Output, Shard, Step
from tpbench.workloads.linear_loss.problem import LinearLoss
from tpbench.workloads.losses.inputs import kernel_options


def _upstream(problem: LinearLoss, shard: Shard) -> dict[str, Any]:
    """Return the options of a call that gets the gradients by log-probabilities and entropies, with the mean."""
    assert shard.upstream is not None
    of_logprob, of_entropy = shard.upstream
    return {"reduction": "sum", "row_grad": of_logprob, "entropy_grad": of_entropy if problem.entropy else None}


def prepare(problem: LinearLoss, shard: Shard) -> Step:
    """Prepare a call of `tpbench.kernels.linear_entropy_loss`, or two calls for logprob with gradients.

    A policy's upstream gradients depend on its log-probabilities, so that a second call computes the logits again.
    """
    hows: list[LinearLaunchRecord] = []  # of the calls of the last iteration
    main_grad = torch.zeros_like(shard.weight, dtype=torch.float32) if problem.main_grad else None
    common = kernel_options(problem, shard)
    workspace: Any = "auto" if problem.logits_gib is None else problem.logits_gib

    def call(**options: Any) -> LinearEntropyLossResult:
        result = linear_entropy_loss(
            shard.hidden, shard.weight, shard.target,
            hidden_sharded=problem.sequence_parallel, workspace_gib=workspace, logits_dtype=problem.logits_dtype,
            **common, **options,
        )  # fmt: skip
        hows.append(result.how)
        return result

    def run() -> Output:
        hows.clear()
        if shard.upstream is None:
            rows = gradients = call(grad=problem.trains, weight_grad=main_grad)
        else:
            rows = call(grad=False)
            gradients = call(weight_grad=main_grad, **_upstream(problem, shard))
        return Output(rows.loss, rows.row_loss, rows.entropy, gradients.grad_hidden, gradients.grad_weight)

    return Step(
        run,
        lambda: sum(how.bytes_sent for how in hows),
        lambda: {"chunks": hows[-1].chunks, "chunk_rows": hows[-1].chunk_rows},
        None if main_grad is None else main_grad.zero_,
    )


def prepare_unfused(problem: LinearLoss, shard: Shard) -> Step:
    """Prepare the products of all rows around a call of `tpbench.kernels.entropy_loss`, or two for logprob."""
    hows: list[LaunchRecord] = []  # of the calls of the last iteration

    def run() -> Output:
        logits = shard.hidden @ shard.weight.t()
        target = logits_of_teacher(shard)
        options = kernel_options(problem, shard)
        grad: Literal["in_place", "none"] = "in_place" if problem.trains and shard.upstream is None else "none"
        result = entropy_loss(logits, target, grad=grad, **options)
        hows[:] = [result.how]
        if shard.upstream is not None:
            second = entropy_loss(logits, target, grad="in_place", **options, **_upstream(problem, shard))
            hows.append(second.how)
        return with_products(shard, result.loss, result.row_loss, result.entropy, logits if problem.trains else None)

    return Step(run, lambda: sum(how.bytes_sent for how in hows) + bytes_of_gradient(problem, shard))
