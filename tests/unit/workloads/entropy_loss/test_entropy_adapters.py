"""Adapters of other projects, called with functions that have the real signatures and compute with torch.

Signatures are of flash-attention 2.8.3 and Transformer Engine 2.20.2. The functions of Liger, Megatron and QuACK have
only the arguments that the adapters use. `tests/ranks` runs the kernels of flash-attention and Transformer Engine, and
the loss of torchtitan, if they are installed. All three passed the oracle on two ranks, on CPUs with torch 2.13.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.entropy_loss import alone, context, problem
from tpbench.workloads.entropy_loss import WORKLOAD, adapters
from tpbench.workloads.entropy_loss.bench import setup
from tpbench.workloads.entropy_loss.oracle import Oracle


def flash_attn_loss(
    logits: Tensor, labels: Tensor, precomputed_lse: Tensor | None = None, label_smoothing: float = 0.0,
    logit_scale: float = 1.0, lse_square_scale: float = 0.0, ignore_index: int = -100,
    inplace_backward: bool = False, process_group: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert logits.ndim == 2 and not inplace_backward and process_group is None
    losses = F.cross_entropy(logits.float() * logit_scale, labels, ignore_index=ignore_index, reduction="none")
    return losses, torch.zeros_like(losses)


def transformer_engine_loss(
    inp: Tensor, target: Tensor, label_smoothing: float = 0.0, reduce_loss: bool = False,
    dist_process_group: Any = None, ignore_idx: int = -100, is_cg_capturable: bool = False, *,
    overwrite_input: bool = False, _input: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert inp.ndim == 3 and target.shape == inp.shape[:2] and dist_process_group is None and not overwrite_input
    rows = F.cross_entropy(inp.flatten(0, 1).float(), target.flatten(), ignore_index=ignore_idx, reduction="none")
    return rows.view(target.shape)


class LigerCrossEntropyLoss:
    def __init__(self, ignore_index: int) -> None:
        self.ignore_index = ignore_index

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, ignore_index=self.ignore_index)


class LigerVocabParallelCrossEntropy(LigerCrossEntropyLoss):
    def __call__(self, logits: Tensor, target: Tensor, group: Any = None) -> Tensor:
        assert logits.ndim == 3 and target.shape == logits.shape[:2]
        rows = F.cross_entropy(
            logits.flatten(0, 1).float(), target.flatten(), ignore_index=self.ignore_index, reduction="none"
        )
        return rows.view(target.shape)


def megatron_loss(logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None) -> Tensor:
    """Compute the rows' losses without an ignored label: such a row gets the loss of another label."""
    return LigerVocabParallelCrossEntropy(-1)(logits, target.clamp(min=0))


def cross_entropy_fwd(x: Tensor, target: Tensor, ignore_index: int, return_dx: bool) -> tuple[Tensor, Tensor]:
    """The gradient is that of the sum over rows."""
    assert return_dx
    leaf = x.detach().requires_grad_()
    rows = F.cross_entropy(leaf.float(), target, ignore_index=ignore_index, reduction="none")
    return rows.detach(), torch.autograd.grad(rows.sum(), leaf)[0]


MODULES: dict[str, dict[str, Any]] = {
    "liger_kernel": {},
    "liger_kernel.transformers": {
        "LigerCrossEntropyLoss": LigerCrossEntropyLoss,
        "LigerVocabParallelCrossEntropy": LigerVocabParallelCrossEntropy,
    },
    "megatron": {},
    "megatron.core": {},
    "megatron.core.tensor_parallel": {"vocab_parallel_cross_entropy": megatron_loss},
    "quack": {},
    "quack.cross_entropy": {"cross_entropy_fwd": cross_entropy_fwd},
    "flash_attn": {},
    "flash_attn.ops": {},
    "flash_attn.ops.triton": {},
    "flash_attn.ops.triton.cross_entropy": {"cross_entropy_loss": flash_attn_loss},
    "transformer_engine": {},
    "transformer_engine.pytorch": {},
    "transformer_engine.pytorch.cross_entropy": {"parallel_cross_entropy": transformer_engine_loss},
}


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, members in MODULES.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("ignored", [0.0, 0.3])
@pytest.mark.parametrize("name", ["flash_attn", "transformer_engine", "liger", "megatron", "quack"])
def test_an_adapter_passes_the_oracle(name: str, ignored: float) -> None:
    cell = problem(loss="cross_entropy", dtype="bfloat16", ignored=ignored)
    session = setup(cell, WORKLOAD.variants[name], context())
    session.step()
    assert session.check().wrong is None


@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_the_sharded_loss_of_liger_passes_the_oracle(ignored: float) -> None:
    cell = problem(loss="cross_entropy", dtype="bfloat16", ignored=ignored)
    shard = alone(cell)
    output = adapters._liger_sharded(shard).run()
    assert Oracle(cell, shard).compare(output).complaint(cell) is None


def test_flash_attention_scales_the_logits() -> None:
    cell = problem(loss="cross_entropy", dtype="float32", logits_scale=0.5)
    assert WORKLOAD.variants["flash_attn"].unsupported_reason(cell, 1) is None
    shard = alone(cell)
    wanted = F.cross_entropy(shard.logits * 0.5, shard.target)
    assert adapters.flash_attn(cell, shard).run().loss == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize(
    "name, fields, tp_size, said",
    [
        ("flash_attn", {"loss": "reverse_kl"}, 1, "it has no reverse_kl"),
        ("flash_attn", {"vocab": 101}, 2, "a vocab that tp_size divides"),
        ("transformer_engine", {"dtype": "float16"}, 1, "bfloat16 and float32 only"),
        ("transformer_engine", {"logits_scale": 2.0}, 1, "it has no logits_scale"),
        ("torchtitan", {}, 1, "unsharded it is F.cross_entropy"),
        ("torchtitan", {"vocab": 102}, 4, "shards differ only on the last rank"),
    ],
)
def test_a_variant_refuses_what_its_function_cannot_do(
    name: str, fields: dict[str, Any], tp_size: int, said: str
) -> None:
    cell = problem(**{"loss": "cross_entropy", "dtype": "bfloat16"} | fields)
    assert said in (WORKLOAD.variants[name].unsupported_reason(cell, tp_size) or "")
