"""`linear_entropy_loss` on one rank: every loss, dtype, chunk size and option against float64, and edge cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.kernel_reference import DTYPES, LOSSES
from tests.support.linear_reference import assert_near, linear_reference, make_linear
from tpbench.kernels import LinearEntropyLossResult, linear_entropy_loss
from tpbench.kernels.linear.statistics import bytes_of_tiles, is_supported

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INF = float("inf")


def gib(rows: int, columns: int = 100, itemsize: int = 4) -> float:
    """The workspace of so many rows."""
    return rows * columns * itemsize / 2**30


def check(hidden: torch.Tensor, weight: torch.Tensor, target: Any, **options: Any) -> LinearEntropyLossResult:
    """Compare all results with float64."""
    how = {name: options.pop(name) for name in ("workspace_gib", "weight_grad", "exchange") if name in options}
    given = how.get("weight_grad")
    before = 0.0 if given is None else given.double().cpu()
    place = tuple(each.to(DEVICE) for each in target) if isinstance(target, tuple) else target.to(DEVICE)
    on_device = {name: value.to(DEVICE) if torch.is_tensor(value) else value for name, value in options.items()}
    result = linear_entropy_loss(hidden.to(DEVICE), weight.to(DEVICE), place, **on_device, **how)
    right = linear_reference(hidden, weight, target, **{k: v for k, v in options.items() if k != "entropy"})
    torch.testing.assert_close(result.loss.double().cpu(), right.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.row_loss.double().cpu(), right.row_loss, rtol=1e-5, atol=1e-5)
    if options.get("entropy"):
        assert result.entropy is not None
        torch.testing.assert_close(result.entropy.double().cpu(), right.entropy, rtol=1e-5, atol=1e-5)
    assert result.grad_hidden is not None and result.grad_hidden.dtype == hidden.dtype
    assert result.grad_weight is not None
    assert_near(result.grad_hidden, right.grad_hidden, hidden.dtype, options)
    assert_near(result.grad_weight.double().cpu() - before, right.grad_weight, hidden.dtype, options)
    if right.grad_bias is not None:
        assert result.grad_bias is not None and result.grad_bias.dtype == hidden.dtype
        assert_near(result.grad_bias, right.grad_bias, hidden.dtype, options)
    if given is not None:
        assert result.grad_weight is given
    return result


@pytest.mark.parametrize("rows", [9, 4, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", [*LOSSES, "logprob"])
def test_every_loss_dtype_and_chunk_size(loss: Any, dtype: torch.dtype, rows: int) -> None:
    hidden, weight, target = make_linear(loss, dtype=dtype)
    result = check(hidden, weight, target, loss=loss, workspace_gib=gib(rows, itemsize=dtype.itemsize))
    assert result.how.chunk_rows <= rows and result.how.chunks >= 9 / rows
    assert result.how.workspace_gib <= gib(rows, itemsize=dtype.itemsize) * 1.0001


@pytest.mark.parametrize("to_fp32", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weights_gradient_is_added(dtype: torch.dtype, to_fp32: bool) -> None:
    hidden, weight, target = make_linear(dtype=dtype)
    main_grad = torch.randn(100, 16, generator=torch.Generator().manual_seed(2)).to(DEVICE) / 64
    main_grad = main_grad if to_fp32 else main_grad.to(dtype)
    result = check(hidden, weight, target, weight_grad=main_grad, workspace_gib=gib(4, itemsize=dtype.itemsize))
    in_product = dtype == main_grad.dtype or DEVICE.type == "cuda"
    assert result.how.weight_grad == ("product" if in_product else "blocks")


OPTIONS: list[dict[str, Any]] = [
    {"reduction": "sum", "z_loss": 1e-2, "logits_scale": 0.7, "grad_scale": -3.7},
    {"reduction": "none", "entropy": True, "row_grad": torch.linspace(-1, 2, 9)},
    {"softcap": 2.5, "entropy": True, "entropy_grad": torch.linspace(1, -2, 9)},
    {"bias": torch.linspace(-1, 1, 100), "entropy": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
@pytest.mark.parametrize("loss", [*LOSSES, "logprob"])
def test_options(loss: Any, options: dict[str, Any]) -> None:
    hidden, weight, target = make_linear(loss)
    options = {name: value for name, value in options.items() if not (loss == "logprob" and name == "z_loss")}
    temperature = 1.0 if loss == "cross_entropy" else 1.7
    check(hidden, weight, target, loss=loss, temperature=temperature, workspace_gib=gib(4), **options)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_options_in_half_precision(dtype: torch.dtype) -> None:
    hidden, weight, target = make_linear(dtype=dtype)
    check(hidden, weight, target, softcap=3.0, bias=torch.linspace(-1, 1, 100).to(dtype), entropy=True)
    check(hidden, weight, target, label_smoothing=0.1, z_loss=1e-3, workspace_gib=gib(2))


def test_label_smoothing() -> None:
    check(*make_linear(), label_smoothing=0.2, workspace_gib=gib(4), softcap=4.0, z_loss=1e-3)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("loss", LOSSES[1:])
def test_the_teachers_hidden_states(loss: Any, softcap: float | None) -> None:
    hidden, weight, _ = make_linear(loss)
    teacher, teacher_weight, _ = make_linear(loss, width=24, seed=5)
    result = check(
        hidden, weight, (teacher, teacher_weight), loss=loss, temperature=1.3, softcap=softcap, workspace_gib=gib(8)
    )
    assert result.how.chunk_rows <= 4  # logits of both


def test_labels_that_do_not_count() -> None:
    hidden, weight, target = make_linear()
    target[:5] = torch.tensor([-100, -1, 100, 2**31 - 1, -(2**31)])
    for labels in (target, target.int()):
        for loss in ("cross_entropy", "logprob"):
            check(hidden, weight, labels, loss=loss, workspace_gib=gib(2), entropy=True)
    result = linear_entropy_loss(hidden.to(DEVICE), weight.to(DEVICE), torch.full_like(target, -100).to(DEVICE))
    assert result.grad_hidden is not None and result.grad_weight is not None
    assert result.loss == 0 and not result.grad_hidden.any() and not result.grad_weight.any()


def test_padding_and_minus_infinity() -> None:
    hidden, weight, target = make_linear(dtype=torch.float32)
    target.clamp_(max=69)
    bias = torch.zeros(100)
    bias[10:60] = -INF
    target[target < 60] = 65
    result = check(hidden, weight, target, vocab_size=70, workspace_gib=gib(4))
    assert result.grad_weight is not None and not result.grad_weight[70:].any()
    result = check(hidden, weight, target, bias=bias, entropy=True)
    assert result.grad_weight is not None and not result.grad_weight[10:60].any()


@pytest.mark.parametrize("loss", [*LOSSES, "logprob"])
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
    strided = (hidden.t().contiguous().t(), weight.t().contiguous().t(), target.t().contiguous().t())
    check(*strided, loss="reverse_kl", workspace_gib=gib(4))
    room = torch.zeros(100, 32, device=DEVICE)
    check(hidden, weight, target, loss="reverse_kl", weight_grad=room[:, ::2], workspace_gib=gib(4))
    assert not room[:, 1::2].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_gradients(dtype: torch.dtype) -> None:
    hidden, weight, target = make_linear("logprob", dtype=dtype, vocab=101)
    target[3] = -100
    bias = torch.linspace(-1, 1, 101).to(dtype)
    bias[40:60] = -INF
    target[(target >= 40) & (target < 60)] = 7
    some: list[dict[str, Any]] = [
        {"loss": "logprob", "reduction": "none", "entropy": True, "temperature": 1.3, "bias": bias},
        {"loss": "logprob", "reduction": "sum", "softcap": 2.0, "entropy": True},
        {"z_loss": 1e-2, "bias": bias, "vocab_size": 90},
        {"label_smoothing": 0.1, "entropy": True},
    ]
    for options in some:
        place = {name: value.to(DEVICE) if torch.is_tensor(value) else value for name, value in options.items()}
        inputs = [each.to(DEVICE) for each in (hidden, weight, target)]
        chunk_gib = gib(4, 101, dtype.itemsize)
        if is_supported(inputs[0]) and "label_smoothing" not in options:
            chunk_gib = 4 * bytes_of_tiles(options.get("vocab_size", 101), "entropy" in options) / 2**30
        result = linear_entropy_loss(*inputs, grad=False, workspace_gib=chunk_gib, **place)
        assert result.how.workspace_gib <= chunk_gib * 1.0001
        assert result.grad_hidden is result.grad_weight is result.grad_bias is None and result.how.chunks == 3
        right = linear_reference(hidden, weight, target, **{k: v for k, v in options.items() if k != "entropy"})
        torch.testing.assert_close(result.loss.double().cpu(), right.loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(result.row_loss.double().cpu(), right.row_loss, rtol=1e-5, atol=1e-5)
        assert (result.entropy is None) == ("entropy" not in options)
        if result.entropy is not None:
            torch.testing.assert_close(result.entropy.double().cpu(), right.entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_statistics_from_the_product(dtype: torch.dtype, strided: bool) -> None:
    """Several tiles of rows, columns and width, of which the last are incomplete, and one tile of -inf only.

    Labels of an incomplete tile, of a neighbour of a tile's edge and of padding are among them.
    """
    hidden, weight, target = make_linear("logprob", rows=150, width=72, vocab=700, dtype=dtype)
    target[:6] = torch.tensor([255, 512, 660, 679, 680, -100])
    bias = torch.zeros(700).to(dtype)
    bias[256:512] = -INF
    target[(target >= 256) & (target < 512)] = 3
    place = [each.t().contiguous().t() if strided and each.dim() == 2 else each for each in (hidden, weight, target)]
    result = linear_entropy_loss(
        *(each.to(DEVICE) for each in place), bias=bias.to(DEVICE), vocab_size=680, loss="logprob", reduction="none",
        entropy=True, grad=False, temperature=1.3, workspace_gib=140 * bytes_of_tiles(680, True) / 2**30,
    )  # fmt: skip
    right = linear_reference(
        hidden, weight, target, bias=bias, vocab_size=680, loss="logprob", reduction="none", temperature=1.3
    )
    assert result.how.chunks == 2 and result.entropy is not None
    # A sum in another order may round a logit to a neighbouring number. Its row then differs by that rounding.
    for ours, expected in ((result.row_loss, right.row_loss), (result.entropy, right.entropy)):
        error = (ours.double().cpu() - expected).abs()
        assert error.median() < 1e-5 and error.max() < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("loss", LOSSES[1:])
def test_without_gradients_of_two_logit_losses(loss: Any) -> None:
    hidden, weight, target = (each.to(DEVICE) for each in make_linear(loss))
    forward = linear_entropy_loss(hidden, weight, target, loss=loss, grad=False, workspace_gib=gib(4))
    both = linear_entropy_loss(hidden, weight, target, loss=loss)
    torch.testing.assert_close(forward.loss, both.loss, rtol=1e-5, atol=1e-6)


def test_fp16_gradients_of_a_mean_over_many_rows() -> None:
    """A gradient of 1e-8, smaller than fp16 can express, still adds up in the products."""
    hidden, weight, target = make_linear(rows=3000, vocab=4000, dtype=torch.float16)
    check(hidden, weight / 8, target, grad_scale=1024.0, workspace_gib=gib(1500, 4000, 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with 24 GiB")
def test_more_than_2_31_logits() -> None:
    """The last rows of one chunk lie past 2^31 elements. Rows and gradients equal those of small chunks.

    A logit may be rounded to a neighbouring bf16 number where a product of another size adds in another order.
    """
    rows, vocab, width = 33_000, 65_600, 64
    hidden, weight, target = (
        each.to(DEVICE) for each in make_linear(rows=rows, vocab=vocab, width=width, dtype=torch.bfloat16)
    )
    target[-1] = vocab - 1
    whole, small = (
        linear_entropy_loss(hidden, weight, target, workspace_gib=gib(chunk, vocab, 2)) for chunk in (rows, 4096)
    )
    assert whole.how.chunks == 1 and small.how.chunks > 1
    right = torch.nn.functional.cross_entropy((hidden[-512:] @ weight.t()).double(), target[-512:], reduction="none")
    torch.testing.assert_close(whole.row_loss[-512:].double(), right, rtol=0, atol=0.2)
    torch.testing.assert_close(whole.row_loss, small.row_loss, rtol=0, atol=0.2)
    for one, other in ((whole.grad_hidden, small.grad_hidden), (whole.grad_weight, small.grad_weight)):
        assert one is not None and other is not None
        assert_near(one, other.double().cpu(), torch.bfloat16)


@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        ("hidden", {"hidden": torch.zeros(9)}),
        ("hidden and weight", {"hidden": torch.zeros(9, 15)}),
        ("hidden and weight", {"hidden": torch.zeros(9, 16).bfloat16()}),
        ("weight", {"weight": torch.zeros(100, 16).long()}),
        ("bias", {"bias": torch.zeros(99)}),
        ("target", {"target": torch.zeros(8).long()}),
        ("target", {"loss": "reverse_kl"}),
        ("teacher_hidden", {"loss": "reverse_kl", "target": (torch.zeros(8, 4), torch.zeros(100, 4))}),
        ("weight_grad", {"weight_grad": torch.zeros(100, 16).half()}),
        ("weight_grad", {"weight_grad": torch.zeros(1, 16, device=DEVICE).expand(100, 16)}),
        ("workspace_gib", {"workspace_gib": 0}),
        ("softcap", {"softcap": -1.0}),
        ("row_grad", {"row_grad": torch.zeros(8)}),
        ("entropy_grad", {"entropy_grad": torch.zeros(9)}),
        ("z_loss", {"z_loss": 0.1, "loss": "logprob"}),
        ("loss", {"loss": "mse"}),
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
