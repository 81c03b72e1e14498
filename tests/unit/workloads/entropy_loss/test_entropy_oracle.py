"""The oracle against torch's own losses on whole logits, and against planted errors."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.entropy_loss import DTYPES, LOSSES, alone, problem, right, right_gradient, right_loss
from tpbench.kernels import LABEL_LOSSES
from tpbench.workloads.entropy_loss import EntropyLoss
from tpbench.workloads.entropy_loss.bench import Oracle
from tpbench.workloads.entropy_loss.inputs import Output, Shard
from tpbench.workloads.sizes import IGNORED

INF = float("inf")


TORCH_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda x, labels: F.cross_entropy(x, labels, ignore_index=IGNORED),
    "soft_cross_entropy": lambda x, t: F.cross_entropy(x, t.softmax(-1)),
    "forward_kl": lambda x, t: kl_divergence(x.log_softmax(-1), t.log_softmax(-1)),
    "reverse_kl": lambda x, t: kl_divergence(t.log_softmax(-1), x.log_softmax(-1)),
    "jsd": lambda x, t: _jsd(x.log_softmax(-1), t.log_softmax(-1)),
    "total_variation": lambda x, t: (x.softmax(-1) - t.softmax(-1)).abs().sum(-1).mean() / 2,
}
"""By loss, torch's own mean over the rows, from scaled logits and from labels or scaled target logits."""


def kl_divergence(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return the mean over the rows of KL(b || a)."""
    return F.kl_div(log_a, log_b, log_target=True, reduction="batchmean")


def _jsd(log_p: Tensor, log_q: Tensor) -> Tensor:
    mixture = ((log_p.exp() + log_q.exp()) / 2).log()
    return (kl_divergence(mixture, log_p) + kl_divergence(mixture, log_q)) / 2


def torch_loss(cell: EntropyLoss, shard: Shard) -> tuple[Tensor, Tensor]:
    """Return torch's own mean loss in float64 and its gradient by autograd."""
    leaf = shard.logits.double().requires_grad_()
    if cell.loss == "policy":
        log_p = (leaf * cell.logits_scale / cell.temperature).log_softmax(-1)
        counts = shard.target != IGNORED
        logprob = log_p.gather(1, shard.target.clamp(min=0)[:, None])[:, 0]
        ratio, advantages = (logprob - shard.rows["old_logprobs"]).exp(), shard.rows["advantages"].double()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        if cell.kl_weight:
            difference = shard.rows["ref_logprobs"] - logprob
            loss = loss + cell.kl_weight * (difference.exp() - 1 - difference)
        loss = loss[counts].sum() / max(1, int(counts.sum()))
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]
    target = shard.target if cell.from_labels else shard.target.double() * cell.logits_scale / cell.temperature
    loss = TORCH_LOSSES[cell.loss](leaf * cell.logits_scale, target)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 12),
    vocab=st.integers(1, 70),
    seed=st.integers(0, 2**31 - 1),
    loss=st.sampled_from(LOSSES),
    dtype=st.sampled_from(DTYPES),
    logits_scale=st.sampled_from([0.1, 1.0, 7.0]),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    ignored=st.sampled_from([0.0, 0.3]),
    kl_weight=st.sampled_from([0.0, 0.1]),
)
def test_the_oracle_agrees_with_torch(
    loss: str, temperature: float, ignored: float, kl_weight: float, **fields: Any
) -> None:
    labels = loss in LABEL_LOSSES
    fields |= {"ignored": ignored} if labels else {}
    fields |= {} if loss == "cross_entropy" else {"temperature": temperature}
    fields |= {"kl_weight": kl_weight} if loss == "policy" else {}
    cell = EntropyLoss(loss=loss, **fields)  # type: ignore[arg-type]
    shard = alone(cell)
    oracle = Oracle(cell, shard)
    if labels and (shard.target == IGNORED).all():
        assert right_loss(oracle) == 0 and not right_gradient(oracle).any()
        return
    loss_value, grad = torch_loss(cell, shard)
    assert right_loss(oracle) == pytest.approx(loss_value.item(), rel=1e-11, abs=1e-12)
    # Differences of logarithms near 100 cancel: some 2^-52 * 100 of each is left, and the scale multiplies it.
    torch.testing.assert_close(right_gradient(oracle), grad, rtol=1e-9, atol=1e-12 * max(1.0, cell.logits_scale))
    errors = oracle.compare(right(oracle))
    assert errors.wrong is None and errors.columns["loss_identical"]


