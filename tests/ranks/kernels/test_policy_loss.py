"""The policy loss against float64: every option, dtype and chunk, on one rank and over groups."""

import itertools
from typing import Any

import pytest
import torch

from tests.support.kernel_reference import (
    DEVICE,
    DTYPES,
    TOLERANCE,
    assert_gradient_near,
    assert_near,
    columns_of,
    make,
    make_linear,
    make_policy,
    on_device,
    on_ranks,
    policy_reference,
)
from tests.support.ranks import Rank, needs_cuda, ranks_here
from tpbench.kernels import EntropyLoss, LinearEntropyLoss, entropy_loss, linear_entropy_loss

OURS = ("algorithm", "block_cap", "exchange", "loss", "entropy", "workspace_gib", "hidden_sharded", "grad")
Case = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]


def right(logits: torch.Tensor, target: torch.Tensor, options: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """Return the reference, and its gradient by the logits."""
    leaf = logits.detach().double().cpu().requires_grad_()
    options = {name: value for name, value in options.items() if name not in OURS}
    reference = policy_reference(leaf, target.cpu(), **on_device(options, torch.device("cpu")))
    reference.objective.backward()
    assert leaf.grad is not None
    return reference, leaf.grad


def hide_masked(values: torch.Tensor, options: dict[str, Any], *numbers: float) -> None:
    """Fill the rows of weight 0 with these numbers in turn: nothing may read them."""
    if options["row_weight"] is not None:
        for number, row in zip(itertools.cycle(numbers), (options["row_weight"] == 0).nonzero()[:, 0], strict=False):
            values[row] = number


def check(result: Any, logits: torch.Tensor, target: torch.Tensor, options: dict[str, Any]) -> None:
    """Compare a result with the reference. Tensors of a result may be those of all ranks."""
    reference, grad = right(logits, target, options)
    numbers = {"loss": reference.loss, "row_loss": reference.row_loss, "logprobs": reference.logprobs}
    if "entropy_weight" in options or "entropy" in options:
        numbers["entropy"] = reference.entropy
    for name, expected in numbers.items():
        torch.testing.assert_close(getattr(result, name).cpu().double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(result.clipped.cpu(), reference.clipped)
    assert_gradient_near(result.grad, grad, logits.dtype, options)
    assert not result.grad.cpu()[~grad.any(dim=-1)].any()


CASES: dict[str, dict[str, Any]] = {
    "the plain loss": {"ref_logprobs": None, "row_weight": None, "kl_weight": 0.0},
    "all terms": {"entropy_weight": 0.3, "z_loss": 1e-2, "temperature": 0.7, "logits_scale": 1.3, "clip": (0.3, 0.1)},
    "sum": {"reduction": "sum", "softcap": 3.0},
    "temperatures": {
        "temperature": torch.linspace(0.5, 2, 9),
        "logits_scale": 1.3,
        "entropy_weight": 0.3,
        "softcap": 4.0,
    },
    "none": {"reduction": "none", "entropy": True},
    "upstream": {"row_grad": torch.linspace(-1, 2, 9), "entropy_grad": torch.linspace(1, -2, 9), "entropy": True},
    "no advantages": {"advantages": torch.zeros(9)},
    "all clipped": {"old_logprobs": torch.full((9,), -60.0), "advantages": torch.ones(9)},
    "no weights": {"row_weight": torch.zeros(9)},
    "masked infinities": {
        "row_weight": torch.tensor([0.0, 1, 0, 1, 1, 1, 1, 0, 1]),
        "old_logprobs": torch.tensor([-torch.inf, -2, -200, -3, -2, -1, -4, torch.inf, -2]),
    },
}


@pytest.mark.parametrize("case", CASES)
def test_every_option(case: str, device: torch.device, algorithm: dict[str, Any]) -> None:
    options = make_policy(9, **CASES[case])
    for dtype, block_cap in itertools.product(DTYPES if case == "all terms" else DTYPES[:1], (32, "auto")):
        logits, target = make("cross_entropy", dtype=dtype, device=device)
        target[4] = -100
        hide_masked(logits, options, torch.nan, torch.inf, -torch.inf)
        result = entropy_loss(logits, target, block_cap=block_cap, **on_device(options, device), **algorithm)
        check(result, logits, target, options)


def test_edges(device: torch.device, algorithm: dict[str, Any]) -> None:
    """-inf columns, labels of probability 0, padding, rows that do not count, and no rows that do."""
    logits, target = make("cross_entropy", device=device)
    logits[:, 10:40] = -torch.inf
    target = target.clamp(max=69)
    target[:2] = torch.tensor([20, 99])
    options = make_policy(9, ref_logprobs=None, kl_weight=0.0, vocab_size=70)
    check(entropy_loss(logits, target, **on_device(options, device), **algorithm), logits, target, options)
    nothing = entropy_loss(logits, torch.full_like(target, -100), **on_device(options, device), **algorithm)
    assert nothing.loss == 0 and nothing.grad is not None and not nothing.grad.any()
    none = on_device({name: each[:0] if torch.is_tensor(each) else each for name, each in options.items()}, device)
    assert entropy_loss(logits[:0], target[:0], **none, **algorithm).loss == 0
    # A row whose ratio is infinite has an infinite loss, and the other rows do not notice.
    target[3] = 5
    options["old_logprobs"], options["advantages"] = torch.full((9,), -500.0), torch.zeros(9)
    options["advantages"][3], options["row_weight"] = -1.0, None
    result = entropy_loss(logits, target, **on_device(options, device), **algorithm)
    assert result.row_loss[3] == torch.inf and result.row_loss[4:].isfinite().all()


@needs_cuda
@pytest.mark.parametrize(("vocab", "softcap"), [(131072, 30.0), (151936, None), (151936, 30.0)])
def test_long_rows(vocab: int, softcap: float | None, algorithm: dict[str, Any]) -> None:
    """Rows of one program or of several, one with columns of -inf and one whose probability is in one column."""
    if "exchange" not in algorithm:
        pytest.skip("the two-pass kernels treat long rows like short ones, and take long")
    logits, target = make("cross_entropy", rows=100, vocab=vocab, dtype=torch.bfloat16, device="cuda")
    logits[1, 8:50000] = -torch.inf
    logits[2, 7] = 90.0
    changes: dict[str, Any] = {"old_logprobs": torch.full((100,), -12.0), "ref_logprobs": None, "kl_weight": 0.0}
    options = make_policy(100, entropy_weight=0.3, temperature=0.7, z_loss=1e-2, softcap=softcap, **changes)
    check(entropy_loss(logits, target, **on_device(options, DEVICE), **algorithm), logits, target, options)


def _on_rank(rank: Rank, cases: list[Case]) -> list[dict[str, Any]]:
    results = []
    for logits, target, options in cases:
        shard = logits[:, columns_of(rank, logits.shape[1])].to(rank.device)
        result = entropy_loss(shard, target.to(rank.device), group=rank.group, **on_device(options, rank.device))
        results.append({name: getattr(result, name) for name in result.__dataclass_fields__ if name != "how"})
    return results


@pytest.mark.parametrize("world_size", sorted({ranks_here(2), ranks_here(3)}))
def test_over_ranks(world_size: int) -> None:
    cases: list[Case] = []
    for case, dtype in itertools.product(CASES, DTYPES if world_size == 2 else DTYPES[:1]):
        logits, target = make("cross_entropy", dtype=dtype, vocab=101)
        target[4] = -100
        exchange = "nccl" if dtype == torch.float16 else "auto"  # as beside FSDP
        options = make_policy(9, block_cap=16, exchange=exchange, **CASES[case])
        hide_masked(logits, options, torch.nan, torch.inf, -torch.inf)
        cases.append((logits, target, options))
    by_case = zip(*on_ranks(world_size, _on_rank, cases), strict=True)
    for (logits, target, options), shards in zip(cases, by_case, strict=True):
        for name in ("loss", "row_loss", "logprobs", "clipped"):
            assert all(torch.equal(each[name], shards[0][name]) for each in shards), (name, options)
        whole = {**shards[0], "grad": torch.cat([each["grad"] for each in shards], 1)}
        check(type("Result", (), whole), logits, target, options)


def _linear_on_rank(rank: Rank, cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    results = []
    for hidden, weight, target, options in cases:
        own = hidden.chunk(rank.world_size)[rank.rank] if options.get("hidden_sharded") else hidden
        result = linear_entropy_loss(
            own.to(rank.device), weight[columns_of(rank, len(weight))].to(rank.device), target.to(rank.device),
            group=rank.group, **on_device(options, rank.device),
        )  # fmt: skip
        results.append({name: getattr(result, name) for name in result.__dataclass_fields__ if name != "how"})
    return results


@pytest.mark.parametrize("world_size", sorted({1, ranks_here(2), ranks_here(3)}))
def test_the_linear_loss(world_size: int) -> None:
    """Rows in several chunks, and of several ranks."""
    cases = []
    for dtype, rows, number in itertools.product(DTYPES if world_size < 3 else DTYPES[:1], (12, 5), range(3)):
        hidden, weight, target = make_linear(rows=12, vocab=101, dtype=dtype)
        target[3] = -100
        more: dict[str, Any] = [
            {"entropy_weight": 0.2, "temperature": torch.linspace(0.5, 2, 12)},
            {"z_loss": 1e-3, "row_grad": torch.linspace(-1, 2, 12)},
            {"grad": False, "reduction": "none", "entropy": True},
        ][number]
        options = make_policy(12, hidden_sharded=world_size > 1 and number != 0, exchange="nccl", **more)
        hide_masked(hidden, options, torch.finfo(dtype).max)  # its logits overflow
        options["workspace_gib"] = rows * -(-101 // world_size) * dtype.itemsize / 2**30
        cases.append((hidden, weight, target, options))
    by_rank = on_ranks(world_size, _linear_on_rank, cases)
    for (hidden, weight, target, options), shards in zip(cases, zip(*by_rank, strict=True), strict=True):
        leaves = [each.double().requires_grad_() for each in (hidden, weight)]
        logits = leaves[0] @ leaves[1].t()
        rounding = logits.detach().to(hidden.dtype).double() - logits.detach()
        given = {name: value for name, value in options.items() if name not in OURS}
        reference = policy_reference(logits + rounding, target, **given)
        for name in ("loss", "row_loss", "logprobs"):
            assert all(torch.equal(each[name], shards[0][name]) for each in shards)
            tolerance = 1e-5 if options.get("grad", True) or hidden.dtype == torch.float32 else TOLERANCE[hidden.dtype]
            close = {"rtol": tolerance, "atol": tolerance}
            torch.testing.assert_close(shards[0][name].double().cpu(), getattr(reference, name), **close)
        assert torch.equal(shards[0]["clipped"].cpu(), reference.clipped)
        if options.get("grad", True):
            reference.objective.backward()
            of_hidden = [each["grad_hidden"] for each in shards]
            of_hidden = torch.cat(of_hidden) if options["hidden_sharded"] else of_hidden[0]
            assert_near(of_hidden, leaves[0].grad, hidden.dtype, options)
            assert_near(torch.cat([each["grad_weight"] for each in shards]), leaves[1].grad, hidden.dtype, options)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("module", [EntropyLoss, LinearEntropyLoss])
def test_the_modules_gradients(module: Any, reduction: str, dtype: torch.dtype, device: torch.device) -> None:
    """The loss and the gradient of the weight are those of torch's recipe, also for a mask and bf16 advantages."""
    hidden, weight, target = (each.to(device) for each in make_linear(rows=9))
    rows = {name: each for name, each in make_policy(9).items() if torch.is_tensor(each)}
    rows |= {"row_weight": rows["row_weight"] > 0, "advantages": rows["advantages"].bfloat16()}
    options: dict[str, Any] = {"kl_weight": 0.1, "clip": (0.2, 0.3), "reduction": reduction}
    upstream = torch.linspace(-1, 2, 9) if reduction == "none" else torch.tensor(1.5)
    ours, theirs = (weight.clone().requires_grad_() for _ in range(2))
    logits = ((hidden @ ours.t()).to(dtype),) if module is EntropyLoss else (hidden.to(dtype), ours.to(dtype))
    loss = module(loss="policy", **options)(*logits, target, **on_device(rows, device))
    recipe = policy_reference(
        (hidden @ theirs.t()).double().cpu(),
        target.cpu(),
        row_grad=upstream.expand(9),
        **options,
        **rows | {name: rows[name].float() for name in ("row_weight", "advantages")},
    )
    close = {"rtol": 4 * TOLERANCE[dtype], "atol": 4 * TOLERANCE[dtype]}
    torch.testing.assert_close(loss.double().cpu(), recipe.loss, **close)
    (grad,) = torch.autograd.grad(loss, ours, upstream.to(device))
    assert_near(grad, torch.autograd.grad(recipe.objective, theirs)[0].cpu(), dtype)
