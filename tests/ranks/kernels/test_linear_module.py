"""`LinearEntropyLoss`: a toy model trains as with torch's own loss, and gradients of any upstream are right."""

import itertools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.support.command import ROOT
from tests.support.kernel_reference import DEVICE, assert_near, linear_reference, make_linear, on_ranks
from tests.support.ranks import Rank, ranks_here, run_on_ranks
from tpbench.kernels import EntropyLoss, LinearEntropyLoss

ROWS, VOCAB, WIDTH = 6, 96, 8


def _batches(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(4):
        labels = torch.randint(VOCAB, (ROWS,), generator=generator)
        labels[2] = -100
        batches.append((torch.randn(ROWS, WIDTH, generator=generator).to(device), labels.to(device)))
    return batches


def _model(device: torch.device) -> tuple[torch.nn.Module, torch.nn.Linear]:
    torch.manual_seed(1)
    body = torch.nn.Linear(WIDTH, WIDTH)
    head = torch.nn.Linear(WIDTH, VOCAB)
    return body.to(device), head.to(device)


def _train(
    device: torch.device, loss_of: Any, body: torch.nn.Module, head: torch.nn.Module, rows: slice = slice(None)
) -> list[float]:
    # Torch updates tensors and DTensors together only one by one. On GPUs its default is to update them together.
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.5, foreach=False)
    losses = []
    for tokens, labels in _batches(device):
        loss = loss_of(body(tokens[rows]).tanh(), head, labels)
        (loss * 0.7).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _torch_loss(hidden: Tensor, head: torch.nn.Linear, labels: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden), labels, ignore_index=-100)


def _torch_losses() -> list[float]:
    return _train(DEVICE, _torch_loss, *_model(DEVICE))


def _both_losses(hidden: Tensor, head: torch.nn.Linear, labels: Tensor) -> Tensor:
    of_hidden: Tensor = LinearEntropyLoss()(hidden, head.weight, labels, head.bias)
    of_logits: Tensor = EntropyLoss()(head(hidden), labels)
    return (of_hidden + of_logits) / 2


def _checkpointed(hidden: Tensor, head: torch.nn.Linear, labels: Tensor) -> Tensor:
    loss: Tensor = checkpoint(_both_losses, hidden, head, labels, use_reentrant=False)
    return loss


@pytest.mark.parametrize("compiled", [True, False])
def test_compiled_or_checkpointed_the_modules_train_as_with_torch(compiled: bool) -> None:
    """torch.compile leaves the modules out of its graphs. Its frontend does, so the backend does not matter."""
    loss_of = torch.compile(_both_losses, backend="eager") if compiled else _checkpointed
    assert _train(DEVICE, loss_of, *_model(DEVICE)) == pytest.approx(_torch_losses(), rel=1e-5)


def test_a_whole_step_may_be_compiled() -> None:
    """Compiled autograd leaves backward out of its graphs, too."""
    (tokens, labels), (_, head) = _batches(DEVICE)[0], _model(DEVICE)

    def step(hidden: Tensor) -> None:
        _both_losses(hidden, head, labels).backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="eager")(tokens)
    (expected,) = torch.autograd.grad(_torch_loss(tokens, head, labels), head.weight)
    torch.testing.assert_close(head.weight.grad, expected)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_toy_model_trains_as_with_torch(reduction: Any, autocast: bool) -> None:
    module = LinearEntropyLoss(reduction=reduction, entropy=True, workspace_gib=2 * VOCAB * 4 / 2**30)

    def loss_of(hidden: Tensor, head: torch.nn.Linear, labels: Tensor) -> Tensor:
        loss, _ = module(hidden, head.weight, labels, head.bias)
        return loss.sum() / (labels != -100).sum() if reduction == "none" else loss

    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        losses, expected = _train(DEVICE, loss_of, *_model(DEVICE)), _torch_losses()
    assert losses == pytest.approx(expected, rel=2**-6 if autocast else 1e-5)


