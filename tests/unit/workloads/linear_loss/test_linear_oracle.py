"""The oracle of the linear loss on one process: against torch's losses and autograd, and against planted errors."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.linear_loss import context, problem
from tpbench.comm.collectives import gather_objects
from tpbench.kernels import KERNEL_LOSSES, LABEL_LOSSES
from tpbench.workloads.differences import Compared, Comparison
from tpbench.workloads.linear_loss import LinearLoss, bench
from tpbench.workloads.linear_loss.bench import Oracle
from tpbench.workloads.linear_loss.inputs import Output, Shard
from tpbench.workloads.losses.oracle import relative_error
from tpbench.workloads.sizes import IGNORED

INF = math.inf


def exact(cell: LinearLoss, shard: Shard) -> Output:
    """Return torch's loss, entropy and gradients in float64."""
    hidden, weight = (each.double().requires_grad_() for each in (shard.hidden, shard.weight))
    divisor = cell.temperature if cell.from_labels else 1.0
    log_p = (hidden @ weight.T / divisor).log_softmax(-1)
    if shard.labels is not None:
        rows = F.nll_loss(log_p, shard.labels.clamp(min=0), reduction="none") * (shard.labels >= 0)
        rows = -rows if cell.loss == "logprob" else rows
        if cell.loss == "policy":
            ratio, advantages = (-rows - shard.rows["old_logprobs"]).exp(), shard.rows["advantages"]
            rows = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * (shard.labels >= 0)
        count = max(1, int((shard.labels >= 0).sum()))
    else:
        teacher_hidden, teacher_weight = (each.double() for each in shard.target)
        log_q = (teacher_hidden @ teacher_weight.T / cell.temperature).log_softmax(-1)
        mixture = ((log_p.exp() + log_q.exp()) / 2).log()
        terms = {
            "soft_cross_entropy": -log_q.exp() * log_p, "forward_kl": log_q.exp() * (log_q - log_p),
            "reverse_kl": log_p.exp() * (log_p - log_q),
            "jsd": (log_q.exp() * (log_q - mixture) + log_p.exp() * (log_p - mixture)) / 2,
            "total_variation": (log_p.exp() - log_q.exp()).abs() / 2,
        }  # fmt: skip
        rows, count = terms[cell.loss].sum(-1), cell.tokens
    loss = rows.sum() / count
    entropy = -(log_p.exp() * log_p).sum(-1)
    if shard.labels is not None:
        entropy = entropy * (shard.labels >= 0)
    objective = loss
    if shard.upstream is not None:
        of_logprob, of_entropy = shard.upstream
        objective = (rows * of_logprob + (entropy * of_entropy if cell.entropy else 0)).sum()
    grad_hidden, grad_weight = torch.autograd.grad(objective, (hidden, weight))
    return Output(loss.detach(), rows.detach(), entropy.detach(), grad_hidden, grad_weight)


def rounded(output: Output) -> Output:
    """Return the output in fp32, as a perfect variant has it."""
    tensors = {name: each for name, each in vars(output).items() if isinstance(each, Tensor)}
    return replace(output, **{name: each.float() for name, each in tensors.items()})


def made(**fields: Any) -> tuple[LinearLoss, Oracle, Output]:
    cell = problem(**{"dtype": "float32", "entropy": True, **fields})
    shard = bench.inputs(cell, context())
    return cell, Oracle(cell, shard), rounded(exact(cell, shard))


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("loss", KERNEL_LOSSES)
@pytest.mark.parametrize("elements", [1, 101 * 5, 2**20])
def test_the_oracle_agrees_with_torch(loss: str, elements: int, entropy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Oracle, "BLOCK", dict.fromkeys(Oracle.BLOCK, elements))
    more: dict[str, Any] = {"ignored": 0.3} if loss in LABEL_LOSSES else {}
    if loss != "cross_entropy":
        more["temperature"] = 1.7
    _, found, output = made(loss=loss, entropy=entropy, **more)
    errors = found.compare(output)
    assert errors.columns["loss_value"] == pytest.approx(float(exact(found.problem, found.shard).loss), rel=1e-12)
    assert (
        errors.columns["loss_error"] < 2**-22
        and errors.columns.get("entropy_error", 0) < 2**-22
        and errors.columns["grad_error"] < 2**-20
    )
    assert errors.wrong is None and errors.columns["loss_identical"]


def scaled_row(values: Tensor | None, row: int, factor: float) -> Tensor:
    assert values is not None
    values = values.clone()
    values[row] *= factor
    return values


