"""The oracle against torch's own losses on whole logits, and against planted errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.entropy_loss import DTYPES, LOSSES, alone, context, problem
from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tpbench.workloads.entropy_loss import EntropyLoss
from tpbench.workloads.entropy_loss.inputs import IGNORED, Shard, make_shard
from tpbench.workloads.entropy_loss.oracle import Oracle
from tpbench.workloads.entropy_loss.output import Output

INF = float("inf")


def torch_loss(cell: EntropyLoss, shard: Shard) -> tuple[Tensor, Tensor]:
    """Torch's own mean loss in float64 and its gradient by autograd."""
    leaf = shard.logits.double().requires_grad_()
    x = leaf * cell.logits_scale
    if cell.from_labels:
        loss = F.cross_entropy(x, shard.target, ignore_index=IGNORED)
    else:
        t = shard.target.double() * cell.logits_scale / cell.temperature
        log_p, log_q = x.log_softmax(-1), t.log_softmax(-1)
        if cell.loss == "soft_cross_entropy":
            loss = F.cross_entropy(x, log_q.exp())
        elif cell.loss == "forward_kl":
            loss = F.kl_div(log_p, log_q, log_target=True, reduction="batchmean")
        else:
            loss = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def right(oracle: Oracle) -> Output:
    """A perfect variant's output: the oracle's, rounded."""
    grad = oracle.gradient(slice(None)).to(oracle.shard.logits.dtype)
    return Output(torch.tensor(oracle.loss, device=grad.device).float(), oracle.row_loss.float(), grad)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 12),
    vocab=st.integers(1, 70),
    seed=st.integers(0, 2**31 - 1),
    loss=st.sampled_from(LOSSES),
    dtype=st.sampled_from(DTYPES),
    logits_scale=st.sampled_from([0.1, 1.0, 7.0]),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    ignored=st.sampled_from([0.0, 0.3]),
)
def test_the_oracle_agrees_with_torch(loss: str, temperature: float, ignored: float, **fields: Any) -> None:
    labels = loss == "cross_entropy"
    fields |= {"ignored": ignored} if labels else {"temperature": temperature}
    cell = EntropyLoss(loss=loss, **fields)  # type: ignore[arg-type]
    shard = alone(cell)
    oracle = Oracle(cell, shard)
    if labels and (shard.target == IGNORED).all():
        assert oracle.loss == 0 and not oracle.gradient(slice(None)).any()
        return
    loss_value, grad = torch_loss(cell, shard)
    assert oracle.loss == pytest.approx(loss_value.item(), rel=1e-11, abs=1e-12)
    # Differences of logarithms near 100 cancel: some 2^-52 * 100 of each is left, and the scale multiplies it.
    torch.testing.assert_close(oracle.gradient(slice(None)), grad, rtol=1e-9, atol=1e-12 * max(1.0, cell.logits_scale))
    errors = oracle.compare(right(oracle))
    assert errors.complaint(cell) is None and errors.loss_identical


@pytest.mark.parametrize("loss", LOSSES)
def test_results_do_not_depend_on_chunks(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = problem(loss=loss)
    whole = Oracle(cell, alone(cell))
    output = right(whole)
    monkeypatch.setattr("tpbench.workloads.entropy_loss.oracle._CHUNK", {"cpu": 300, "cuda": 300})
    assert Oracle(cell, alone(cell)).compare(output) == whole.compare(output)


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
    assert oracle.compare(apart).complaint(cell) is None
    assert oracle.compare(dataclasses.replace(apart, grad_factor=1.0)).complaint(cell) is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", LOSSES)
def test_planted_errors_are_detected(loss: str, dtype: str) -> None:
    cell = problem(loss=loss, dtype=dtype, logits_scale=1.3)
    shard = alone(cell)
    if cell.from_labels:
        shard.target[0] = IGNORED
    oracle = Oracle(cell, shard)
    assert oracle.compare(right(oracle)).complaint(cell) is None
    for name, output in _negligent(right(oracle), cell).items():
        assert oracle.compare(output).complaint(cell) is not None, name


def test_underflow_is_no_error() -> None:
    """A right gradient of 1e-9 is 0 in float16."""
    cell = problem(dtype="float16", tokens=2000, vocab=1000, loss="soft_cross_entropy", logits_scale=1e-4)
    oracle = Oracle(cell, alone(cell))
    output = right(oracle)
    assert not output.grad.any()
    assert oracle.compare(output).complaint(cell) is None


@pytest.mark.parametrize("loss", LOSSES)
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
    assert oracle.gradient(slice(None)).isfinite().all()
    assert oracle.compare(right(oracle)).complaint(cell) is None
    if cell.from_labels:
        output = right(oracle)
        assert output.row_loss is not None
        output.row_loss[3] = 0.0
        assert oracle.compare(output).loss_error == INF


def _planted_on_ranks(here: Rank, cell: EntropyLoss, error: str) -> tuple[bool, str | None]:
    shard = make_shard(cell, context(here))
    oracle = Oracle(cell, shard)
    output = right(oracle)
    last = here.rank == here.world_size - 1
    if error == "local softmax":
        lone = dataclasses.replace(shard, group=None)
        local = Oracle(dataclasses.replace(cell), lone)
        output = dataclasses.replace(output, grad=right(local).grad)
    elif error == "local maximum":
        # Exponents from the shard's maximum, sums as if from the whole vocabulary's.
        local_max, whole_max = (shard.logits.double().amax(1) for _ in range(2))
        if shard.group is not None:
            torch.distributed.all_reduce(whole_max, torch.distributed.ReduceOp.MAX, group=shard.group)
        grad = output.grad.double() * (whole_max - local_max).exp()[:, None]
        output = dataclasses.replace(output, grad=grad.to(output.grad.dtype))
    elif error == "one rank's row" and last:
        output.grad[2] *= 2
    elif error == "one rank's NaN" and last:
        output.grad[2, 2] = torch.nan
    elif error == "one rank's loss" and last:
        output = dataclasses.replace(output, loss=output.loss * 1.01)
    elif error == "last bit" and last:
        assert output.row_loss is not None
        output.row_loss[3] = torch.nextafter(output.row_loss[3], output.row_loss[3] + 1)
    errors = oracle.compare(output)
    return errors.loss_identical, errors.complaint(cell)


@pytest.mark.parametrize(
    "error",
    ["none", "last bit", "local softmax", "local maximum", "one rank's row", "one rank's NaN", "one rank's loss"],
)
@pytest.mark.parametrize("loss", ["cross_entropy", "reverse_kl"])
def test_an_error_on_one_rank_is_detected_on_all(loss: str, error: str) -> None:
    if not enough_gpus(2):
        pytest.skip("needs 2 GPUs")
    (identical, complaint), other = run_on_ranks(2, _planted_on_ranks, problem(loss=loss), error)
    assert (identical, complaint) == other
    assert (complaint is None) == (error in ("none", "last bit"))
    assert identical == (error not in ("last bit", "one rank's loss"))