def _train_by_lines(rank: Rank, page: str, module: str) -> list[float]:
    """Train with the lines of a page. Over ranks the head's weight is a DTensor, as after ColwiseParallel."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    imports = "".join(re.findall(r"^from tpbench\.kernels import .*\n", "".join(blocks), re.MULTILINE))
    lines = imports + next(block for block in blocks if f" {module}" in block)
    names: dict[str, Any] = {"tp_group": rank.group, "tp_rank": rank.rank, "tp": rank.world_size}
    names |= {"vocab": VOCAB, "padded_vocab": VOCAB}
    body, head = _model(rank.device)
    if rank.group is not None:
        parallelize_module(head, DeviceMesh.from_group(rank.group, rank.device.type), ColwiseParallel())
        assert len(head.weight) == VOCAB
    if module == "EntropyLoss(":  # a whole training loop
        names |= {"losses": [], "model": torch.nn.Sequential(body, torch.nn.Tanh(), head)}
        names["batches"] = [(tokens[None], labels[None]) for tokens, labels in _batches(rank.device)]
        # The factor .7 is that of `_train`.
        names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.5 * 0.7, foreach=False)
        exec(lines.replace("    optimizer.step()", "    losses.append(float(loss))\n    optimizer.step()"), names)
        losses: list[float] = names["losses"]
        return losses

    def loss_of(hidden: Tensor, head: torch.nn.Linear, labels: Tensor) -> Tensor:
        here = {**names, "head": head, "hidden": hidden[None], "labels": labels[None]}
        exec(lines.rstrip().removesuffix("loss.backward()"), here)  # `_train` calls it
        loss: Tensor = here["loss"]
        return loss

    return _train(rank.device, loss_of, body, head)


@pytest.mark.parametrize("world_size", sorted({1, ranks_here(2)}))
@pytest.mark.parametrize(
    ("page", "module"),
    [
        ("README.md", "EntropyLoss("),
        ("README.md", "LinearEntropyLoss("),
        ("tpbench/docs/linear_loss.md", "LinearEntropyLoss("),
    ],
)
def test_the_lines_of_a_page_train_as_with_torch(page: str, module: str, world_size: int) -> None:
    def without_bias(hidden: Tensor, head: torch.nn.Linear, labels: Tensor) -> Tensor:
        return F.cross_entropy(hidden @ head.weight.t(), labels, ignore_index=-100)

    theirs = _torch_losses() if module == "EntropyLoss(" else _train(DEVICE, without_bias, *_model(DEVICE))
    for losses in on_ranks(world_size, _train_by_lines, page, module):
        torch.testing.assert_close(losses, theirs, rtol=1e-5, atol=1e-6)


MISFITS: dict[str, Any] = {
    rf"got .* vocab_start \[0, {VOCAB}\]": lambda rank: {"vocab_start": rank * VOCAB, "vocab_size": VOCAB},
    "vocab_size must be at most": lambda rank: {"vocab_start": rank * VOCAB // 2, "vocab_size": 2 * VOCAB},
    "vocab_size must be equal": lambda rank: {"vocab_start": rank * VOCAB // 2, "vocab_size": VOCAB - rank},
    "given on all ranks or on none": lambda rank: {"vocab_size": VOCAB} | ({"vocab_start": 0} if rank == 0 else {}),
}
"""Parts of errors, and the settings of each of two ranks that raise them."""


def _misfits(rank: Rank) -> None:
    hidden, weight, labels = (each.to(rank.device) for each in make_linear(vocab=VOCAB))
    weight = weight.chunk(2)[rank.rank]
    for words, settings in MISFITS.items():
        for module, inputs in ((LinearEntropyLoss, (hidden, weight)), (EntropyLoss, (hidden @ weight.t(),))):
            with pytest.raises(ValueError, match=words):
                module(group=rank.group, **settings(rank.rank))(*inputs, labels)
    module = LinearEntropyLoss(group=rank.group, vocab_start=rank.rank * VOCAB // 2, vocab_size=VOCAB)
    module(hidden, weight, labels)
    with pytest.raises(ValueError, match="weight must have 48 columns, as in the first call, got 40"):
        module(hidden, weight[:40], labels)


@pytest.mark.skipif(ranks_here(2) < 2, reason="needs two GPUs")
def test_columns_that_do_not_fit_together_are_refused_on_all_ranks() -> None:
    run_on_ranks(2, _misfits)


def _train_shard(rank: Rank, sharded: bool) -> list[float]:
    body, whole = _model(rank.device)
    own = slice(rank.rank * VOCAB // rank.world_size, (rank.rank + 1) * VOCAB // rank.world_size)
    head = torch.nn.Linear(WIDTH, own.stop - own.start).to(rank.device)
    head.weight.data.copy_(whole.weight[own])
    head.bias.data.copy_(whole.bias[own])
    module = LinearEntropyLoss(
        group=rank.group, vocab_start=own.start, vocab_size=VOCAB, hidden_sharded=sharded, exchange="nccl"
    )
    rows = (
        slice(rank.rank * ROWS // rank.world_size, (rank.rank + 1) * ROWS // rank.world_size)
        if sharded
        else slice(None)
    )

    def loss_of(hidden: Tensor, head: torch.nn.Linear, labels: Tensor) -> Tensor:
        result: Tensor = module(hidden, head.weight, labels, head.bias)
        return result

    if sharded:  # each rank has the gradient of its rows only
        for parameter in body.parameters():
            parameter.register_hook(lambda grad: _sum(grad, rank))
    return _train(rank.device, loss_of, body, head, rows)


def _sum(grad: Tensor, rank: Rank) -> Tensor:
    grad = grad.clone()
    torch.distributed.all_reduce(grad, group=rank.group)
    return grad


@pytest.mark.parametrize("sharded", [False, True])
def test_a_sharded_head_trains_as_with_torch(sharded: bool) -> None:
    for losses in run_on_ranks(ranks_here(2), _train_shard, sharded):
        torch.testing.assert_close(losses, _torch_losses(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_log_probabilities_and_entropies_with_any_upstream_gradient(dtype: torch.dtype) -> None:
    hidden, weight, labels = (each.to(DEVICE) for each in make_linear("logprob", dtype=dtype))
    upstream = torch.linspace(-1, 1, 9, device=DEVICE), torch.linspace(2, -1, 9, device=DEVICE)
    options: dict[str, Any] = {"loss": "logprob", "temperature": 1.3}
    right = linear_reference(
        hidden, weight, labels, reduction="none", row_grad=upstream[0], entropy_grad=upstream[1], **options
    )
    leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
    results = LinearEntropyLoss(**options)(*leaves, labels)
    for ours, expected in zip(results, (right.loss, right.entropy), strict=True):
        torch.testing.assert_close(ours.double().cpu(), expected, rtol=1e-5, atol=1e-5)
    for grad, expected in zip(
        torch.autograd.grad(results, leaves, upstream), (right.grad_hidden, right.grad_weight), strict=True
    ):
        assert_near(grad, expected, dtype)


@pytest.mark.parametrize("settings", [{}, {"reduction": "none"}, {"loss": "reverse_kl"}])
@pytest.mark.parametrize("learning", [("hidden",), ("weight",), ("bias",), ("hidden", "bias")])
def test_a_frozen_input_costs_no_product(learning: tuple[str, ...], settings: dict[str, Any]) -> None:
    hidden, weight, target = (each.to(DEVICE) for each in make_linear(settings.get("loss", "cross_entropy")))
    values = {"hidden": hidden, "weight": weight, "bias": torch.linspace(-1, 1, len(weight), device=DEVICE)}
    module, grads = LinearEntropyLoss(workspace_gib=4 * 100 * 4 / 2**30, **settings), []
    for names in (tuple(values), learning):
        leaves = {name: value.clone().requires_grad_(name in names) for name, value in values.items()}
        with FlopCounterMode(display=False) as products:
            module(leaves["hidden"], leaves["weight"], target, leaves["bias"]).sum().backward()
        grads.append({name: leaf.grad for name, leaf in leaves.items()})
    number = (2 if "reduction" in settings else 1) + len({*learning} - {"bias"})  # logits, perhaps again, and gradients
    assert products.get_total_flops() == number * 2 * hidden.numel() * len(weight)
    for name, grad in grads[1].items():
        assert (grad is None) == (name not in learning)
        assert grad is None or torch.equal(grad, grads[0][name])


def _train_dtensors(rank: Rank, placement: Any) -> list[float]:
    """Train with a module that knows no group: DTensors tell it. Every second call has plain hidden states."""
    body, whole = _model(rank.device)
    mesh = DeviceMesh.from_group(rank.group, rank.device.type)
    head = torch.nn.Linear(WIDTH, VOCAB).to(rank.device)
    for name, value in whole.named_parameters():
        setattr(head, name, torch.nn.Parameter(distribute_tensor(value.detach(), mesh, [Shard(0)])))
    module, is_placed = LinearEntropyLoss(exchange="nccl"), itertools.cycle([True, False])

    def loss_of(hidden: Tensor, head: torch.nn.Linear, labels: Tensor) -> Tensor:
        whole = DTensor.from_local(hidden, mesh, [Replicate()])
        states: Any = whole.redistribute(mesh, [placement]) if next(is_placed) else hidden
        result: Tensor = module(states, head.weight, labels, head.bias)
        return result

    return _train(rank.device, loss_of, body, head)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_dtensors_tell_the_group_and_the_columns(placement: Any) -> None:
    for losses in run_on_ranks(ranks_here(2), _train_dtensors, placement):
        torch.testing.assert_close(losses, _torch_losses(), rtol=1e-5, atol=1e-6)


def _wrong_placements(rank: Rank) -> list[str]:
    mesh = DeviceMesh.from_group(rank.group, rank.device.type)
    hidden, weight, labels = (each.to(rank.device) for each in make_linear())
    head = distribute_tensor(weight, mesh, [Shard(0)])
    messages = []
    for states, matrix in (
        (distribute_tensor(hidden, mesh, [Shard(1)]), head),
        (hidden, distribute_tensor(weight, mesh, [Shard(1)])),
    ):
        with pytest.raises(TypeError) as error:
            LinearEntropyLoss()(states, matrix, labels)
        messages.append(str(error.value))
    return messages


def test_a_placement_that_does_not_fit_is_named() -> None:
    for hidden, weight in run_on_ranks(ranks_here(2), _wrong_placements):
        assert hidden.startswith("hidden must be this rank's tensor") and "Shard(dim=1)" in hidden
        assert weight.startswith("weight must be this rank's tensor") and "Shard(dim=1)" in weight
