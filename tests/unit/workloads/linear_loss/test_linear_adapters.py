"""Adapters of other projects, called with functions that have the real signatures and compute with torch.

Signatures are of liger-kernel 0.8.5, cut-cross-entropy 25.6.4, verl 0.9.1 and quack-kernels 0.6.5.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.linear_loss import context, problem
from tpbench.measure.session import Context
from tpbench.workloads.linear_loss import WORKLOAD, LinearLoss, adapters
from tpbench.workloads.linear_loss.inputs import make_shard
from tpbench.workloads.linear_loss.oracle import Oracle
from tpbench.workloads.linear_loss.quack_chunks import quack_chunk_rows

calls: list[dict[str, Any]] = []


def rows_of(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each row, also of rows with an ignored label, for which it may be anything."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels.clamp(min=0), reduction="none")


def verl_kernel(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert isinstance(temperature, float) and reduction == "none"
    calls.append({"group": dist_process_group})
    log_p = (F.linear(hidden, weight).float() / temperature).log_softmax(-1)
    return log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def linear_cross_entropy(
    e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
    softcap: float | None = None, reduction: str = "mean", shift: bool | int = 0, return_lse: bool = False,
    filter_eps: float | str | None = "auto", accum_e_fp32: bool = False, accum_c_fp32: bool = False,
    filter_e_grad: bool = True, filter_c_grad: bool = True, impl: str = "cce", vocab_parallel_options: Any = None,
) -> Tensor:  # fmt: skip
    assert impl == "cce"
    calls.append({"options": vocab_parallel_options})
    return F.cross_entropy(F.linear(e, c).float(), targets, ignore_index=ignore_index, reduction=reduction)


@dataclass
class VocabParallelOptions:
    start: int
    stop: int
    group: Any = None
    reduce_e_grad: bool = True


def chunked_linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, chunk_size: int = 4096, ignore_index: int = -100,
    reduction: str = "mean", tuned: bool = True, use_scaled_exp: bool | None = None,
) -> Tensor:  # fmt: skip
    calls.append({"chunk_size": chunk_size})
    return F.cross_entropy(F.linear(x, weight).float(), target, ignore_index=ignore_index, reduction=reduction)


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    def __init__(self, ce_weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean") -> None:
        super().__init__()
        self.ignore_index, self.reduction = ignore_index, reduction

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        calls.append({})
        logits = F.linear(_input, lin_weight).float()
        return F.cross_entropy(logits, target, ignore_index=self.ignore_index, reduction=self.reduction)


def liger_fused_linear_cross_entropy_sm90(
    _input: Tensor, weight: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    calls.append({})
    return F.cross_entropy(F.linear(_input, weight).float(), target, ignore_index=ignore_index, reduction=reduction)


@dataclass
class FusedLinearCrossEntropyConfig:
    max_tokens: int
    hidden_size: int
    local_vocab_size: int
    group: str | None = None
    tiles_per_reduce: int = 1


def configure(
    *, process_groups: Any = None, bootstrap_group: Any = None, device: Any = None, flsce: Any = None, moe: Any = None
) -> bool:
    calls.append({"groups": process_groups, "bootstrap": bootstrap_group, "sizes": flsce})
    return FusedTP.supported


class FusedTP:
    supported: ClassVar = True

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, tp_group: Any, temperature: float = 1.0,
        ignore_index: int = -100, tiles_per_reduce: int = 1, return_entropy: bool = False,
    ) -> Tensor:  # fmt: skip
        calls.append({"group": tp_group})
        return rows_of(_input, weight, target)


MODULES = {
    "verl": {},
    "verl.utils": {},
    "verl.utils.kernel": {},
    "verl.utils.kernel.kernels": {},
    "verl.utils.kernel.linear_cross_entropy": {"linear_cross_entropy": verl_kernel},
    "cut_cross_entropy": {
        "linear_cross_entropy": linear_cross_entropy, "VocabParallelOptions": VocabParallelOptions,
    },
    "quack": {},
    "quack.linear_cross_entropy": {"chunked_linear_cross_entropy": chunked_linear_cross_entropy},
    "liger_kernel": {},
    "liger_kernel.transformers": {"LigerFusedLinearCrossEntropyLoss": LigerFusedLinearCrossEntropyLoss},
    "liger_kernel.ops": {},
    "liger_kernel.ops.cutedsl": {},
    "liger_kernel.ops.cutedsl.ops": {},
    "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90": {
        "liger_fused_linear_cross_entropy_sm90": liger_fused_linear_cross_entropy_sm90,
    },
    "liger_kernel.ops.configure": {
        "configure": configure, "FusedLinearCrossEntropyConfig": FusedLinearCrossEntropyConfig,
    },
    "liger_kernel.ops.fused_linear_scaled_cross_entropy": {"LigerFusedLinearScaledCrossEntropyTPFunction": FusedTP},
}  # fmt: skip


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.clear()
    for variable in adapters.NVSHMEM_ENVIRONMENT:
        monkeypatch.setenv(variable, "")  # so that it is restored
    for name, contents in MODULES.items():
        module = ModuleType(name)
        vars(module).update({"__path__": [], **contents})
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name", ["verl", "cut_cross_entropy", "quack", "liger", "liger_cutedsl", "liger_native"])
@pytest.mark.parametrize("fields", [{}, {"ignored": 0.5}, {"mode": "forward"}], ids=str)
def test_results_agree_with_the_oracle(name: str, fields: dict[str, Any]) -> None:
    cell = problem(dtype="float32", **fields)
    shard = make_shard(cell, context())
    output = getattr(adapters, name)(cell, shard).run()
    assert calls
    assert Oracle(cell, shard).compare(output).complaint("float32") is None


@pytest.mark.parametrize("mode", ["train", "forward"])
def test_verl_returns_the_entropy_of_each_row(mode: Any) -> None:
    cell = problem(dtype="float32", ignored=0.5, entropy=True, mode=mode)
    shard = make_shard(cell, context())
    output = adapters.verl(cell, shard).run()
    assert output.entropy is not None and not output.entropy.requires_grad
    assert Oracle(cell, shard).compare(output).complaint("float32") is None


@pytest.mark.parametrize("fields", [{}, {"entropy": True}, {"mode": "forward", "entropy": True}], ids=str)
def test_verl_computes_log_probabilities(fields: dict[str, Any]) -> None:
    cell = problem(loss="logprob", dtype="float32", ignored=0.5, temperature=1.9, **fields)
    shard = make_shard(cell, context())
    output = adapters.verl(cell, shard).run()
    assert Oracle(cell, shard).compare(output).complaint("float32") is None


@pytest.mark.parametrize(
    ("tokens", "hidden", "rows"),
    [
        (8192, 8192, 4096), (8192, 4096, 8192), (4096, 4096, 2048), (65536, 4096, 8192), (4200, 128, 8192),
        (2048, 2048, 1024), (100, 4096, 4096),
        (100, 128, None),
    ],
)  # fmt: skip
def test_no_chunk_of_quack_has_as_many_rows_as_hidden_columns(tokens: int, hidden: int, rows: int | None) -> None:
    assert quack_chunk_rows(problem(tokens=tokens, hidden=hidden)) == rows


def sharded(name: str, cell: LinearLoss) -> Any:
    """Prepare a variant on the second of two ranks, in a group that nothing communicates through, and run it."""
    second = Context(1, 2, 1, 2, 0, 1, object(), None, torch.device("cpu"))  # type: ignore[arg-type]
    shard = make_shard(cell, second)
    shard = replace(shard, labels=torch.zeros(cell.tokens, dtype=torch.int64))
    getattr(adapters, name)(cell, shard).run()
    return shard.group


def test_groups_and_shards_are_passed() -> None:
    cell = problem(vocab=96, mode="forward")
    group = sharded("cut_cross_entropy", cell)
    assert calls.pop() == {"options": VocabParallelOptions(48, 96, group, True)}
    group = sharded("verl", cell)
    assert calls.pop() == {"group": group}
    group = sharded("liger_native", cell)
    sizes = FusedLinearCrossEntropyConfig(cell.tokens, cell.hidden, 48, "tp")
    assert calls == [{"groups": {"tp": group}, "bootstrap": group, "sizes": sizes}, {"group": group}]


def test_the_memory_of_nvshmem_is_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's peak does not count it. The column has that of the rank with the most."""
    in_use = iter([2**30, 13 * 2**30])
    monkeypatch.setattr(adapters, "_bytes_of_others", lambda device: next(in_use))
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, operation: tensor.mul_(2))
    cell = problem(vocab=96)
    assert adapters.liger_native(cell, make_shard(cell, context())).columns() == {"workspace_gib": 24.0}


