"""The bytes that ranks send in a step, their floating-point operations, and the loss that they compute."""

import contextlib
import re
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.train_step import batches_here, mesh_context, prepared, tiny_problem
from tpbench.workloads.train_step import WORKLOAD
from tpbench.workloads.train_step.estimates import bytes_communicated, step_flops


def losses_used(here: Rank, name: str, fields: dict[str, Any]) -> int:
    """Return how often a step computes tpbench's loss."""
    from tpbench.kernels import EntropyLoss

    problem, context = tiny_problem(train_loss="tpbench", **fields), mesh_context(here, 2)
    with mock.patch.object(EntropyLoss, "forward", autospec=True, side_effect=EntropyLoss.forward) as spied:
        prepared(name, problem, context).accumulate(batches_here(problem, context, 0))
    return spied.call_count


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
@pytest.mark.parametrize("name", ["fsdp_dtensor", "autotp"])
def test_train_loss_tpbench_uses_tpbenchs_loss(name: str) -> None:
    """Results cannot show which loss was used: both are correct."""
    assert run_on_ranks(2, losses_used, name, {"accumulate": 2, "vocab_parallel": False}) == [2, 2]


class SentBytes(TorchDispatchMode):
    """Sum of the bytes that a rank sends in collectives, each as a ring."""

    KINDS: ClassVar = {"all_?reduce": 2.0, "all_?gather": 1.0, "reduce_scatter": 1.0}
    """Names of operations, and how often each sends its largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            ranks = next((size for size in map(group_size, args) if size), 1)
            whole = max(
                (each.nbytes for each in tree_leaves((args, result)) if isinstance(each, torch.Tensor)), default=0
            )
            times = sum(many for kind, many in self.KINDS.items() if re.match(f"_?{kind}", func._opname))
            self.total += times * whole * (ranks - 1) / ranks
        return result


def group_size(argument: Any) -> int:
    """Return the size of a process group that is given by name or as a dispatcher's object; 0 for other arguments."""
    if isinstance(argument, str) and argument.isdigit():
        return _resolve_process_group(argument).size()
    with contextlib.suppress(RuntimeError):
        return dist.ProcessGroup.unbox(argument).size() if isinstance(argument, torch.ScriptObject) else 0
    return 0  # a reduction operator


def sent_and_counted(here: Rank, name: str, tp_size: int, fields: dict[str, Any]) -> tuple[float, int]:
    problem, context = tiny_problem(hidden_size=128, **fields), mesh_context(here, tp_size)
    trainer = prepared(name, problem, context)
    with SentBytes() as sent:
        trainer.accumulate(batches_here(problem, context, 0))
        trainer.update()
    return sent.total, bytes_communicated(
        problem, WORKLOAD.variants[name].distribution, tp_size, here.world_size // tp_size
    )


AGAIN = {"activation_checkpointing": True, "accumulate": 2}
AUTOCAST = {"dtype": "bfloat16", "autocast": True}
CASES: list[tuple[int, str, int, dict[str, Any]]] = [
    *((2, name, 2, each) for name in ("fsdp_dtensor", "autotp") for each in (
        {}, {"tied": True, **AGAIN}, {"vocab_parallel": False}, {"vocab_parallel": False, "tied": True}, AUTOCAST,
    )),
    (2, "dtensor_tp", 2, AGAIN),
    *((2, name, 1, each) for name in ("ddp", "fsdp") for each in ({}, {"tied": True, "accumulate": 2}, AUTOCAST)),
    *((2, "autotp", 1, {"zero_stage": stage, "accumulate": 2}) for stage in (0, 1, 2)),
    *((2, "autotp", 1, {"zero_stage": stage, **AUTOCAST}) for stage in (0, 1)),
    (4, "autotp", 2, {"tied": True}), (4, "fsdp_dtensor", 2, {}), (4, "dtensor_tp", 2, {}),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "name", "tp_size", "fields"), CASES, ids=str)
def test_sent_bytes_equal_counted_bytes(ranks: int, name: str, tp_size: int, fields: dict[str, Any]) -> None:
    """Some numbers per row or parameter are not counted: statistics of the loss, norms and their gradients, and
    DeepSpeed's check of the first batch."""
    if not enough_gpus(ranks):
        pytest.skip(f"needs {ranks} GPUs, or none")
    for sent, counted in run_on_ranks(ranks, sent_and_counted, name, tp_size, fields):
        assert counted * 0.99 < sent < counted * 1.03


def computed_and_counted(here: Rank, name: str, fields: dict[str, Any]) -> tuple[int, int]:
    """Return the operations of a step on this rank without norms and rotary embeddings, and their counted number."""
    problem, context = tiny_problem(attention="eager", **fields), mesh_context(here, 2)
    trainer = prepared(name, problem, context)
    with FlopCounterMode(display=False) as counter:
        trainer.accumulate(batches_here(problem, context, 0))
    return counter.get_total_flops(), step_flops(problem) // 2


REPEATED: list[tuple[str, dict[str, Any]]] = [
    ("fsdp_dtensor", {}), ("autotp", {"heads": 8, "num_layers": 1, "accumulate": 2}),
]  # fmt: skip


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
@pytest.mark.parametrize(("name", "fields"), REPEATED, ids=str)
def test_counted_operations_of_a_rank_are_what_torch_counts(name: str, fields: dict[str, Any]) -> None:
    """Some versions of transformers rotate by a product, which is not counted."""
    for computed, counted in run_on_ranks(2, computed_and_counted, name, fields):
        assert computed == pytest.approx(counted, rel=2e-3)
