"""Exchanges by collectives: of the whole table, or of touched rows alone, which travel to the ranks that own them."""

import itertools

import torch
from torch import Tensor

from tpbench.workloads.embedding_grad.exchanges import Exchange, ExchangeContext, Phase
from tpbench.workloads.embedding_grad.problem import EmbeddingGrad
from tpbench.workloads.embedding_grad.row_operations.merge_kernel import merge_rows, place_rows
from tpbench.workloads.embedding_grad.row_operations.row_kernels import gather_rows
from tpbench.workloads.embedding_grad.row_operations.search import MisplacedRow, row_finder


class DenseReduceScatter(Exchange):
    """Reduce-scatter: each owner gets its part of the mean, as a sharded optimizer needs it."""

    def __init__(self, problem: EmbeddingGrad, context: ExchangeContext) -> None:
        super().__init__(context.inputs, context.comm)
        self.output: Tensor | None = None
        self.phases = (Phase("reduce", self.reduce),)

    def reduce(self) -> None:
        """Run the collective."""
        self.output = torch.empty_like(self.inputs.own_slice)
        self.comm.reduce_scatter_mean(self.output, self.inputs.grad)

    def result(self) -> Tensor:
        assert self.output is not None
        return self.output

    def release(self) -> None:
        self.output = None


class SparseAllToAll(Exchange):
    """All-to-alls of counts, of row numbers and of rows, which the owner merges. Rows of this rank stay in place.

    The result replaces this rank's slice of the gradient. The sums of touched rows are in fp32, in the order of ranks,
    with one rounding.
    """

    def __init__(self, problem: EmbeddingGrad, context: ExchangeContext) -> None:
        super().__init__(context.inputs, context.comm)
        inputs = self.inputs
        self.finder = row_finder(inputs)
        self.overwrites = inputs.own_slice
        self.release()
        shape = (self.comm.world_size, inputs.rows_per_rank)
        self.table = torch.empty(shape, dtype=torch.int32, device=inputs.device)
        """By rank and row of this slice, the position of that rank's row among those received."""
        self.misplaced = torch.zeros(1, dtype=torch.int32, device=inputs.device)
        self.phases = (
            Phase("counts", self.exchange_counts, after="batch", on_host=True),
            Phase("ids", self.prepare_merge, after="forward"),
            Phase("gather", self.gather),
            Phase("values", self.exchange_values),
            Phase("merge", self.merge),
        )

    def exchange_counts(self) -> None:
        """Find this rank's touched rows and gather the counts of all ranks. All later phases run on the device."""
        rank = self.inputs.rank
        counts = self.comm.gather_counts(self.finder.find())  # by the rank that touched them, then by their owner
        self.send_counts = [0 if owner == rank else count for owner, count in enumerate(counts[rank])]
        self.receive_counts = [0 if source == rank else row[rank] for source, row in enumerate(counts)]

    def prepare_merge(self) -> None:
        """Exchange the row numbers, from which follows where the merge finds each row."""
        rows, rank = self.finder.rows(), self.inputs.rank
        self.sent_rows = rows[: sum(self.send_counts)]
        starts = itertools.accumulate(self.receive_counts, initial=0)
        place_rows(
            rows[sum(self.send_counts) :],  # own rows come last
            self.exchanged(self.sent_rows),
            list(zip(starts, self.receive_counts, strict=False)),
            rank=rank,
            first_row=self.inputs.bounds[rank],
            table=self.table,
            misplaced=self.misplaced,
        )

    def exchanged(self, sent: Tensor) -> Tensor:
        """Return what this rank receives if each rank sends a line for each of its rows to send."""
        received = sent.new_empty(sum(self.receive_counts), *sent.shape[1:])
        self.comm.all_to_all(received, sent, self.receive_counts, self.send_counts)
        return received

    def gather(self) -> None:
        """Copy the rows to send out of the table."""
        table, rows = self.inputs.grad, self.sent_rows
        values = table.new_empty(len(rows), table.shape[1])
        self.sent_values = gather_rows(table, rows, values) if table.is_cuda else table.index_select(0, rows)

    def exchange_values(self) -> None:
        """Receive the rows."""
        self.received_values = self.exchanged(self.sent_values)

    def merge(self) -> None:
        """Replace this rank's slice by the mean."""
        own, rank, scale = self.inputs.own_slice, self.inputs.rank, 1.0 / self.comm.world_size
        merge_rows(own, self.received_values, self.table, rank=rank, scale=scale)

    def result(self) -> Tensor:
        if misplaced := int(self.misplaced):
            raise MisplacedRow(f"rank {self.inputs.rank} was sent {misplaced} rows that it does not own")
        return self.inputs.own_slice

    def release(self) -> None:
        self.sent_rows = self.sent_values = self.received_values = self.inputs.grad.new_empty(0)