def test_liger_without_its_native_kernel_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger would fall back to other kernels."""
    monkeypatch.setattr(FusedTP, "supported", False)
    with pytest.raises(RuntimeError, match="does not support this device"):
        sharded("liger_native", problem(vocab=96))


@pytest.mark.parametrize(
    ("name", "fields", "tp_size", "said"),
    [
        ("linear_verl", {"hidden": 64}, 1, "hidden to divide by 128, got 64"),
        ("linear_verl", {"hidden": 128, "loss": "forward_kl"}, 1, "no forward_kl"),
        ("linear_verl", {"hidden": 128}, 2, None),
        ("linear_verl", {"hidden": 128, "loss": "logprob", "temperature": 1.9}, 2, None),
        ("linear_cce", {"loss": "logprob"}, 1, "no logprob, only cross_entropy"),
        ("linear_quack", {"tokens": 9, "vocab": 96}, 1, "that 8 divides"),
        ("linear_quack", {"tokens": 16, "vocab": 96}, 1, None),
        ("linear_quack", {"tokens": 16, "vocab": 96, "hidden": 128}, 1, "more or fewer rows than hidden=128"),
        ("linear_quack", {"tokens": 16, "vocab": 96}, 2, "for one GPU"),
        ("linear_liger_cutedsl", {"tokens": 128, "vocab": 256}, 1, None),
        ("linear_liger_cutedsl", {"tokens": 128, "vocab": 256}, 2, "for one GPU"),
        ("linear_liger_cutedsl", {"tokens": 128, "vocab": 256, "mode": "forward"}, 1, "in its forward pass"),
        ("linear_liger_cutedsl", {"tokens": 64, "vocab": 256}, 1, "tokens that 128 divides"),
        ("linear_liger_cutedsl", {"tokens": 128, "vocab": 384}, 1, "a vocab that 256 divides"),
        ("linear_liger_cutedsl", {"tokens": 128, "vocab": 256, "dtype": "float16"}, 1, "needs bfloat16"),
        ("linear_liger_native", {}, 1, "a group of ranks"),
        ("linear_liger_native", {"dtype": "float16"}, 2, "only bfloat16"),
        ("linear_liger_native", {}, 2, "a vocab that tp_size divides"),
        ("linear_liger_native", {"vocab": 96}, 2, None),
    ],
)
def test_problems_that_a_peer_does_not_do(name: str, fields: dict[str, Any], tp_size: int, said: str | None) -> None:
    reason = WORKLOAD.variants[name].unsupported_reason(problem(**fields), tp_size)
    assert reason is None if said is None else said in str(reason)


@pytest.mark.parametrize(
    ("version", "able"), [("25.1.1", False), ("25.4.2", False), ("25.4.3", True), ("25.6.4", True)]
)
def test_cut_cross_entropy_shards_the_vocabulary_from_a_version_on(
    monkeypatch: pytest.MonkeyPatch, version: str, able: bool
) -> None:
    monkeypatch.setattr("tpbench.packages.installed", lambda name: True)
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    reason_of = WORKLOAD.variants["linear_cce"].unsupported_reason
    assert (reason_of(problem(), 2) is None) == able
    assert reason_of(problem(), 1) is None
