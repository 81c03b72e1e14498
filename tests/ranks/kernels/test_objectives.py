"""A function as the loss: the objectives of the guide against plain torch, and functions that don't fit."""

import functools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.command import ROOT
from tests.support.kernel_reference import DEVICE, assert_near, columns_of, make_linear, on_ranks
from tests.support.ranks import Rank, needs_cuda, ranks_here, run_on_ranks
from tpbench.kernels import (
    COMPARING_LOSSES,
    KERNEL_LOSSES,
    EntropyLoss,
    LinearEntropyLoss,
    entropy_loss,
    linear_entropy_loss,
)

ROWS, VOCAB = 14, 101
LENGTHS = [3, 1, 6, 2, 2]
CHUNK = 5 * 4 / 2**30
"""Workspace of 5 rows of one fp32 column, in GiB: a sequence of 6 rows is longer."""
PAGE = (ROOT / "tpbench/docs/objectives.md").read_text()
BLOCKS: list[str] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def _inputs() -> dict[str, Any]:
    hidden, head, labels = make_linear(rows=ROWS, vocab=VOCAB)
    teacher_hidden, teacher_head, _ = make_linear(rows=ROWS, vocab=VOCAB, width=24, seed=4)
    labels[3] = -100
    generator = torch.Generator().manual_seed(3)
    old, ref, advantages = torch.randn(3, ROWS, generator=generator)
    mask = (torch.arange(ROWS) % 4 != 1).float() * (labels != -100)
    return {
        "hidden": hidden, "head": head, "teacher_hidden": teacher_hidden, "teacher_head": teacher_head,
        "labels": labels, "old_logprobs": old - 5, "ref_logprobs": ref - 5, "advantages": advantages, "mask": mask,
        "sign": torch.where(torch.arange(ROWS) % 3 == 0, 1.0, -1.0),
        "columns": torch.rand(ROWS, VOCAB, generator=generator).argsort(1)[:, :5],
        "teacher_logprobs": torch.randn(ROWS, 5, generator=generator) - 3,
    }  # fmt: skip


def _of_ranks(rank: Rank, block: str) -> dict[str, Any]:
    """Run the lines of a block, and return the loss, the metrics and the gradients."""
    given = _inputs()
    own = columns_of(rank, VOCAB)
    given |= {name: given[name][own] for name in ("head", "teacher_head")}
    names: dict[str, Any] = {name: values.to(rank.device) for name, values in given.items()}
    leaves = [names[name].requires_grad_() for name in ("hidden", "head")]
    names |= {"torch": torch, "group": rank.group, "start": own.start, "vocab": VOCAB, "lengths": LENGTHS, "longest": 6}
    names["count"] = names["mask"].sum()
    lines = block.replace("vocab_size=vocab", f"vocab_size=vocab, workspace_gib={CHUNK * -(-VOCAB // rank.world_size)}")
    exec("from tpbench.kernels import LinearEntropyLoss\n" + lines, names)
    names["loss"].backward()
    return {
        "loss": names["loss"].detach(),
        "metrics": names["loss_of"].metrics,
        "grads": [leaf.grad for leaf in leaves],
    }


def _in_torch(block: str) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Return the loss, the gradients and the metrics of a block's function by autograd, from float64 logits."""
    given = {name: values.double() if values.is_floating_point() else values for name, values in _inputs().items()}
    leaves = [given[name].requires_grad_() for name in ("hidden", "head")]
    log_p = (leaves[0] @ leaves[1].t()).log_softmax(-1)
    mask, labels = given["mask"], given["labels"]
    if "jsd" in block:
        log_q = (given["teacher_hidden"] @ given["teacher_head"].t()).log_softmax(-1)
        mixture = (0.1 * log_q.exp() + 0.9 * log_p.exp()).log()
        losses = 0.1 * F.kl_div(mixture, log_q, log_target=True, reduction="none").sum(-1)
        losses = losses + 0.9 * F.kl_div(mixture, log_p, log_target=True, reduction="none").sum(-1)
        metrics: dict[str, Tensor] = {}
    else:
        names: dict[str, Any] = {"torch": torch}
        exec(re.findall(r"def .*?\n\n\n", block, re.DOTALL)[0], names)
        (function,) = (value for name, value in names.items() if callable(value))
        counts = labels >= 0
        given |= {
            "logprobs": log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0].where(counts, 0.0),
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "column_logprobs": log_p.gather(1, given["columns"]),
            "sequences": torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)),
        }
        parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
        result = function(**{name: given[name] for name in parameters})
        losses, metrics = result if isinstance(result, tuple) else (result, {})
    losses = losses * mask
    divisor = mask.sum()
    if "divisor=len(lengths)" in block:
        divisor = len(LENGTHS) * (6 if "longest" in block else 1)
    total = losses.sum() / divisor
    total.backward()
    return (
        total.detach(),
        [leaf.grad for leaf in leaves],
        {n: v.detach().masked_fill(labels < 0, 0) for n, v in metrics.items()},
    )


