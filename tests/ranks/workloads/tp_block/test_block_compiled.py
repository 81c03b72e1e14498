"""torch.compile's front end on the block, and the pass that fuses collectives with products, without a GPU."""

import copy
from collections import Counter
from typing import Any
from unittest import mock

import torch

from tests.support.ranks import Rank, run_on_ranks
from tests.support.tp_block import block_context, largest_error, problem
from tpbench.workloads.tp_block.problem import TOLERANCE


def fusions(here: Rank) -> tuple[list[dict[str, int]], float]:
    """Return the operations that the pass leaves in each graph, and the largest error of a row."""
    import torch.distributed._symmetric_memory as symmetric
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass

    from tpbench.comm.parallel_linears import SequentialSchedule
    from tpbench.workloads.tp_block.execution.prepared import compiled, prepare

    found: list[dict[str, int]] = []

    def compiler(module: torch.fx.GraphModule, _: Any) -> Any:
        graph = copy.deepcopy(module.graph)
        # The pass only asks whether the group supports symmetric memory.
        with symmetric._test_mode(), mock.patch("torch.distributed.is_nccl_available", return_value=True):
            micro_pipeline_tp_pass(graph)
        called = [str(node.target).split(".")[1] for node in graph.nodes if str(node.target).count(".") == 2]
        found.append(Counter(called))
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, decompositions=select_decomp_table())
    cell = problem(dtype="float32")
    where = block_context(here, cell)
    prepared = compiled(
        prepare(where, SequentialSchedule(here.group)),
        lambda module: torch.compile(module, backend=backend, fullgraph=True, dynamic=False),
    )
    error = largest_error(cell, where, prepared)
    assert prepared.without_communication is not None
    prepared.without_communication.step()
    return found, error


def test_the_pass_finds_every_collective_forward_and_backward() -> None:
    for graphs, error in run_on_ranks(2, fusions):
        assert error <= TOLERANCE["float32"]
        assert len(graphs) == 4, "one graph forward, one backward; the same without communication"
        assert not {"fused_all_gather_matmul", "fused_matmul_reduce_scatter"} & {*graphs[2], *graphs[3]}
        for each in graphs[:2]:
            assert each["fused_all_gather_matmul"] == each["fused_matmul_reduce_scatter"] == 2
            assert not {"all_gather_into_tensor", "reduce_scatter_tensor"} & each.keys()
