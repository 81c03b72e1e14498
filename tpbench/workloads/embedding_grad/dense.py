"""The dense collectives, which send the whole table whatever was touched."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpbench.workloads.embedding_grad import traffic
from tpbench.workloads.embedding_grad.exchange import Phase
from tpbench.workloads.embedding_grad.inputs import Inputs
from tpbench.workloads.embedding_grad.wire import Wire


class DenseReduceScatter:
    """Each owner gets its part of the sum: what a sharded optimizer uses."""

    writes = None

    def __init__(self, inputs: Inputs, wire: Wire) -> None:
        self.inputs, self.wire = inputs, wire
        self.output: Tensor | None = None
        self.phases = (Phase("reduce", self.reduce),)

    def reduce(self) -> None:
        """The one collective."""
        self.output = torch.empty_like(self.inputs.own)
        self.wire.reduce_scatter_mean(self.output, self.inputs.grad)

    def result(self) -> Tensor:
        assert self.output is not None
        return self.output

    def release(self) -> None:
        self.output = None

    def formula(self) -> list[int]:
        size = self.wire.world_size
        return [traffic.dense_reduce_scatter(len(self.inputs.grad), self.inputs.row_bytes, size)] * size

    def facts(self) -> dict[str, Any]:
        return {"chosen": "dense"}

    def known_rows(self) -> None:
        return None


class DenseAllReduce:
    """Everybody gets the whole mean, in the gradient's place: what unsharded data parallelism does."""

    def __init__(self, inputs: Inputs, wire: Wire) -> None:
        self.inputs, self.wire = inputs, wire
        self.writes = inputs.grad
        self.phases = (Phase("reduce", lambda: wire.all_reduce_mean(inputs.grad)),)

    def result(self) -> Tensor:
        return self.inputs.own

    def release(self) -> None:
        """It needs no memory of its own."""

    def formula(self) -> list[int]:
        size = self.wire.world_size
        return [traffic.dense_all_reduce(len(self.inputs.grad), self.inputs.row_bytes, size)] * size

    def facts(self) -> dict[str, Any]:
        return {"chosen": "dense"}

    def known_rows(self) -> None:
        return None