def test_errors_are_those_of_the_worst_row() -> None:
    _, found, output = made(loss="reverse_kl")
    assert output.row_loss is not None and output.entropy is not None
    row = int(output.row_loss.argmax())
    assert output.row_loss[row] > 1 and output.entropy[row] > 1
    spoiled = replace(
        output, row_loss=scaled_row(output.row_loss, row, 1.25), entropy=scaled_row(output.entropy, row, 0.5)
    )
    errors = found.compare(spoiled)
    assert errors.columns["row_loss_error"] == pytest.approx(0.25, rel=1e-5) and errors.columns["loss_error"] < 1e-6
    small = torch.tensor([0.5, 0.25]), torch.tensor([0.25, 0.25], dtype=torch.float64)
    assert relative_error(*small).tolist() == [0.25, 0.0]  # relative to one at least
    assert errors.columns["entropy_error"] == pytest.approx(0.5, rel=1e-5)
    for of in ("hidden", "weight"):
        grad = getattr(output, f"grad_{of}")
        norms = grad.norm(dim=-1)
        usual = float(norms.square().mean().sqrt())
        for row in (int(norms.argmax()), int(norms.argmin())):  # the error of a small row is relative to all rows' RMS
            errors = found.compare(replace(output, **{f"grad_{of}": scaled_row(grad, row, 1.5)}))
            right = 0.5 * float(norms[row]) / max(usual, float(norms[row]))
            assert errors.columns[f"{of}_grad_error"] == pytest.approx(right, rel=1e-3)


@pytest.mark.parametrize("name", ["loss", "row_loss", "entropy", "grad_hidden", "grad_weight"])
@pytest.mark.parametrize("how", ["nan", "infinite", "another shape"])
def test_planted_errors_are_infinite(name: str, how: str) -> None:
    _, found, output = made()
    value = getattr(output, name).clone()
    if how == "another shape":
        value = value[..., :-1] if value.ndim else value.reshape(1, 1)
    else:
        value.view(-1)[-1] = math.nan if how == "nan" else INF
    errors = found.compare(replace(output, **{name: value}))
    kinds = {"loss": "loss_error", "row_loss": "row_loss_error", "entropy": "entropy_error"}
    assert errors.columns[kinds.get(name, f"{name.removeprefix('grad_')}_grad_error")] == INF
    assert errors.wrong is not None


def test_what_a_problem_does_not_ask_for_is_not_compared() -> None:
    _, found, output = made(entropy=False)
    errors = found.compare(replace(output, entropy=None, row_loss=None))
    assert "entropy_error" not in errors.columns and errors.wrong is None
    assert found.compare(replace(output, row_loss=None, loss=output.loss * 1.5)).columns["loss_error"] > 0.3


def test_a_row_that_does_not_count_has_no_loss_and_no_gradient() -> None:
    cell = problem(dtype="float32", entropy=True)
    shard = bench.inputs(cell, context())
    assert shard.labels is not None
    shard.labels[:2] = torch.tensor([IGNORED, IGNORED])
    shard.labels[2:4] = torch.tensor([0, cell.vocab - 1])
    found, output = Oracle(cell, shard), rounded(exact(cell, shard))
    assert found.counts.tolist() == [False, False] + [True] * (cell.tokens - 2)
    assert found.inverse_count == 1 / (cell.tokens - 2)
    assert found.compare(output).wrong is None
    assert output.grad_hidden is not None
    spoiled = output.grad_hidden.clone()
    spoiled[0, 0] = 1e-7
    assert "row 0 of grad_hidden has the error 1e-07" in str(found.compare(replace(output, grad_hidden=spoiled)).wrong)
    shard.labels[4] = cell.vocab
    assert not Oracle(cell, shard).counts[4]
    shard.labels[:] = IGNORED
    assert Oracle(cell, shard).inverse_count == 1.0
    tensors = {name: each for name, each in vars(output).items() if isinstance(each, Tensor)}
    zeros = replace(output, **{name: torch.zeros_like(each) for name, each in tensors.items()})
    assert Oracle(cell, shard).compare(zeros).wrong is None
    touched = replace(zeros, grad_weight=torch.full_like(zeros.grad_weight, 1e-9))
    assert "weight_grad_error" in str(Oracle(cell, shard).compare(touched).wrong)


def test_an_error_below_the_smallest_normal_number_does_not_count() -> None:
    _, found, _ = made(dtype="float16", entropy=False)
    right, smallest = torch.full((2, 4), 1e-9, dtype=torch.float64), 2.0**-14
    grad = Compared(right, (2, 4), None, "hidden_grad_error")
    for value, error in ((0.0, 0.0), (2 * smallest, smallest / 1e-9)):
        comparison = Comparison({"grad_hidden": grad}, found.limits(), gather_objects, right.device, "float16")
        comparison.rows("grad_hidden", torch.full_like(right, value), right, smallest, 0)
        columns = comparison.verdict().columns
        assert columns["hidden_grad_error"] == pytest.approx(error, rel=1e-3)


def test_on_one_rank_all_rows_are_its_own() -> None:
    _, found, output = made(sequence_parallel=True)
    assert found.shard.group is None and found.hidden is found.shard.hidden
    assert found.compare(output).wrong is None


def test_rows_of_a_policy_stay_near_the_log_probabilities_of_changed_inputs() -> None:
    cell = problem(dtype="float32", loss="policy", kl_weight=0.1)
    shard = bench.inputs(cell, context())
    shard.hidden.neg_()
    bench.refresh(cell, shard, context())
    logprob = -Oracle(replace(cell, loss="cross_entropy"), shard).row_loss
    for name, distance in ("old_logprobs", 0.5), ("ref_logprobs", 1.0):
        apart = (shard.rows[name] - logprob).abs()
        assert ((apart < 1e-5) | ((apart - distance).abs() < 1e-5)).all(), name
