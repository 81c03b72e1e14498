"""Exchanges by collectives: of the whole table, or of touched rows alone, which travel to the ranks that own them."""

import torch
from torch import Tensor

from tpbench.workloads.embedding_grad.exchanges import Exchange, ExchangeContext, Phase
from tpbench.workloads.embedding_grad.exchanges.row_kernels import merge_rows
from tpbench.workloads.embedding_grad.exchanges.search import row_finder
from tpbench.workloads.embedding_grad.problem import EmbeddingGrad


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
        size = self.comm.world_size * inputs.rows_per_rank
        self.positions = torch.empty(size + 1, dtype=torch.int32, device=inputs.device)
        """By rank and row of this slice, the position of that rank's row among those received, and -1 for no row. The
        last element is the position of a row of another owner."""
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
        rows, rank, size = self.finder.rows(), self.inputs.rank, self.inputs.rows_per_rank
        self.sent_rows, own_rows = rows.tensor_split([sum(self.send_counts)])  # own rows come last
        row = torch.cat((self.exchanged(self.sent_rows), own_rows)) - self.inputs.bounds[rank]
        counts = [*enumerate(self.receive_counts), (rank, len(own_rows))]
        line = torch.cat([row.new_full((count,), source * size) for source, count in counts])
        place = torch.where((row >= 0) & (row < size), line + row, len(self.positions) - 1)
        self.positions.fill_(-1)
        self.positions[place] = torch.arange(len(row), dtype=torch.int32, device=row.device)

    def exchanged(self, sent: Tensor) -> Tensor:
        """Return what this rank receives if each rank sends a line for each of its rows to send."""
        received = sent.new_empty(sum(self.receive_counts), *sent.shape[1:])
        self.comm.all_to_all(received, sent, self.receive_counts, self.send_counts)
        return received

    def gather(self) -> None:
        """Copy the rows to send out of the table."""
        self.sent_values = self.inputs.grad.index_select(0, self.sent_rows)

    def exchange_values(self) -> None:
        """Receive the rows."""
        self.received_values = self.exchanged(self.sent_values)

    def merge(self) -> None:
        """Replace this rank's slice by the mean."""
        own, rank, scale = self.inputs.own_slice, self.inputs.rank, 1.0 / self.comm.world_size
        table = self.positions[:-1].view(self.comm.world_size, -1)
        merge_rows(own, self.received_values, table, rank=rank, scale=scale)

    def result(self) -> Tensor:
        if int(self.positions[-1]) >= 0:
            raise RuntimeError(f"rank {self.inputs.rank} was sent rows that it does not own")
        return self.inputs.own_slice

    def release(self) -> None:
        self.sent_rows = self.sent_values = self.received_values = self.inputs.grad.new_empty(0)