def _negligent(output: Output, cell: EntropyLoss) -> dict[str, Output]:
    """One error each."""
    grad, rows = output.grad, output.row_loss
    assert rows is not None

    def changed(**fields: Any) -> Output:
        return dataclasses.replace(output, **fields)

    def at(value: Tensor, place: Any, new: Any) -> Tensor:
        value = value.clone()
        value[place] = new
        return value

    errors = {
        "a row's loss": changed(row_loss=at(rows, 3, rows[3] * 1.001)),
        "the mean over one row fewer": changed(loss=output.loss * cell.tokens / (cell.tokens - 1)),
        "a mean loss alone": changed(loss=output.loss * 1.0001, row_loss=None),
        "NaN loss": changed(loss=output.loss * torch.nan),
        "NaN row": changed(row_loss=at(rows, 5, torch.nan)),
        "infinite row": changed(row_loss=at(rows, 5, INF)),
        "missing 1 / count": changed(grad=grad * cell.tokens),
        "missing scale": changed(grad=grad / 1.3),
        "one wrong row": changed(grad=at(grad, 4, grad[5])),
        "sign": changed(grad=-grad),
        "zeros": changed(grad=torch.zeros_like(grad)),
        "NaN gradient": changed(grad=at(grad, (2, 2), torch.nan)),
        "infinite gradient": changed(grad=at(grad, (2, 2), INF)),
        "another dtype": changed(grad=grad.double()),
        "another shape": changed(grad=grad[:, 1:]),
    }
    if cell.from_labels:
        label = torch.where(grad == grad.amin(1, keepdim=True), 0.0, grad.float())
        errors["no one-hot"] = changed(grad=label.to(grad.dtype))
        errors["an ignored row's gradient"] = changed(grad=at(grad, (0, 0), 1e-7))
        errors["an ignored row's loss"] = changed(row_loss=at(rows, 0, 1.0))
    return errors


def test_a_gradient_may_come_with_a_separate_factor() -> None:
    cell = problem(dtype="float32")
    oracle = Oracle(cell, alone(cell))
    whole = right(oracle)
    apart = dataclasses.replace(whole, grad=whole.grad * cell.tokens, grad_factor=torch.tensor(1 / cell.tokens))
    assert oracle.compare(apart).wrong is None
    assert oracle.compare(dataclasses.replace(apart, grad_factor=1.0)).wrong is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", LOSSES)
def test_planted_errors_are_detected(loss: str, dtype: str) -> None:
    cell = problem(loss=loss, dtype=dtype, logits_scale=1.3)
    shard = alone(cell)
    if cell.from_labels:
        shard.target[0] = IGNORED
    oracle = Oracle(cell, shard)
    assert oracle.compare(right(oracle)).wrong is None
    for name, output in _negligent(right(oracle), cell).items():
        assert oracle.compare(output).wrong is not None, name


def test_a_wrong_softmax_is_detected_over_many_columns() -> None:
    """Over many columns the label's element has almost the whole norm of a row."""
    cell = problem(dtype="bfloat16", tokens=4, vocab=2**17)
    oracle = Oracle(cell, alone(cell))
    output = right(oracle)
    labels_alone = torch.where(output.grad < 0, output.grad, 0.0 * output.grad)
    assert oracle.compare(output).wrong is None
    assert oracle.compare(dataclasses.replace(output, grad=labels_alone)).wrong is not None


