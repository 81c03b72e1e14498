"""What a rank does with the entropy loss: make the shard, run the variant, ask the oracle."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tpbench.measure.session import Context, Costs, Verdict
from tpbench.workloads import Variant
from tpbench.workloads.entropy_loss import EntropyLoss
from tpbench.workloads.entropy_loss.inputs import make_shard
from tpbench.workloads.entropy_loss.oracle import Errors, Oracle
from tpbench.workloads.entropy_loss.output import Output, Step


class EntropyLossSession:
    """A variant on this rank's shard."""

    def __init__(self, problem: EntropyLoss, variant: Variant, context: Context) -> None:
        self.problem, self.context = problem, context
        self.shard = make_shard(problem, context)
        self.run: Step = variant.prepare(problem, self.shard)
        self.output: Output | None = None

    @property
    def costs(self) -> Costs:
        """By count; what a variant sends that decides how in a step, after one."""
        sent = self.run.bytes_communicated
        return costs(self.problem, self.context.tp_size, sent() if callable(sent) else sent)

    def step(self) -> None:
        """One iteration. The last one's gradient is freed first: two never exist at once."""
        self.release()
        self.output = self.run()

    def release(self) -> None:
        """Free the last step's output."""
        self.output = None

    def restore(self) -> None:
        """Undo what a variant that works in place did to its inputs."""
        if self.run.restore is not None:
            self.run.restore()

    def check(self) -> Verdict:
        """Compare the last step's output with the oracle, and let go of it."""
        if self.output is None:
            raise RuntimeError("there is no output to check: run step() first")
        errors = Oracle(self.problem, self.shard).compare(self.output)
        self.output = None
        errors = self._over_replicas(errors)
        columns = {
            "loss_value": errors.loss_value,
            "loss_error": errors.loss_error,
            "grad_error": errors.grad_error,
            "loss_identical": errors.loss_identical,
            **self.run.columns(),
        }
        return Verdict(columns, errors.complaint(self.problem))

    def _over_replicas(self, errors: Errors) -> Errors:
        """The mean loss and the worst errors of all data-parallel replicas, so that all ranks have the same verdict."""
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
        return Errors(float(mean) / self.context.dp_size, loss_error, grad_error, not differs)


def costs(problem: EntropyLoss, tp_size: int, bytes_communicated: int) -> Costs:
    """Each input read once and the gradient written once, on a rank that holds the most columns."""
    columns = -(-problem.vocab // tp_size)
    matrix = problem.tokens * columns * getattr(torch, problem.dtype).itemsize
    moved = 2 * matrix + 8 * problem.tokens if problem.from_labels else 3 * matrix
    return Costs(bytes_moved=moved, bytes_communicated=bytes_communicated)


def setup(problem: EntropyLoss, variant: Variant, context: Context) -> EntropyLossSession:
    """The session of one cell on this rank."""
    return EntropyLossSession(problem, variant, context)
