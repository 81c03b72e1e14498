"""Problems of the linear loss: shapes that fit, options that do not, and inputs that do not depend on the ranks."""

from typing import Any

import pytest
import torch

from tests.support.command import ROOT
from tests.support.composed_jobs import composed
from tests.support.linear_loss import context, problem
from tpbench.job import parse_job, unsupported_reason
from tpbench.workloads.linear_loss.inputs import make_shard

SIZES = {"tokens": 12, "hidden": 16, "vocab": 101}


@pytest.mark.parametrize("shape", sorted(file.stem for file in (ROOT / "conf/shape").glob("*_head_*.yaml")))
def test_shapes_say_what_they_hold(shape: str) -> None:
    values = composed("variant=linear_tp", f"shape={shape}")
    assert f"tp{values['tp_size']}" == shape.rpartition("_")[2]
    assert unsupported_reason(parse_job(values)) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dp_size": 2}, "dp_size=2 must be 1"),
        ({"sequence_parallel": True, "tokens": 7, "tp_size": 2}, "tokens=7 to be a multiple of tp_size=2"),
        ({"main_grad": True, "mode": "forward"}, "main_grad=true needs mode=train"),
        ({"label_logit": 8.0, "loss": "reverse_kl"}, "label_logit=8.0 needs labels"),
        (
            {"loss": "policy", "temperature": 0.1},
            "temperature=0.1 would multiply logits by 10, which must be at most 4 where",
        ),
        (
            {"loss": "jsd", "temperature": 1e-4, "dtype": "float32"},
            "must be at most 1024 where they are rounded to float32",
        ),
    ],
)
def test_fields_that_do_not_fit_are_a_reason(changes: dict[str, object], said: str) -> None:
    assert said in str(unsupported_reason(parse_job({"variant": "linear_tp", "tp_size": 1, **SIZES, **changes})))


def test_variants_say_what_they_cannot_do() -> None:
    for name in ("linear_compiled", "linear_liger", "linear_liger_cutedsl", "linear_quack"):
        assert "one GPU" in str(unsupported_reason(parse_job({"variant": name, "tp_size": 2, **SIZES})))
    odd = parse_job({"variant": "linear_loss_parallel", "tp_size": 2, **SIZES})
    assert "a vocab that tp_size divides" in str(unsupported_reason(odd))
    entropy = parse_job({"variant": "linear_loss_parallel", "tp_size": 1, **SIZES, "entropy": True})
    assert "does not support entropy=true (supported by: linear_tp, linear_unfused, linear_gather" in str(
        unsupported_reason(entropy)
    )


def test_upstream_gradients_are_those_of_the_rows_that_count() -> None:
    shard = make_shard(problem(loss="logprob", tokens=400, ignored=0.3), context())
    assert shard.labels is not None and shard.upstream is not None
    counts = shard.labels >= 0
    for gradient in shard.upstream:
        assert gradient.shape == (400,) and gradient.is_contiguous()
        assert bool((gradient[counts] != 0).all()) and not bool(gradient[~counts].any())
        assert 1.9 < float(gradient[counts].std() * counts.sum()) < 2.8
    assert not torch.equal(*shard.upstream)
    assert make_shard(problem(loss="logprob", mode="forward"), context()).upstream is None


def test_the_logit_of_a_label_leads() -> None:
    shard = make_shard(problem(tokens=300, hidden=256, vocab=1009, label_logit=10.0, ignored=0.2), context())
    logits, labels = shard.hidden.double() @ shard.weight.double().t(), shard.target
    counts, others = labels >= 0, logits.std()
    of_label = logits.gather(1, labels.clamp(min=0)[:, None])[counts, 0]
    assert float(of_label.mean()) == pytest.approx(10.0, abs=0.2) and 0.4 < float(of_label.std()) < 1.0 and others < 1.1


@pytest.mark.parametrize("fields", [{"loss": "cross_entropy", "label_logit": 9.0}, {}, {"loss": "forward_kl"}])
def test_ranks_hold_parts_of_one_problem(fields: dict[str, Any]) -> None:
    whole = make_shard(problem(**fields), context())
    parts = [make_shard(problem(**fields, sequence_parallel=True), context(tp_rank=r, tp_size=3)) for r in range(3)]
    assert torch.equal(torch.cat([each.hidden for each in parts]), whole.hidden)
    assert torch.equal(torch.cat([each.weight for each in parts]), whole.weight)
    if whole.labels is None:
        assert torch.equal(torch.cat([each.target[0] for each in parts]), whole.target[0])
        assert torch.equal(torch.cat([each.target[1] for each in parts]), whole.target[1])
        assert not torch.equal(whole.target[0], whole.hidden)
    else:
        assert all(torch.equal(each.target, whole.target) for each in parts)
    logits = whole.hidden.float() @ whole.weight.float().t()
    assert 1.9 <= float(logits.std()) <= 3.8