@pytest.mark.parametrize(("loss", "scale"), [("reverse_kl", 30.0), ("jsd", 8.0), ("total_variation", 8.0)])
def test_gradients_whose_terms_cancel_are_right(loss: str, scale: float) -> None:
    """If almost all of p is in one column, two terms of a gradient cancel to less than their roundings in fp32."""
    cell = problem(loss=loss, dtype="float32", logits_scale=scale)
    shard = alone(cell)
    oracle, leaf = Oracle(cell, shard), shard.logits.clone().requires_grad_()
    (grad,) = torch.autograd.grad(TORCH_LOSSES[loss](leaf * scale, shard.target * scale), leaf)
    output = dataclasses.replace(right(oracle), grad=grad)
    assert oracle.compare(output).wrong is None
    largest = grad.norm(dim=-1).argmax()
    grad[largest] *= 1.1
    assert oracle.compare(output).wrong is not None


def test_underflow_is_no_error() -> None:
    """A right gradient of 1e-9 is 0 in float16."""
    cell = problem(dtype="float16", tokens=2000, vocab=1000, loss="soft_cross_entropy", logits_scale=1e-4)
    oracle = Oracle(cell, alone(cell))
    output = right(oracle)
    assert not output.grad.any()
    assert oracle.compare(output).wrong is None


@pytest.mark.parametrize("loss", sorted({*LOSSES} - {"policy"}))
def test_infinite_losses(loss: str) -> None:
    """A column that neither side has, and (for labels) a label of no probability, whose loss is rightly infinite."""
    cell = problem(loss=loss, dtype="float32")
    shard = alone(cell)
    shard.logits[:, 40:60] = -INF
    if cell.from_labels:
        shard.target.clamp_(max=39)
        shard.target[3] = 50
    else:
        shard.target[:, 40:60] = -INF
    oracle = Oracle(cell, shard)
    assert oracle.row_loss.isinf().tolist() == [cell.from_labels and row == 3 for row in range(13)]
    assert right_gradient(oracle).isfinite().all()
    assert oracle.compare(right(oracle)).wrong is None
    if cell.from_labels:
        output = right(oracle)
        assert output.row_loss is not None
        output.row_loss[3] = 0.0
        assert oracle.compare(output).columns["row_loss_error"] == INF


def test_a_malformed_output_is_named_with_what_was_expected() -> None:
    cell = problem(dtype="float32")
    oracle = Oracle(cell, alone(cell))
    output = right(oracle)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"grad": output.grad.T}, "rank 0: grad is (101, 13) torch.float32 on "),
        ({"grad": None}, "rank 0: grad is None, expected (13, 101) torch.float32 on "),
        ({"loss": 1.0}, "rank 0: loss is of the type float, expected () on "),
        ({"loss": torch.tensor(1j)}, "rank 0: loss is () torch.complex64 on "),
        ({"grad": output.grad.to_sparse()}, "rank 0: grad is (13, 101) torch.float32 torch.sparse_coo on "),
    ]
    for fields, message in changes:
        assert str(oracle.compare(dataclasses.replace(output, **fields)).wrong).startswith(message)


@pytest.mark.parametrize("loss", ["soft_cross_entropy", "forward_kl", "reverse_kl"])
def test_a_top_k_is_the_loss_against_its_columns_alone(loss: str) -> None:
    cell = problem(loss=loss, top_k=7, temperature=0.7, logits_scale=1.3)
    shard = alone(cell)
    assert all(len({*row.tolist()}) == 7 for row in shard.target.indices)
    x = (shard.logits.double() * 1.3).requires_grad_()
    log_q = (shard.target.values.double() * (1.3 / 0.7)).log_softmax(-1)
    log_p = x.log_softmax(-1).gather(1, shard.target.indices)
    if loss == "reverse_kl":
        mean = kl_divergence(log_q, log_p.log_softmax(-1))
    else:
        mean = F.cross_entropy(x, torch.zeros_like(x).scatter(1, shard.target.indices, log_q.exp()))
        mean = mean + (log_q.exp() * log_q).sum(-1).mean() * (loss == "forward_kl")
    oracle = Oracle(cell, shard)
    assert right_loss(oracle) == pytest.approx(mean.item(), rel=1e-12)
    torch.testing.assert_close(right_gradient(oracle), torch.autograd.grad(mean, x)[0] * 1.3)
    assert oracle.compare(right(oracle)).wrong is None