@pytest.mark.parametrize("world_size", sorted({1, ranks_here(2)}))
def test_the_objectives_of_the_guide(world_size: int) -> None:
    assert len(BLOCKS) == 8
    for block in BLOCKS:
        loss, (of_hidden, of_head), metrics = _in_torch(block)
        shards = on_ranks(world_size, _of_ranks, block)
        for shard in shards:
            torch.testing.assert_close(shard["loss"].double().cpu(), loss, rtol=1e-5, atol=1e-6)
            assert torch.equal(shard["loss"], shards[0]["loss"])
            assert_near(shard["grads"][0], of_hidden, torch.float32, block)
            for name, values in metrics.items():
                got = shard["metrics"][name].cpu()
                weighted = _inputs()["mask"] != 0 if "row_weight" in block else torch.ones(ROWS, dtype=torch.bool)
                torch.testing.assert_close(got.double(), values.double() * weighted, rtol=1e-4, atol=1e-6)
        assert_near(torch.cat([shard["grads"][1] for shard in shards]), of_head, torch.float32, block)


def _squares(logprobs: Tensor, entropy: Tensor, power: Tensor, sequences: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of whole sequences and of entropies, which is NaN where the power is."""
    mean = logprobs.new_zeros(len(logprobs)).index_add(0, sequences, logprobs)[sequences]
    return (mean * 0.1).square() + entropy * power, {"mean": mean, "large": logprobs < -5}


def _of_logprobs(logprobs: Tensor, power: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return logprobs.square() * 0.1 + logprobs * power, {"mean": logprobs, "large": logprobs < -5}


def _call(rank: Rank, sharded: bool) -> list[Tensor]:
    hidden, head, labels = (each.to(rank.device) for each in make_linear(rows=ROWS, vocab=VOCAB))
    own = slice(rank.rank * ROWS // rank.world_size, (rank.rank + 1) * ROWS // rank.world_size)
    columns = columns_of(rank, VOCAB)
    result = linear_entropy_loss(
        hidden[own] if sharded else hidden, head[columns], labels, loss=_squares, group=rank.group,
        vocab_start=columns.start, vocab_size=VOCAB, hidden_sharded=sharded, sequence_lengths=LENGTHS,
        row_inputs={"power": torch.linspace(0, 1, ROWS, device=rank.device)}, workspace_gib=CHUNK * VOCAB / 2,
    )  # fmt: skip
    assert result.grad_hidden is not None and result.grad_weight is not None and result.metrics is not None
    return [
        result.loss,
        result.grad_hidden if sharded else result.grad_hidden[own],
        result.grad_weight,
        result.metrics["mean"],
    ]


def test_sequences_stay_whole_where_ranks_share_rows() -> None:
    for sharded, plain in zip(*(run_on_ranks(ranks_here(2), _call, sharded) for sharded in (True, False)), strict=True):
        torch.testing.assert_close(sharded, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("function", [_squares, _of_logprobs])
def test_the_modules(function: Any, reduction: Any, dtype: torch.dtype) -> None:
    """Rows that do not count may be NaN. Backward may compute the logits again, also under activation checkpointing."""
    hidden, head, labels = (each.to(DEVICE) for each in make_linear(rows=ROWS, vocab=VOCAB, dtype=dtype))
    labels[4] = -100
    power, weight = torch.linspace(0, 1, ROWS, device=DEVICE), torch.ones(ROWS, device=DEVICE)
    power[4], weight[0] = torch.nan, 0.0
    settings: dict[str, Any] = {"loss": function, "reduction": reduction}
    rows: dict[str, Any] = {"power": power, "row_weight": weight, "sequence_lengths": LENGTHS}
    divisor = torch.tensor(3.0, device=DEVICE)
    rows |= {"divisor": divisor} if reduction == "sum" else {}
    grads, losses = [], []
    linear, given = LinearEntropyLoss(workspace_gib=CHUNK * VOCAB, **settings), EntropyLoss(**settings)
    for module in (linear, checkpoint, given):
        leaf = hidden.clone().requires_grad_()
        if module is given:
            loss = module((leaf @ head.t()), labels, **rows)
        elif module is linear:
            loss = module(leaf, head, labels, **rows)
        else:
            loss = checkpoint(lambda leaf: linear(leaf, head, labels, **rows), leaf, use_reentrant=False)
        upstream = (
            torch.linspace(1, 2, ROWS, device=DEVICE) / 3 if reduction == "none" else torch.ones((), device=DEVICE)
        )
        grads.append(torch.autograd.grad(loss, leaf, upstream)[0].double())
        losses.append(loss.detach())
    for grad in grads:
        assert_near(grad, grads[0].cpu(), dtype)
        assert not grad[4].any() and grads[0][5].any()
    torch.testing.assert_close(losses[0], losses[1])
    assert linear.metrics is not None and linear.metrics["mean"][4] == 0 and linear.metrics["large"].dtype == torch.bool
    with torch.no_grad():
        torch.testing.assert_close(linear(hidden, head, labels, **rows), losses[0])


@needs_cuda
@pytest.mark.parametrize("function", [_squares, _of_logprobs])
def test_a_graph_reads_new_hidden_states_and_another_divisor(function: Any) -> None:
    """A host that waited for the device, as for the divisor, would end the capture."""
    hidden, head, labels = (each.cuda() for each in make_linear(rows=ROWS, vocab=VOCAB))
    power, divisor = torch.linspace(0, 1, ROWS, device="cuda"), torch.tensor(3.0, device="cuda")
    call = functools.partial(
        linear_entropy_loss, hidden, head, labels, loss=function, row_inputs={"power": power}, reduction="sum",
        divisor=divisor, sequence_lengths=LENGTHS, workspace_gib=CHUNK * VOCAB,
    )  # fmt: skip
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    hidden.copy_(make_linear(rows=ROWS, vocab=VOCAB, seed=1)[0])
    divisor.fill_(5.0)
    graph.replay()
    for name in ("loss", "grad_hidden", "grad_weight"):
        torch.testing.assert_close(getattr(captured, name), getattr(call(), name))


def test_tensors_of_rows_must_not_change_before_backward() -> None:
    hidden, head, labels = (each.to(DEVICE) for each in make_linear())
    rows = {name: torch.ones(9, device=DEVICE) for name in ("old_logprobs", "advantages")}
    loss = LinearEntropyLoss(loss="policy", reduction="none")(hidden.requires_grad_(), head, labels, **rows)
    rows["advantages"].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


def _changes(logprobs: Tensor, power: Tensor) -> Tensor:
    return logprobs * power.mul_(2)


def _raises(logprobs: Tensor) -> Tensor:
    return logprobs @ torch.ones(3)


def _changes_a_saved_ratio(logprobs: Tensor) -> Tensor:
    ratio = logprobs.exp()
    ratio *= 2.0
    return ratio


def _ends_backward(logprobs: Tensor) -> Tensor:
    losses = logprobs.exp()
    losses.sum().backward()
    return losses


def _learns_elsewhere(logprobs: Tensor) -> Tensor:
    return torch.ones_like(logprobs) * torch.ones((), device=logprobs.device, requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "row_inputs", "message"),
    [
        (lambda logprobs, weight: logprobs, {}, "weight, which is an argument"),
        (lambda power: power, {}, "one of the parameters logprobs, entropy, column_logprobs"),
        (lambda logprobs, **more: logprobs, {}, "passed by name"),
        (3, {}, "name of a loss or a function"),
        (lambda logprobs, power: logprobs, {}, "power must be given"),
        (lambda logprobs, power=None: logprobs, {"pwoer": torch.ones(9)}, "takes power: it has no parameter pwoer"),
        (_changes, {"power": 1.0}, "power must be a tensor of rows for the loss _changes"),
        (_changes, {"power": torch.ones(8)}, r"power must be .* of shape \(9, ...\) on .*, got \(8,\)"),
        (_changes, {"power": torch.ones(9)}, "_changes must not change its arguments, but changed power"),
        (_raises, {}, "the loss _raises raised RuntimeError"),
        (lambda logprobs: logprobs.sum(), {}, r"must return losses of shape \(9,\), got \(\)"),
        (lambda logprobs: (logprobs, {"mean": 1.0}), {}, r"must return mean of shape \(9,\), got float"),
        (lambda logprobs: (logprobs, logprobs), {}, "metrics as a dict, got Tensor"),
        (lambda logprobs, entropy: logprobs.detach(), {}, "depend on logprobs or entropy"),
        (_learns_elsewhere, {}, "depend on logprobs"),
        (_changes_a_saved_ratio, {}, "_changes_a_saved_ratio raised RuntimeError: .* modified by an inplace"),
        (_ends_backward, {}, "_ends_backward raised RuntimeError: Trying to backward through the graph a second time"),
        (lambda logprobs, sequences: logprobs, {}, "sequence_lengths must be given"),
        (lambda column_logprobs: column_logprobs[:, 0], {}, "columns, .* must be given"),
    ],
)  # fmt: skip
def test_functions_that_do_not_fit(loss: Any, row_inputs: dict[str, Any], message: str) -> None:
    hidden, head, labels = (each.to(DEVICE) for each in make_linear())
    row_inputs = {name: value.to(DEVICE) if torch.is_tensor(value) else value for name, value in row_inputs.items()}
    for function, given in ((entropy_loss, (hidden @ head.t(),)), (linear_entropy_loss, (hidden, head))):
        with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
            function(*given, labels, loss=loss, row_inputs=row_inputs)  # type: ignore[operator]


def _wrong_on_one_rank(rank: Rank, wrong: str) -> str:
    hidden, head, labels = (each.to(rank.device) for each in make_linear())
    options: dict[str, Any] = {"group": rank.group, "loss": lambda logprobs, power: logprobs * power}
    power = torch.ones(9, device=rank.device)
    if rank.rank == 1:
        power = {"shape": power[:4], "dtype": power.double()}.get(wrong, power)
        if wrong == "function":
            options["loss"] = lambda logprobs, entropy, power: logprobs * power + entropy
    try:
        linear_entropy_loss(hidden, head[columns_of(rank, 100)], labels, row_inputs={"power": power}, **options)
    except ValueError as error:
        return str(error)
    return ""


def test_a_wrong_tensor_on_one_rank_is_an_error_on_all() -> None:
    wrong, unequal = (on_ranks(2, _wrong_on_one_rank, wrong) for wrong in ("shape", "dtype"))
    first, second = (each.partition("power must be a tensor of rows for the loss")[::2] for each in wrong)
    assert (first[0], second[0]) == ("on rank 1: ", "") and first[1] == second[1] and "got (4,)" in first[1]
    assert all(
        "power differs between ranks: ['torch.float32', 9] on rank 0, ['torch.float64', 9]" in each for each in unequal
    )
    for text in on_ranks(2, _wrong_on_one_rank, "function"):
        assert "loss differs between ranks" in text and "'entropy'" in text
    assert on_ranks(2, _wrong_on_one_rank, "none") == ["", ""]


@pytest.mark.parametrize("loss", sorted({*KERNEL_LOSSES} - {"policy"}))
def test_a_weight_of_each_row(loss: Any, algorithm: dict[str, Any]) -> None:
    """Rows of weight 0 are not read. The others are those of a call with `row_grad`."""
    hidden, head, target = (each.to(DEVICE) for each in make_linear(loss))
    logits, weight = hidden @ head.t(), torch.linspace(0.5, 2, 9, device=DEVICE)
    weight[4] = 0.0
    algorithm = {} if loss in COMPARING_LOSSES else algorithm
    right = entropy_loss(logits, target, loss=loss, reduction="none", row_grad=weight, **algorithm)
    logits = logits.clone()
    logits[4] = torch.nan
    for reduction, scale in (("mean", weight.sum()), ("sum", 1.0), ("none", 1.0)):
        result = entropy_loss(logits, target, loss=loss, reduction=reduction, row_weight=weight, **algorithm)
        torch.testing.assert_close(result.row_loss, right.row_loss * weight)
        torch.testing.assert_close(result.grad, right.grad / scale)
        if reduction != "none":
            torch.testing.assert_close(result.loss, (right.row_loss * weight).sum() / scale)


def _correct(rank: Rank) -> list[Tensor | None]:
    hidden, head, labels = (each.to(rank.device) for each in make_linear(dtype=torch.bfloat16, vocab=VOCAB))
    logits = hidden @ head.t()
    labels[::2] = logits.argmax(-1)[::2]
    logits[4, (labels[4] + 1) % VOCAB] = logits[4, labels[4]]  # a tie
    labels[6] = -100
    own = columns_of(rank, VOCAB)
    options: dict[str, Any] = {"group": rank.group, "correct": True, "logits_scale": 0.7, "softcap": 9.0}
    calls = [entropy_loss(logits[:, own], labels, **options)]
    calls += [linear_entropy_loss(hidden, head[own], labels, grad=grad, **options) for grad in (True, False)]
    module = LinearEntropyLoss(**options)
    module(hidden, head[own], labels)
    return [*(call.correct for call in calls), module.correct]


@pytest.mark.parametrize("world_size", sorted({1, ranks_here(2)}))
def test_which_labels_have_the_largest_logit(world_size: int) -> None:
    right = torch.tensor([True, False, True, False, True, False, False, False, True])
    for results in on_ranks(world_size, _correct):
        for correct in results:
            assert correct is not None and torch.equal(correct.cpu(), right)
