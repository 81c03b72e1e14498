"""Log-probabilities in given columns, for a function as the loss, against plain torch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernel_reference import DEVICE, assert_near, columns_of, make_linear, on_ranks
from tests.support.ranks import Rank, ranks_here
from tpbench.kernels import EntropyLoss, LinearEntropyLoss, entropy_loss, linear_entropy_loss

ROWS, VOCAB = 9, 101
WORLDS = sorted({1, ranks_here(2)})
TEMPERATURES = torch.linspace(0.5, 2, ROWS)


def _distilled(column_logprobs: Tensor, teacher: Tensor) -> Tensor:
    return (teacher * (teacher.log() - column_logprobs)).sum(1)


def _with_policy(
    logprobs: Tensor, entropy: Tensor, column_logprobs: Tensor, teacher: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    loss = _distilled(column_logprobs, teacher) - logprobs * (teacher[:, 0] - 0.1)
    return loss - 0.3 * entropy, {"mass": column_logprobs.exp().sum(1)}


FUNCTIONS = {"distilled": _distilled, "with_policy": _with_policy}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("distilled", {}),
    ("with_policy", {"softcap": 3.0, "logits_scale": 0.7, "grad_scale": -2.0, "reduction": "sum"}),
    ("with_policy", {"temperature": TEMPERATURES}),
]


def _columns(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of both ranks, with the label among them, and one twice. Those of the ignored row don't exist."""
    columns = torch.randint(VOCAB, (ROWS, 4), generator=torch.Generator().manual_seed(5))
    columns[2, 1] = labels[2]
    columns[3, 2] = columns[3, 0]
    columns[5] = labels[5]
    columns[6] = -1
    return columns, torch.rand(ROWS, 4, generator=torch.Generator().manual_seed(6)) / 4


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden, head, labels = make_linear(rows=ROWS, vocab=VOCAB, dtype=dtype)
    labels[6] = -100
    return hidden, head, labels


