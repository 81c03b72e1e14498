"""The entropy loss on a rank: make the shard, run the variant, compare with the oracle."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tpbench.measure.session import Context, Costs, Verdict
from tpbench.workloads import Variant
from tpbench.workloads.entropy_loss.inputs import Output, make_shard
from tpbench.workloads.entropy_loss.oracle import Errors, Oracle, bytes_moved
from tpbench.workloads.entropy_loss.problem import WORKLOAD, EntropyLoss
from tpbench.workloads.step import StepSession


class EntropyLossSession(StepSession[Output]):
    """A variant on this rank's shard."""

    def __init__(self, problem: EntropyLoss, variant: Variant, context: Context) -> None:
        self.problem, self.context = problem, context
        self.shard = make_shard(problem, context)
        inputs = self.inputs_of(self.shard)
        super().__init__(variant, variant.prepare(problem, self.shard), Output, inputs)

    @property
    def costs(self) -> Costs:
        """Counted costs. The bytes that a variant sends may be known only after a step."""
        return Costs(
            bytes_moved=bytes_moved(self.problem, self.context.tp_size),
            bytes_communicated=self.bytes_communicated,
            communicates_in_kernels=self.columns_of_variant(WORKLOAD).get("algorithm_used") == "one_read",
        )

    def check(self) -> Verdict:
        """Compare the output of the last step with the oracle, then free it."""
        errors = self._over_replicas(Oracle(self.problem, self.shard).compare(self.take_output()))
        columns = {
            "loss_value": errors.loss_value,
            "loss_error": errors.loss_error,
            "grad_error": errors.grad_error,
            "loss_identical": errors.loss_identical,
            **self.columns_of_variant(WORKLOAD),
        }
        return Verdict(columns, errors.complaint(self.problem))

    def _over_replicas(self, errors: Errors) -> Errors:
        """Return the mean loss and the largest errors of all data-parallel replicas: all ranks get the same verdict."""
        if self.context.dp_size == 1:
            return errors
        worst = torch.tensor(
            [errors.loss_error, errors.grad_error, not errors.loss_identical],
            dtype=torch.float64, device=self.context.device,
        )  # fmt: skip
        mean = torch.tensor(errors.loss_value, dtype=torch.float64, device=self.context.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.context.dp_group)
        dist.all_reduce(mean, dist.ReduceOp.SUM, group=self.context.dp_group)
        loss_error, grad_error, differs = worst.tolist()
        return Errors(float(mean) / self.context.dp_size, loss_error, grad_error, not differs, errors.grad_mismatch)


def setup(problem: EntropyLoss, variant: Variant, context: Context) -> EntropyLossSession:
    """Return the session of one cell on this rank."""
    return EntropyLossSession(problem, variant, context)
