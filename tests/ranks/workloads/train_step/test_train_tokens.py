"""How tokens are shared out over tensor-parallel ranks: without copies, and so that async-TP finds its products."""

from __future__ import annotations

import shutil
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx import Graph
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks.workloads.train_step.test_train_right import LOSS, NORM, TENSOR
from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.train_step import compare
from tpbench.workloads.train_step.tensor_parallel import Tokens

BATCH, LENGTH, WIDTH = 3, 4, 5


class Operations(TorchDispatchMode):
    """Counts what is dispatched, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func._opname] += 1
        return func(*args, **(kwargs or {}))


def there_and_back(here: Rank) -> dict[str, Any]:
    """Gather shares, scatter what was gathered, and the gradients of both."""
    tokens = Tokens(here.group, LENGTH)
    everybody = torch.arange(BATCH * LENGTH * WIDTH, dtype=torch.float32, device=here.device)
    share = everybody.view(1, -1, WIDTH).chunk(here.world_size, 1)[here.rank].clone().requires_grad_()
    with Operations() as operations:
        gathered = tokens.gather(share)
        scattered = tokens.scatter(gathered)
        scattered.backward(torch.ones_like(scattered) * (here.rank + 1))
    assert share.grad is not None
    return {"count": operations.count, "gathered": gathered, "scattered": scattered, "gradient": share.grad}


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
def test_tokens_are_gathered_and_scattered_without_copies() -> None:
    """Three sequences by two ranks: a rank's share ends within one."""
    everybody = torch.arange(BATCH * LENGTH * WIDTH, dtype=torch.float32)
    for rank, found in enumerate(run_on_ranks(2, there_and_back)):
        share: Tensor = everybody.view(1, -1, WIDTH).chunk(2, 1)[rank]
        assert found["gathered"].equal(everybody.view(BATCH, LENGTH, WIDTH))
        assert found["scattered"].equal(2 * share)
        # Of each rank's gathered tokens the gradient is the scattered ones': summed over two ranks.
        assert found["gradient"].equal(torch.full_like(share, 2.0 * (rank + 1)))
        # Not copy_, of which gloo has its own.
        assert not {"clone", "cat"} & found["count"].keys(), found["count"]


FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
ALONE = ("all_gather_into_tensor", "reduce_scatter_tensor")


def compiled(here: Rank, fields: dict[str, Any]) -> tuple[dict[str, Any], list[Counter[str]]]:
    """What `compare` finds of the variant with async-TP, and the collectives in each of its graphs in compiling order,
    in one with a product or alone. On a CPU the fused operations are torch's fallbacks for them."""
    import torch._inductor.config as inductor
    from torch.distributed import _symmetric_memory as symmetric_memory

    graphs: list[Counter[str]] = []

    def look(graph: Graph) -> None:
        names = [getattr(node.target, "_opname", "") for node in graph.nodes]
        graphs.append(Counter(name for name in names if name in FUSED + ALONE))

    torch.compiler.reset()
    with (
        inductor.patch(
            # The first two are the variant's to set.
            _micro_pipeline_tp=False,
            post_grad_custom_pre_pass=None,
            post_grad_custom_post_pass=look,
            force_disable_caches=True,
        ),
        mock.patch("torch.distributed.is_nccl_available", lambda: True),
        torch.library._scoped_library("symm_mem", "IMPL") as library,
    ):
        for name in FUSED:
            library.impl(name, getattr(symmetric_memory, f"_{name}_fallback"), "CPU")
        found = compare(here, "fsdp_dtensor_async", 2, {"compile": True, **fields})
    torch.compiler.reset()
    return found, graphs


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles for CPUs with g++")
@pytest.mark.parametrize("fields", [{"batch_size": 1}, {"batch_size": 2, "activation_checkpointing": True}], ids=str)
def test_async_tp_fuses_every_product_with_its_collective(fields: dict[str, Any]) -> None:
    """Attention and feed-forward: tokens are gathered for its first products and scattered after its last, gradients
    the other way round. Those of the first products' inputs are summed before they are scattered: no product's."""
    for found, (forward, backward) in run_on_ranks(2, compiled, fields, timeout_s=600.0):
        assert forward == {"fused_all_gather_matmul": 2, "fused_matmul_reduce_scatter": 2}
        # Checkpointed, as much of the forward pass again as this torch likes.
        assert backward.pop("fused_all_gather_matmul") >= 2
        assert backward.pop("fused_matmul_reduce_scatter", 0) <= 1
        assert backward == {"reduce_scatter_tensor": 2}
        assert found["loss"] < LOSS, found
        assert found["norm"] < NORM, found
        assert found["gradient"][0] < TENSOR, found
        assert found["weight"][0] < TENSOR, found