def _right(logits: Tensor, labels: Tensor, name: str, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The loss and its gradient by the logits in float64."""
    leaf = logits.double().requires_grad_()
    cap, temperature = options.get("softcap"), torch.as_tensor(options.get("temperature", 1.0)).double()
    x = leaf if cap is None else cap * (leaf / cap).tanh()
    x = x * options.get("logits_scale", 1.0) / (temperature[:, None] if temperature.dim() else temperature)
    log_p, counts = x.log_softmax(-1), labels >= 0
    columns, teacher = _columns(labels)
    given: dict[str, Any] = {"column_logprobs": log_p.gather(1, columns.clamp(min=0)), "teacher": teacher.double()}
    if name == "with_policy":
        label = labels.clamp(min=0)[:, None]
        given |= {"logprobs": log_p.gather(1, label)[:, 0], "entropy": -(log_p.exp() * log_p).sum(1)}
    result = FUNCTIONS[name](**given)
    losses = (result[0] if isinstance(result, tuple) else result)[counts]
    loss = losses.sum() / (1.0 if options.get("reduction") == "sum" else len(losses))
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad * options.get("grad_scale", 1.0)


def _call(rank: Rank, name: str, options: dict[str, Any], dtype: torch.dtype) -> list[Any]:
    hidden, head, labels = _inputs(dtype)
    own = columns_of(rank, VOCAB)
    logits = (hidden @ head.t())[:, own].contiguous().to(rank.device)
    columns, teacher = (each.to(rank.device) for each in _columns(labels))
    hidden, head, labels = (each.to(rank.device) for each in (hidden, head, labels))
    common: dict[str, Any] = {"loss": FUNCTIONS[name], "group": rank.group, "exchange": "nccl", **options}
    if "temperature" in options:
        common["temperature"] = common["temperature"].to(rank.device)
    rows = {"row_inputs": {"teacher": teacher}, "columns": columns.int()}
    added = torch.ones(logits.shape, device=rank.device)
    entropy_loss(logits, labels, grad=added, **common, **rows)
    whole = entropy_loss(logits, labels, **common, **rows)
    linear = linear_entropy_loss(
        hidden, head[own], labels, workspace_gib=4 * hidden.itemsize * VOCAB / rank.world_size / 2**30, **common, **rows
    )
    assert linear.how.chunks > 1
    grad = logits.clone()
    in_place = entropy_loss(grad, labels, grad="in_place", **common, **rows)
    assert torch.equal(grad, whole.grad) and torch.equal(in_place.loss, whole.loss)
    modules = []
    if "grad_scale" not in options:
        given = {name: common.pop(name) for name in ("temperature",) if name in common}
        leaf, states = logits.clone().requires_grad_(), hidden.clone().requires_grad_()
        EntropyLoss(**common)(leaf, labels, teacher=teacher, columns=columns, **given).backward()
        losses = LinearEntropyLoss(**{**common, "reduction": "none"})(
            states, head[own], labels, teacher=teacher, columns=columns, **given
        )
        losses.sum().backward()
        modules = [leaf.grad, states.grad]
    return [whole.loss, whole.grad, added, linear.loss, linear.grad_hidden, linear.grad_weight, *modules]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_loss_and_gradients(name: str, options: dict[str, Any], dtype: torch.dtype, world_size: int) -> None:
    hidden, head, labels = _inputs(dtype)
    right, of_logits = _right(hidden @ head.t(), labels, name, options)
    shards = on_ranks(world_size, _call, name, options, dtype)
    for index in (0, 3):
        for shard in shards:
            torch.testing.assert_close(shard[index].double().cpu(), right, rtol=1e-5, atol=1e-5)
            assert torch.equal(shard[index], shards[0][index])
    grad, added = (torch.cat([shard[index] for shard in shards], 1).double().cpu() for index in (1, 2))
    # Rounded once: each element has a small error of its own, even where p and the teacher's weight nearly cancel.
    eps = torch.finfo(dtype).eps
    assert ((grad - of_logits).abs() <= eps / 2 * of_logits.abs() + 4e-6).all()
    assert not grad[6].any()
    torch.testing.assert_close(added - 1, of_logits, rtol=1e-4, atol=2e-6)
    assert_near(shards[0][4], of_logits @ head.double(), dtype)
    assert_near(torch.cat([shard[5] for shard in shards]), of_logits.t() @ hidden.double(), dtype)
    if "grad_scale" not in options:
        assert torch.equal(torch.cat([shard[6] for shard in shards], 1).double().cpu(), grad)
        assert_near(shards[0][7], of_logits @ head.double() * int((labels >= 0).sum()), dtype)


def test_without_gradients_and_with_metrics() -> None:
    hidden, head, labels = _inputs(torch.float32)
    columns, teacher = (each.to(DEVICE) for each in _columns(labels))
    module = LinearEntropyLoss(loss=_with_policy)
    with torch.no_grad():
        loss = module(*(each.to(DEVICE) for each in (hidden, head, labels)), teacher=teacher, columns=columns)
    right, _ = _right(hidden @ head.t(), labels, "with_policy", {})
    torch.testing.assert_close(loss.double().cpu(), right, rtol=1e-5, atol=1e-5)
    assert module.metrics is not None and module.metrics["mass"][6] == 0 and module.metrics["mass"][0] > 0


def _wrong(rank: Rank, wrong: str) -> str:
    """Call a function for the first time: ranks agree then."""

    def function(column_logprobs: Tensor, teacher: Tensor) -> Tensor:
        return _distilled(column_logprobs, teacher)

    function.__name__ = wrong
    hidden, head, labels = (each.to(rank.device) for each in _inputs(torch.float32))
    columns, teacher = _columns(labels.cpu())
    columns = {"outside": columns.index_fill(1, torch.tensor([2]), VOCAB), "unequal": columns[:, : 4 - rank.rank]}[
        wrong
    ]
    rows = {"columns": columns.to(rank.device), "row_inputs": {"teacher": teacher.to(rank.device)}}
    if wrong == "outside" and rank.rank == 0:
        rows["columns"] = _columns(labels.cpu())[0].to(rank.device)
    try:
        entropy_loss((hidden @ head.t())[:, columns_of(rank, VOCAB)], labels, loss=function, group=rank.group, **rows)  # type: ignore[arg-type]
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def test_wrong_columns_are_an_error_on_every_rank() -> None:
    outside, unequal = (on_ranks(2, _wrong, wrong) for wrong in ("outside", "unequal"))
    assert all("columns must be from 0 to 100 in rows that count, got 101" in each for each in outside), outside
    assert all(each for each in unequal), unequal
