"""Problems and contexts for the tests of this workload."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tpbench import packages
from tpbench.kernels import LOSSES as LOSSES
from tpbench.measure.session import Context, Verdict
from tpbench.workloads import Workload
from tpbench.workloads.entropy_loss import EntropyLoss
from tpbench.workloads.entropy_loss.bench import Oracle, inputs
from tpbench.workloads.entropy_loss.inputs import Output, Shard

DTYPES = ("float32", "float16", "bfloat16")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def context(
    here: Rank | None = None, *, tp_rank: int = 0, tp_size: int = 1, dp_rank: int = 0, dp_size: int = 1
) -> Context:
    """Return the context of a rank of a real, tensor-parallel group, or of a single rank at any place of a mesh."""
    if here is not None:
        tp_rank, tp_size = here.rank, here.world_size
    group: Any = None if here is None else here.group
    where = device() if here is None else here.device
    return Context(tp_rank, tp_size * dp_size, tp_rank, tp_size, dp_rank, dp_size, group, group, where)


def problem(**fields: Any) -> EntropyLoss:
    """Return a small problem with a prime number of columns."""
    return EntropyLoss(**{"tokens": 13, "vocab": 101, **fields})


def alone(cell: EntropyLoss) -> Shard:
    """Return the whole problem on one rank."""
    return inputs(cell, context())


def _errors(verdict: Verdict) -> dict[str, Any]:
    return {name: value for name, value in verdict.columns.items() if name.endswith("_error")}


def check_variant(workload: Workload, name: str, tp_size: int, cells: Sequence[Any], run: Callable[..., Any]) -> None:
    """Check that ranks agree on a right verdict of each problem, or skip the test. run: (rank or None, name)."""
    variant = workload.variants[name]
    if missing := packages.missing(variant.requires):
        pytest.skip(f"needs {missing}")
    if (variant.requires_cuda is True and not torch.cuda.is_available()) or not enough_gpus(tp_size):
        pytest.skip("needs GPUs")
    if not cells:
        pytest.skip("supports none of the problems")
    alone = tp_size == 1 and "megatron" not in variant.requires  # which takes the group of a single rank
    ranks = [run(None, name)] if alone else run_on_ranks(tp_size, run, name)
    for each in zip(*ranks, strict=True):
        cell, verdict = each[0]
        assert verdict.wrong is None, (cell, verdict)
        assert verdict.columns["loss_identical"], cell
        # Kernels of shards of different widths may differ in their blocks, so these columns aren't compared.
        assert all(verdict.wrong == other.wrong and _errors(verdict) == _errors(other) for _, other in each), cell


def trace_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch.compile only trace without a GPU: a compiler may be missing. fullgraph=True raises where a graph
    breaks."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def right_loss(oracle: Oracle) -> float:
    """Return the mean loss over the rows that count."""
    return float(oracle.row_loss.sum()) * oracle.inverse_count


def right_gradient(oracle: Oracle) -> torch.Tensor:
    """Return the gradient of the mean loss by the local logits, in float64."""
    rows = slice(None)
    log_p, log_q = oracle.log_probabilities(rows)
    return oracle.gradient_of_mean(*oracle.losses(log_p, log_q, rows)[1:], rows)[0]


def right(oracle: Oracle) -> Output:
    """Return a perfect variant's output: the oracle's, rounded."""
    grad = right_gradient(oracle).to(oracle.shard.logits.dtype)
    return Output(torch.tensor(right_loss(oracle), device=grad.device).float(), oracle.row_loss.float(), grad)
