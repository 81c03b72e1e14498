"""Async-TP fuses the exchanges of tokens between tensor-parallel ranks with products."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch.fx import Graph

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.train_step import check_errors, compare

FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
ALONE = ("all_gather_into_tensor", "reduce_scatter_tensor")


def compare_compiled(here: Rank, fields: dict[str, Any]) -> tuple[dict[str, Any], list[Counter[str]]]:
    """Compare the variant with async-TP to one process, and count the collectives in each graph in compiling order,
    fused with a product or alone. On a CPU the fused operations are torch's fallbacks."""
    import torch._inductor.config as inductor
    from torch.distributed import _symmetric_memory as symmetric_memory

    graphs: list[Counter[str]] = []

    def count_collectives(graph: Graph) -> None:
        names = [getattr(node.target, "_opname", "") for node in graph.nodes]
        graphs.append(Counter(name for name in names if name in FUSED + ALONE))

    torch.compiler.reset()
    with (
        inductor.patch(
            # The variant sets the first two.
            _micro_pipeline_tp=False,
            post_grad_custom_pre_pass=None,
            post_grad_custom_post_pass=count_collectives,
            force_disable_caches=True,
            # The graphs are what this test is about: without C++ kernels for the rest, it needs no compiler.
            fallback_by_default=True,
        ),
        mock.patch("torch.distributed.is_nccl_available", lambda: True),
        torch.library._scoped_library("symm_mem", "IMPL") as library,
    ):
        for name in FUSED:
            library.impl(name, getattr(symmetric_memory, f"_{name}_fallback"), "CPU")
        errors = compare(here, "fsdp_dtensor_async", 2, {"compile": True, **fields})
    torch.compiler.reset()
    return errors, graphs


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
@pytest.mark.parametrize("fields", [{"batch_size": 1}, {"batch_size": 2, "activation_checkpointing": True}], ids=str)
def test_async_tp_fuses_every_product_with_its_collective(fields: dict[str, Any]) -> None:
    """Attention and feed-forward gather tokens before their first products and scatter them after the last product.
    Gradients go the other way. Gradients of the first products' inputs are summed before they are scattered, so this
    reduce-scatter fuses with no product."""
    for errors, (forward, backward) in run_on_ranks(2, compare_compiled, fields, timeout_s=600.0):
        assert forward == {"fused_all_gather_matmul": 2, "fused_matmul_reduce_scatter": 2}
        # With checkpointing, the backward pass repeats a part of the forward pass, which depends on torch's version.
        assert backward.pop("fused_all_gather_matmul") >= 2
        assert backward.pop("fused_matmul_reduce_scatter", 0) <= 1
        assert backward == {"reduce_scatter_tensor": 2}
        check_errors(errors)
