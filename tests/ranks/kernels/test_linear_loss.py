"""`linear_entropy_loss` against float64, on one rank and over groups that shard vocabulary and hidden states."""

import itertools
from typing import Any

import pytest
import torch

from tests.support.kernel_reference import (
    DEVICE,
    DTYPES,
    LOSSES,
    assert_near,
    columns_of,
    linear_reference,
    make_linear,
    on_device,
    on_ranks,
)
from tests.support.ranks import Rank, ranks_here
from tpbench.kernels import linear_entropy_loss

INF = float("inf")
ALL_LOSSES = (*LOSSES, "logprob")
WORLDS = sorted({1, ranks_here(2), ranks_here(3)})
Case = tuple[torch.Tensor, torch.Tensor, Any, dict[str, Any]]
"""Hidden states, weight, target and options. Tensors hold the whole vocabulary."""


def gib(rows: int, columns: int = 100, itemsize: int = 4) -> float:
    """The workspace of so many rows."""
    return rows * columns * itemsize / 2**30


def _own_rows(rank: Rank, values: torch.Tensor, sharded: bool) -> torch.Tensor:
    return values.chunk(rank.world_size)[rank.rank] if sharded else values


def _run(rank: Rank, cases: list[Case]) -> list[dict[str, Any]]:
    results = []
    for hidden, weight, target, options in cases:
        columns, sharded = columns_of(rank, len(weight)), bool(options.get("hidden_sharded"))
        if isinstance(target, tuple):
            own: Any = (_own_rows(rank, target[0], sharded).to(rank.device), target[1][columns].to(rank.device))
        else:
            own = (target if target.dim() == 1 else target[:, columns]).to(rank.device)
        local = on_device(options, rank.device)
        for name in {"bias", "weight_grad"} & local.keys():
            local[name] = local[name][columns].clone()
        result = linear_entropy_loss(
            _own_rows(rank, hidden, sharded).to(rank.device), weight[columns].to(rank.device), own, group=rank.group,
            **local,
        )  # fmt: skip
        assert "weight_grad" not in local or result.grad_weight is local["weight_grad"]
        how = result.how
        results.append(
            {name: getattr(result, name) for name in result.__dataclass_fields__ if name != "how"}
            | {"chunks": how.chunks, "chunk_rows": how.chunk_rows, "workspace_gib": how.workspace_gib}
            | {"bytes_sent": how.bytes_sent}
        )
    return results


def check(world_size: int, cases: list[Case]) -> list[tuple[dict[str, Any], ...]]:
    """Compare all results with float64. Return those of all ranks, by case."""
    by_case: list[tuple[dict[str, Any], ...]] = list(zip(*on_ranks(world_size, _run, cases), strict=True))
    for (hidden, weight, target, options), shards in zip(cases, by_case, strict=True):
        first = shards[0]
        for name in ("loss", "row_loss", "chunks", *(["entropy"] if options.get("entropy") else [])):
            assert all(torch.equal(torch.as_tensor(each[name]), torch.as_tensor(first[name])) for each in shards), name
        ours = ("workspace_gib", "exchange", "hidden_sharded", "weight_grad", "entropy", "grad")
        right = linear_reference(
            hidden, weight, target, **{name: value for name, value in options.items() if name not in ours}
        )
        for name in ("loss", "row_loss", *(["entropy"] if options.get("entropy") else [])):
            torch.testing.assert_close(first[name].double().cpu(), getattr(right, name), rtol=1e-5, atol=1e-5)
        if options.get("grad") is False:
            assert all(first[name] is None for name in ("grad_hidden", "grad_weight", "grad_bias"))
            continue
        whole = torch.cat([each["grad_hidden"] for each in shards]) if options.get("hidden_sharded") else None
        assert_near(first["grad_hidden"] if whole is None else whole, right.grad_hidden, hidden.dtype, options)
        grad_weight = torch.cat([each["grad_weight"] for each in shards]).double().cpu()
        before = options["weight_grad"].double() if "weight_grad" in options else 0.0
        assert_near(grad_weight - before, right.grad_weight, hidden.dtype, options)
        if right.grad_bias is not None:
            assert first["grad_bias"].dtype == hidden.dtype
            assert_near(torch.cat([each["grad_bias"] for each in shards]), right.grad_bias, hidden.dtype, options)
    return by_case


