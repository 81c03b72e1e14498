"""The entropy loss on a rank: make the shard, run the variant, compare with the oracle."""

from __future__ import annotations

from tpbench.comm.collectives import gather_objects
from tpbench.measure.session import Context, Costs, Verdict
from tpbench.workloads import Variant
from tpbench.workloads.entropy_loss.inputs import Output, make_shard
from tpbench.workloads.entropy_loss.oracle import Oracle, bytes_moved
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
        verdict = Oracle(self.problem, self.shard).compare(self.take_output())
        verdict.columns.update(self.columns_of_variant(WORKLOAD))
        return verdict if self.context.dp_size == 1 else self._over_replicas(verdict)

    def _over_replicas(self, verdict: Verdict) -> Verdict:
        """Return the mean loss and the largest errors of all data-parallel replicas: all ranks get the same verdict."""
        columns, wrong = zip(*gather_objects((verdict.columns, verdict.wrong), self.context.dp_group), strict=True)
        merged = {
            **verdict.columns,
            "loss_value": sum(each["loss_value"] for each in columns) / len(columns),
            "loss_identical": all(each["loss_identical"] for each in columns),
            **{name: max(each[name] for each in columns) for name in ("loss_error", "grad_error")},
        }
        reasons = [f"replica {replica}: {reason}" for replica, reason in enumerate(wrong) if reason]
        return Verdict(merged, reasons[0] if reasons else None)


def setup(problem: EntropyLoss, variant: Variant, context: Context) -> EntropyLossSession:
    """Return the session of one cell on this rank."""
    return EntropyLossSession(problem, variant, context)
