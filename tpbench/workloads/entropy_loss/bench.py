"""The entropy loss on a rank: its shard, its counted bytes, and the comparison with the oracle."""

from __future__ import annotations

from tpbench.comm.collectives import gather_objects
from tpbench.measure.session import Context, Costs, Verdict
from tpbench.workloads.entropy_loss.inputs import Output, Shard, make_shard
from tpbench.workloads.entropy_loss.oracle import Oracle, bytes_moved
from tpbench.workloads.entropy_loss.problem import WORKLOAD, EntropyLoss

WORKLOAD.inputs(make_shard)


@WORKLOAD.costs
def costs(problem: EntropyLoss, rank: Context) -> Costs:
    """Return the unavoidable bytes of a rank with the most columns."""
    return Costs(bytes_moved(problem, rank.tp_size), bytes_communicated=0)


@WORKLOAD.check(Output)
def check(problem: EntropyLoss, shard: Shard, output: Output, rank: Context) -> Verdict:
    """Compare an output with the oracle: the mean loss and the largest errors of all data-parallel replicas."""
    verdict = Oracle(problem, shard).compare(output)
    if rank.dp_size == 1:
        return verdict
    columns, wrong = zip(*gather_objects((verdict.columns, verdict.wrong), rank.dp_group), strict=True)
    merged = {
        **verdict.columns,
        "loss_value": sum(each["loss_value"] for each in columns) / len(columns),
        "loss_identical": all(each["loss_identical"] for each in columns),
        **{name: max(each[name] for each in columns) for name in ("loss_error", "grad_error")},
    }
    reasons = [f"replica {replica}: {reason}" for replica, reason in enumerate(wrong) if reason]
    return Verdict(merged, reasons[0] if reasons else None)
