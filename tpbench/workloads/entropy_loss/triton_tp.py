"""triton_tp: the kernels of this project."""

from typing import Any

from tpbench.kernels import EntropyLoss, LaunchRecord, entropy_loss
from tpbench.measure.kernel_resources import worst_resources
from tpbench.workloads.entropy_loss.inputs import Output, Shard, Step
from tpbench.workloads.entropy_loss.problem import EntropyLoss as Problem
from tpbench.workloads.losses.formulas import differentiated
from tpbench.workloads.losses.inputs import kernel_options


def prepare(problem: Problem, shard: Shard) -> Step:
    """Prepare a call of `tpbench.kernels.entropy_loss` that writes the gradient into new memory, or of its module."""
    last: LaunchRecord
    # The exchange is never all_reduce, which the variant doesn't support.
    options = kernel_options(problem, shard)
    options |= {name: getattr(problem, name) for name in ("logits_scale", "block_cap", "algorithm", "softcap")}
    options |= {name: getattr(problem, name) or 0.0 for name in ("label_smoothing", "z_loss")}

    def run() -> Output:
        nonlocal last
        result = entropy_loss(shard.logits, shard.target, **options)
        assert result.grad is not None
        last = result.how
        return Output(result.loss, result.row_loss, result.grad, entropy=result.entropy)

    def through_autograd() -> Output:
        (loss, *_), (grad,) = differentiated((shard.logits,), lambda logits: module(logits, shard.target, **shard.rows))
        return Output(loss, None, grad)

    if problem.autograd:
        run()  # the module doesn't say how it launched the same kernels
        module = EntropyLoss(**{name: options[name] for name in options.keys() - {"entropy", *shard.rows}})

    def columns() -> dict[str, Any]:
        used = {"algorithm_used": last.algorithm, "block_used": last.block}
        return used | worst_resources(last.kernels, shard.device)

    return Step(
        through_autograd if problem.autograd else run,
        bytes_communicated=lambda: last.bytes_sent,
        columns=columns,
        communicates_in_kernels=lambda: last.algorithm == "one_read",
    )