@pytest.mark.parametrize("exchange", ["nccl", "symmetric"] if torch.cuda.is_available() else ["nccl"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_every_loss_dtype_and_chunk_size(world_size: int, exchange: str) -> None:
    cases: list[Case] = []
    chunks = (12, 5, 1) if world_size == 1 else (12, 5)
    combinations = itertools.product(ALL_LOSSES, (DTYPES, DTYPES[::2], DTYPES[:1])[world_size - 1], chunks)
    for index, (loss, dtype, rows) in enumerate(combinations):
        options = {"loss": loss, "exchange": exchange, "hidden_sharded": world_size > 1 and index // 2 % 2 == 0}
        options["workspace_gib"] = gib(rows, -(-101 // world_size), dtype.itemsize)
        if rows == 5:
            options["weight_grad"] = torch.randn(101, 16, generator=torch.Generator().manual_seed(2)) / 64
        cases.append((*make_linear(loss, rows=12, vocab=101, dtype=dtype), options))
    for (hidden, *_, options), shards in zip(cases, check(world_size, cases), strict=True):
        rows = round(options["workspace_gib"] / gib(1, -(-101 // world_size), hidden.itemsize))
        assert shards[0]["chunk_rows"] <= rows and shards[0]["chunks"] >= 12 / rows


@pytest.mark.parametrize("world_size", WORLDS)
def test_options(world_size: int) -> None:
    """Three ranks differ from two where their numbers meet: in the reduce-scatter of sharded hidden states."""
    cases: list[Case] = []
    row_grad, entropy_grad = torch.linspace(-1, 2, 12), torch.linspace(1, -2, 12)
    for index, loss in enumerate(ALL_LOSSES if world_size < 3 else ALL_LOSSES[:2]):
        sharded = world_size > 2 or (world_size == 2 and index % 2 == 0)
        labels, usual = loss in ("cross_entropy", "logprob"), {"hidden_sharded": sharded, "workspace_gib": gib(7, 34)}
        hidden, weight, target = make_linear(loss, rows=12, vocab=101)

        def case(target: Any, loss: Any = loss, hidden: Any = hidden, weight: Any = weight, **options: Any) -> None:
            cases.append((hidden, weight, target, {"loss": loss, **usual, **options}))  # noqa: B023

        case(target, softcap=3.0, bias=torch.linspace(-1, 1, 101))
        case(target, entropy=True, reduction="none", row_grad=row_grad, entropy_grad=entropy_grad)
        case(target, softcap=2.5, entropy=True, entropy_grad=entropy_grad)
        z_loss = 0.0 if loss == "logprob" else 1e-2
        case(target, reduction="sum", logits_scale=0.7, grad_scale=-3.7, z_loss=z_loss)
        if labels:
            uncounted = torch.cat((torch.tensor([-100, -1, 101, 10**9]), target[4:]))
            smoothed = {"label_smoothing": 0.1, "z_loss": 1e-3} if loss == "cross_entropy" else {"temperature": 0.7}
            case(uncounted, **smoothed)
            case(torch.full_like(target, -100), entropy=True)
            case(target.int().clamp(max=69), vocab_size=70)
        else:
            teacher, teacher_weight, _ = make_linear(loss, rows=12, vocab=101, width=24, seed=4)
            case((teacher, teacher_weight), temperature=1.4)
            case((teacher, teacher_weight), temperature=1.4, softcap=3.0)
    check(world_size, cases)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_options_in_half_precision(dtype: torch.dtype) -> None:
    hidden, weight, target = make_linear(dtype=dtype)
    capped = {"softcap": 3.0, "bias": torch.linspace(-1, 1, 100).to(dtype), "entropy": True}
    added = {"weight_grad": weight / 64, "workspace_gib": gib(4, itemsize=dtype.itemsize)}
    smoothed = {"label_smoothing": 0.1, "z_loss": 1e-3, "workspace_gib": gib(2)}
    check(1, [(hidden, weight, target, options) for options in (capped, added, smoothed)])


@pytest.mark.parametrize("world_size", WORLDS[:2])
def test_logits_in_fp32(world_size: int) -> None:
    """Losses are then those of exact logits. A logit and its gradient take 6 bytes, and a teacher's logit 4."""
    cases: list[Case] = []
    for loss, dtype in itertools.product(("logprob", "forward_kl"), DTYPES[1:]):
        hidden, weight, target = make_linear(loss, rows=12, vocab=101, dtype=dtype)
        options = {"loss": loss, "logits_dtype": "float32", "workspace_gib": 4 * 10 * -(-101 // world_size) / 2**30}
        if loss == "forward_kl":
            target = tuple(make_linear(loss, rows=12, vocab=101, width=24, dtype=dtype, seed=4)[:2])  # type: ignore[assignment]
        cases.append((hidden, weight, target, {**options, "hidden_sharded": world_size > 1}))
        bias = torch.linspace(-1, 1, 101).to(dtype)
        cases.append((hidden, weight, target, {**options, "bias": bias, "entropy": True, "softcap": 3.0}))
    for (*_, options), shards in zip(cases, check(world_size, cases), strict=True):
        assert shards[0]["chunk_rows"] == (4 if options["loss"] == "forward_kl" else 6)
    rounded = linear_entropy_loss(*(each.to(DEVICE) for each in make_linear(dtype=DTYPES[2])), grad=False)
    exact = linear_entropy_loss(
        *(each.to(DEVICE) for each in make_linear(dtype=DTYPES[2])), grad=False, logits_dtype="float32"
    )
    assert (rounded.row_loss - exact.row_loss).abs().max() > 1e-4


def _not_finite(rank: Rank, cases: list[tuple[str, bool]]) -> list[list[Any]]:
    """The losses and gradients with rows 1 and 5 masked, whose hidden states are finite or not."""
    results = []
    for (loss, sharded), value in itertools.product(cases, (0.5, float("nan"), INF)):
        hidden, weight, target = (each.to(rank.device) for each in make_linear(loss, rows=12, vocab=101))
        teacher, teacher_weight, _ = (each.to(rank.device) for each in make_linear(rows=12, vocab=101, seed=4))
        row_weight = torch.ones(12, device=rank.device)
        row_weight[5] = 0.0
        if target.dim() == 1:
            target[1] = -100
        else:
            row_weight[1] = 0.0
        hidden[[1, 5]] = teacher[[1, 5]] = value
        own = columns_of(rank, 101)
        of_teacher = (_own_rows(rank, teacher, sharded), teacher_weight[own])
        result = linear_entropy_loss(
            _own_rows(rank, hidden, sharded), weight[own], target if target.dim() == 1 else of_teacher, loss=loss,  # type: ignore[arg-type]
            group=rank.group, row_weight=row_weight, hidden_sharded=sharded, workspace_gib=gib(5),
        )  # fmt: skip
        results.append([result.loss, result.grad_hidden, result.grad_weight])
    return results


@pytest.mark.parametrize("world_size", WORLDS[:2])
def test_hidden_states_of_masked_rows_are_not_read(world_size: int) -> None:
    cases = [(loss, sharded) for loss in ("cross_entropy", "reverse_kl") for sharded in {False, world_size > 1}]
    for results in on_ranks(world_size, _not_finite, cases):
        for finite, *others in zip(results[::3], results[1::3], results[2::3], strict=True):
            assert finite[2].any() and all(
                torch.equal(*pair) for each in others for pair in zip(finite, each, strict=True)
            )


@pytest.mark.parametrize("loss", ALL_LOSSES)
def test_no_rows(loss: Any) -> None:
    hidden, weight, target = (each.to(DEVICE) for each in make_linear(loss, rows=0))
    result = linear_entropy_loss(hidden, weight, target, loss=loss)
    assert result.loss == 0 and result.row_loss.shape == (0,) and result.how.chunks == 0
    assert result.grad_weight is not None and not result.grad_weight.any()
    main_grad = torch.ones_like(weight)
    result = linear_entropy_loss(hidden, weight, target, loss=loss, weight_grad=main_grad)
    assert result.grad_weight is main_grad and (main_grad == 1).all()


def test_any_strides() -> None:
    hidden, weight, target = make_linear("reverse_kl")
    right = linear_reference(hidden, weight, target, loss="reverse_kl")
    strided = (each.t().contiguous().t().to(DEVICE) for each in (hidden, weight, target))
    room = torch.zeros(100, 32, device=DEVICE)
    result = linear_entropy_loss(*strided, loss="reverse_kl", weight_grad=room[:, ::2], workspace_gib=gib(4))
    torch.testing.assert_close(result.loss.double().cpu(), right.loss, rtol=1e-5, atol=1e-5)
    assert result.grad_hidden is not None and not room[:, 1::2].any()
    assert_near(result.grad_hidden, right.grad_hidden, torch.float32)
    assert_near(room[:, ::2], right.grad_weight, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", WORLDS[:2])
def test_without_gradients(world_size: int, dtype: torch.dtype) -> None:
    hidden, weight, target = make_linear("logprob", rows=12, dtype=dtype, vocab=101)
    target[3] = -100
    bias = torch.linspace(-1, 1, 101).to(dtype)
    bias[40:60] = -INF
    target[(target >= 40) & (target < 60)] = 7
    options: list[dict[str, Any]] = [
        {"loss": "logprob", "reduction": "none", "entropy": True, "temperature": 1.3, "bias": bias},
        {"loss": "logprob", "reduction": "sum", "softcap": 2.0, "entropy": True},
        {"z_loss": 1e-2, "bias": bias, "vocab_size": 90},
        {"label_smoothing": 0.1, "entropy": True},
    ]
    cases: list[Case] = []
    for option, sharded in itertools.product(options, (False, True) if world_size > 1 else (False,)):
        columns = -(-option.get("vocab_size", 101) // world_size)
        row_bytes = columns * dtype.itemsize
        option = {**option, "grad": False, "hidden_sharded": sharded, "workspace_gib": 5 * row_bytes / 2**30}
        cases.append((hidden, weight, target, option))
    for shards in check(world_size, cases):
        assert shards[0]["chunks"] == 3
    two_logits = [(*make_linear(loss), {"loss": loss, "grad": False, "workspace_gib": gib(4)}) for loss in LOSSES[1:]]
    check(world_size, two_logits)


def test_fp16_gradients_of_a_mean_over_many_rows() -> None:
    """A gradient of 1e-8, smaller than fp16 can express, still adds up in the products."""
    hidden, weight, target = make_linear(rows=3000, vocab=4000, dtype=torch.float16)
    check(1, [(hidden, weight / 8, target, {"grad_scale": 1024.0, "workspace_gib": gib(1500, 4000, 2)})])


def test_bytes_sent() -> None:
    """Two of three numbers are those of the hidden states: 12 rows of 16 numbers, 4 bytes each."""
    cases: list[Case] = [
        (*make_linear(rows=12, vocab=101), {"hidden_sharded": sharded, "exchange": "nccl"}) for sharded in (False, True)
    ]
    statistics, matrix = 12 * 3 * 4, 12 * 16 * 4
    for shards in check(2, cases):
        # An all-reduce, or an all-gather and a reduce-scatter: each rank sends two halves of the matrix.
        assert [each["bytes_sent"] for each in shards] == [statistics + matrix] * 2


def _empty_shard(rank: Rank) -> list[Any]:
    """All of the vocabulary is the second rank's."""
    hidden, weight, target = (each.to(rank.device) for each in make_linear(vocab=101))
    own = weight if rank.rank == 1 else weight[:0]
    result = linear_entropy_loss(hidden, own, target, group=rank.group, exchange="nccl", workspace_gib=gib(4, 51))
    forward = linear_entropy_loss(
        hidden.bfloat16(), own.bfloat16(), target, group=rank.group, exchange="nccl", grad=False
    )
    return [result.row_loss, result.grad_hidden, result.grad_weight, forward.row_loss]


def test_a_rank_without_a_vocabulary() -> None:
    first, second = on_ranks(2, _empty_shard)
    hidden, weight, target = make_linear(vocab=101)
    right = linear_reference(hidden, weight, target)
    in_bf16 = linear_reference(hidden.bfloat16(), weight.bfloat16(), target)
    torch.testing.assert_close(second[3].double(), in_bf16.row_loss, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(first[index], second[index]) for index in (0, 1, 3)) and first[2].shape == (0, 16)
    assert_near(second[1], right.grad_hidden, torch.float32)
    assert_near(second[2], right.grad_weight, torch.float32)


@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        ("hidden", {"hidden": torch.zeros(9)}),
        ("weight", {"hidden": torch.zeros(9, 16).bfloat16()}),
        ("bias", {"bias": torch.zeros(99)}),
        ("target", {"target": torch.zeros(8).long()}),
        ("target", {"loss": "reverse_kl"}),
        ("target", {"loss": "forward_kl", "target": (torch.zeros(9, 4),) * 3}),
        ("teacher_hidden", {"loss": "reverse_kl", "target": (torch.zeros(8, 4), torch.zeros(100, 4))}),
        ("weight_grad", {"weight_grad": torch.zeros(100, 16).half()}),
        ("weight_grad", {"weight_grad": torch.zeros(1, 16, device=DEVICE).expand(100, 16)}),
        ("workspace_gib", {"workspace_gib": "all"}),
        ("grad", {"grad": "hidden"}),
        ("weight_grad", {"grad": ("bias",), "weight_grad": torch.zeros(100, 16)}),
        ("row_grad", {"row_grad": torch.zeros(8)}),
        ("entropy_grad", {"entropy_grad": torch.zeros(9)}),
        ("z_loss", {"z_loss": 0.1, "loss": "logprob"}),
    ],
)
def test_an_error_names_its_argument(error: str, wrong: dict[str, Any]) -> None:
    names = ("hidden", "weight", "target")
    arguments = dict(zip(names, make_linear(), strict=True)) | wrong
    for name, value in arguments.items():
        if torch.is_tensor(value):
            arguments[name] = value.to(DEVICE)
    inputs = [arguments.pop(name) for name in names]
    with pytest.raises((TypeError, ValueError), match=f"^{error} "):
        linear_entropy_loss(*inputs, **arguments)
