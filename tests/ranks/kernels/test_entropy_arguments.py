"""The arguments of `entropy_loss`: errors that name them, and algorithms that are asked for by name."""

import math
from typing import Any

import pytest
import torch

from tests.support.kernel_reference import make, make_policy, on_device
from tests.support.ranks import needs_cuda
from tpbench.kernels import How, LaunchRecord, TopK, checks, entropy_loss

ROOM = torch.zeros(5, 8, device="cuda" if torch.cuda.is_available() else "cpu")
SHARED = {"loss": "forward_kl"}
LOGITS, LABELS = make("cross_entropy", rows=4, vocab=8, device="cuda" if torch.cuda.is_available() else "cpu")
INDICES = torch.zeros(4, 8, dtype=torch.int64, device=LOGITS.device)
POLICY = on_device(make_policy(4), LOGITS.device)

ERRORS: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "logits must be a tensor", {"logits": [1.0]}),
    (TypeError, "logits must be bfloat16, float16 or float32, got float64", {"logits": LOGITS.double()}),
    (ValueError, "logits must have shape", {"logits": LOGITS[0]}),
    (TypeError, "target must be int32 or int64, the labels of", {"target": LABELS.float()}),
    (ValueError, "target must be on", {"target": torch.empty(4, dtype=torch.int64, device="meta")}),
    (ValueError, "target must have shape", {"loss": "reverse_kl", "target": LOGITS[:, :7]}),
    (ValueError, "loss must be one of cross_entropy, soft", {"loss": "kl"}),
    (TypeError, "group", {"group": "tp"}),
    (ValueError, "vocab_start must be 0 or None", {"vocab_start": 4}),
    (ValueError, "vocab_size must be at most the 8", {"vocab_size": 9}),
    (TypeError, "ignore_index", {"ignore_index": 1.5}),
    (ValueError, "logits_scale", {"logits_scale": 0.0}),
    (ValueError, "logits_scale must be finite in float32", {"logits_scale": 10**400}),
    (ValueError, "logits_scale must be .* at most 1000000", {"logits_scale": 1e38}),
    (ValueError, "temperature must be at least 2e-06", {**SHARED, "temperature": 1e-38, "logits_scale": 2.0}),
    (ValueError, "temperature must be at least 1e-06", {**POLICY, "temperature": 9e-7}),
    (ValueError, "label_smoothing smooths", {"label_smoothing": 0.1, "loss": "forward_kl", "target": LOGITS}),
    (ValueError, "z_loss", {"z_loss": math.nan}),
    (ValueError, "grad must be one of new, in_place, none", {"grad": "old"}),
    (ValueError, "grad must have shape", {"grad": LOGITS[:3]}),
    (ValueError, "grad must not overlap", {"grad": LOGITS[:1].expand(4, 8)}),
    (ValueError, "grad must not share", {"logits": ROOM[:4], "grad": ROOM[1:]}),
    (ValueError, "share memory with logits", {**SHARED, "logits": ROOM[:4], "target": ROOM[1:], "grad": "in_place"}),
    (ValueError, "share memory with grad", {**SHARED, "target": ROOM[:4], "grad": ROOM[1:]}),
    (TypeError, "logits must be a dense tensor", {"logits": LOGITS.to_sparse()}),
    (ValueError, "logits must not be a negative", {"logits": torch.zeros(4, 8, dtype=torch.cfloat).conj().imag}),
    (ValueError, "logits must have a column", {"logits": LOGITS[:, :0]}),
    (RuntimeError, "logits must be on a CUDA device", {"logits": LOGITS.to("meta"), "target": LABELS.to("meta")}),
    (ValueError, "block_cap must be 'auto' or a power of two", {"block_cap": 100}),
    (ValueError, "algorithm must be one of auto, two_reads, two_kernels, one_read", {"algorithm": "split"}),
    (ValueError, "divisor divides a sum", {"divisor": 2.0}),
    (ValueError, "row_weight must be contiguous", {**POLICY, "row_weight": ROOM[0, ::2]}),
    (TypeError, "old_logprobs must be a tensor", {**POLICY, "old_logprobs": None}),
    (TypeError, "ref_logprobs must be a tensor for loss='policy' with kl", {**POLICY, "ref_logprobs": None}),
    (TypeError, "advantages must be float32", {**POLICY, "advantages": ROOM[0, :4].double()}),
    (ValueError, "needs algorithm='two_kernels'", {"loss": lambda logprobs: logprobs, "algorithm": "one_read"}),
    (TypeError, "clip must be two numbers", {**POLICY, "clip": 0.2}),
    (ValueError, "clip belongs to loss='policy'", {"clip": (0.1, 0.2)}),
    (ValueError, "beta must be less than 1", {"loss": "jsd", "target": LOGITS, "beta": 1.0}),
    (ValueError, "two_reads.* not for loss='jsd'", {"loss": "jsd", "target": LOGITS, "algorithm": "two_reads"}),
    (ValueError, "may be a TopK for soft_cross_entropy", {"loss": "jsd", "target": TopK(LOGITS, INDICES)}),
    (TypeError, "target.indices must be int32 or int64", {**SHARED, "target": TopK(LOGITS, LOGITS)}),
    (ValueError, "target.tail must be one of drop", {**SHARED, "target": TopK(LOGITS, INDICES, "all")}),  # type: ignore[arg-type]
    (ValueError, "temperature must be 1", {**SHARED, "target": TopK(LOGITS, INDICES, "bucket"), "temperature": 0.5}),
]


@pytest.mark.parametrize(("error", "names", "changes"), ERRORS)
def test_errors_name_the_argument(error: type[Exception], names: str, changes: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"logits": LOGITS, "target": LABELS, **changes}
    with pytest.raises(error, match=names):
        entropy_loss(arguments.pop("logits"), arguments.pop("target"), **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without CUDA")
def test_one_read_needs_cuda() -> None:
    with pytest.raises(RuntimeError, match="exchange='symmetric' needs CUDA"):
        entropy_loss(LOGITS, LABELS, exchange="symmetric")
    with pytest.raises(RuntimeError, match="algorithm='one_read' needs CUDA"):
        entropy_loss(LOGITS, LABELS, algorithm="one_read")


@needs_cuda
def test_an_algorithm_asked_for_by_name_is_not_replaced() -> None:
    with pytest.raises(ValueError, match="algorithm='one_read' cannot do this: it accumulates into no tensor"):
        entropy_loss(LOGITS, LABELS, algorithm="one_read", grad=torch.zeros_like(LOGITS))
    with pytest.raises(ValueError, match="whole 16-byte vectors"):
        entropy_loss(LOGITS[:, 1:], LABELS, algorithm="one_read")


@pytest.mark.parametrize("name", ["two_reads", "two_kernels"])
def test_the_result_names_its_algorithm(name: Any) -> None:
    how = entropy_loss(LOGITS, LABELS, algorithm=name).how
    assert How is LaunchRecord and isinstance(how, How)  # which was its name before
    assert (how.algorithm, how.block, how.bytes_sent, len(how.kernels)) == (name, 16, 0, 1 + (name == "two_kernels"))


def test_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "INTERPRETED", False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        entropy_loss(*make("cross_entropy", rows=11, vocab=13))  # a form that no test has called before
