"""The kernels on one rank: every loss, dtype and option, and the cases where published kernels fail."""

import math
import weakref
from typing import Any

import pytest
import torch

from tests.support.kernel_reference import LOSSES, assert_right, far_away, make, reference
from tests.support.ranks import needs_cuda
from tpbench.kernels import EntropyLoss, entropy_loss

INF = float("inf")
all_losses = pytest.mark.parametrize("loss", LOSSES)


def check(
    logits: torch.Tensor, target: torch.Tensor, right: Any = None, *, block_cap: Any = "auto", algorithm: Any = "auto",
    exchange: Any = "auto", grad: Any = "new", **options: Any,
) -> torch.Tensor:  # fmt: skip
    """Compare the loss and its gradient with the reference, which has only the further options. Return the gradient."""
    right = right or reference(logits, target, **options)
    result = entropy_loss(
        logits, target, block_cap=block_cap, algorithm=algorithm, exchange=exchange, grad=grad, **options
    )
    assert result.grad is not None and result.loss.dtype == result.row_loss.dtype == torch.float32
    assert isinstance(grad, torch.Tensor) or result.grad.dtype == logits.dtype
    assert_right(result.loss, result.row_loss, result.grad, right)
    return result.grad


@pytest.mark.parametrize(
    ("dtype", "block_cap"),
    [(torch.float32, "auto"), (torch.float32, 32), (torch.float16, 32), (torch.bfloat16, 32), (torch.bfloat16, "auto")],
)
@all_losses
def test_it_agrees_with_float64(
    loss: Any, dtype: torch.dtype, block_cap: Any, device: torch.device, algorithm: Any
) -> None:
    temperature = 1.0 if loss == "cross_entropy" else 1.7
    logits, target = make(loss, dtype=dtype, device=device)
    check(logits, target, loss=loss, logits_scale=1.3, temperature=temperature, block_cap=block_cap, **algorithm)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@all_losses
def test_reductions_and_scales(loss: Any, reduction: str, device: torch.device, algorithm: Any) -> None:
    options = {"loss": loss, "reduction": reduction, **algorithm}
    check(*make(loss, device=device), grad_scale=-3.7, z_loss=1e-2, logits_scale=0.7, block_cap=64, **options)
    none = entropy_loss(*make(loss, rows=0, device=device), **options)
    assert none.loss.shape == ((0,) if reduction == "none" else ()) and none.loss.sum() == 0
    assert none.grad is not None and none.grad.shape == (0, 100)


@all_losses
def test_a_repeated_call_has_the_bits_of_a_first_one(loss: Any, device: torch.device, algorithm: Any) -> None:
    """Nothing keeps the tensors of either: a gradient is as large as the logits."""
    logits, target = make(loss, device=device)
    first_call: Any = vars(entropy_loss)["__wrapped__"]
    for step in range(3):
        options = {"loss": loss, "z_loss": 1e-3, **algorithm}
        result, right = (call(logits - step, target, **options) for call in (entropy_loss, first_call))
        for name in ("loss", "row_loss", "grad"):
            assert torch.equal(getattr(result, name), getattr(right, name))
        gradients = weakref.ref(result.grad), weakref.ref(right.grad)
        del result, right
        assert gradients[0]() is gradients[1]() is None


@pytest.mark.parametrize("loss", LOSSES[1:])
def test_the_smallest_temperature(loss: Any, device: torch.device, algorithm: Any) -> None:
    logits, target = make(loss, device=device)
    check(logits, target * 100, loss=loss, temperature=1e-6, **algorithm)


@pytest.mark.parametrize("label_smoothing", [0.1, 1.0])
def test_label_smoothing(label_smoothing: float, device: torch.device, algorithm: Any) -> None:
    logits, target = make("cross_entropy", device=device)
    check(logits, target, label_smoothing=label_smoothing, z_loss=1e-3, block_cap=32, **algorithm)


def test_megatrons_label_smoothing(device: torch.device) -> None:
    """Megatron's share s of the other columns is s * K / (K - 1) of all K (vocab_parallel_cross_entropy, one rank)."""
    logits, target = make("cross_entropy")
    leaf, share, columns = logits.double().requires_grad_(), 0.1, logits.shape[1]
    log_p = leaf.log_softmax(-1)
    smoothing = share * columns / (columns - 1)
    losses = (1.0 - smoothing) * -log_p.gather(1, target[:, None])[:, 0] - smoothing * log_p.mean(-1)
    spread = torch.full_like(log_p, share / (columns - 1)).scatter(1, target[:, None], 1.0 - share)
    torch.testing.assert_close(losses, -(spread * log_p).sum(-1))
    losses.mean().backward()
    result = entropy_loss(logits.to(device), target.to(device), label_smoothing=share * columns / (columns - 1))
    assert result.grad is not None and leaf.grad is not None
    assert_right(result.loss, result.row_loss, result.grad, (losses.mean().detach(), losses.detach(), leaf.grad))


@pytest.mark.parametrize("softcap", [1e-3, 1.0, 30.0, 100.0, 1e6, 1e30, 3e38])
def test_any_softcap(softcap: float, device: torch.device, algorithm: Any) -> None:
    logits, target = make("cross_entropy", device=device)
    logits[::2] *= softcap / 10 if softcap < 1e6 else 10.0  # below the cap and around it
    leaf = logits.double().requires_grad_()
    right = torch.nn.functional.cross_entropy(softcap * (leaf / softcap).tanh(), target, reduction="none")
    right.mean().backward()
    result = entropy_loss(logits, target, softcap=softcap, block_cap=32, **algorithm)
    torch.testing.assert_close(result.row_loss.double(), right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.grad, leaf.grad.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("dtype", "ignore_index"), [(torch.int32, -100), (torch.int64, -100), (torch.int64, 5)])
def test_labels_that_do_not_count(dtype: torch.dtype, ignore_index: int, device: torch.device, algorithm: Any) -> None:
    logits, target = make("cross_entropy", device=device)
    target[:5] = torch.tensor([ignore_index, -1, 100, 2**31 - 1, -(2**31)])
    logits[:5, 7] = torch.tensor([math.nan, INF, -INF, math.nan, 0.0])  # not read
    target = target.to(dtype)
    grad = check(logits, target, ignore_index=ignore_index, block_cap=32, **algorithm)
    assert not grad[:5].any()
    for where in ("new", "in_place"):
        nothing = entropy_loss(logits, torch.full_like(target, -100), grad=where, **algorithm)  # type: ignore[arg-type]
        assert nothing.grad is not None and nothing.loss.item() == 0 and not nothing.grad.any()


@pytest.mark.parametrize("columns", [slice(0, 32), slice(32, 64), slice(90, 100), slice(0, 99)])
@all_losses
def test_tiles_of_minus_infinity(loss: Any, columns: slice, device: torch.device, algorithm: Any) -> None:
    logits, target = make(loss, device=device)
    logits[:, columns] = -INF
    if loss == "cross_entropy":
        target[:] = 99 if columns.stop < 100 else 0
    else:
        target[:, columns] = -INF
    check(logits, target, loss=loss, block_cap=32, **algorithm)


@pytest.mark.parametrize("loss", LOSSES[1:])
def test_weights_of_zero(loss: Any, device: torch.device, algorithm: Any) -> None:
    """0 * inf: where the weight is zero the other side may be anything."""
    logits, target = make(loss, device=device)
    zero, other = (logits, target) if loss == "reverse_kl" else (target, logits)
    zero[:, 10:70] = -INF
    other[:, 40:60] = -INF
    check(logits, target, loss=loss, block_cap=32, **algorithm)


@pytest.mark.parametrize("loss", ["cross_entropy", "soft_cross_entropy"])
def test_an_infinite_loss_is_infinite(loss: Any, device: torch.device, algorithm: Any) -> None:
    logits, target = make(loss, device=device)
    logits[2, target[2] if loss == "cross_entropy" else 40] = -INF
    result = entropy_loss(logits, target, loss=loss, block_cap=32, **algorithm)
    assert result.row_loss[2] == INF and result.loss == INF
    assert result.grad is not None and result.grad.isfinite().all()


@pytest.mark.parametrize("loss", ["cross_entropy", "policy"])
def test_a_row_without_a_softmax_is_nan_and_harms_no_other(loss: Any, device: torch.device, algorithm: Any) -> None:
    logits, target = make("cross_entropy", device=device)
    logits[1] = -INF
    logits[2, 3] = math.nan
    zeros = torch.zeros(9, device=device)  # without an advantage, a finite ratio doesn't matter
    rows: Any = {"old_logprobs": zeros, "advantages": zeros} if loss == "policy" else {}
    result = entropy_loss(logits, target, loss=loss, block_cap=32, **rows, **algorithm)
    assert result.grad is not None
    for wrong in (result.row_loss.isnan(), result.grad.isnan().any(1)):
        assert wrong.tolist() == [row in (1, 2) for row in range(9)]


@all_losses
def test_a_large_common_offset_costs_no_precision(loss: Any, device: torch.device, algorithm: Any) -> None:
    logits, target = make(loss, device=device)
    check(far_away(logits, 4096.0), target, loss=loss, block_cap=32, **algorithm)
    if loss == "cross_entropy":
        smoothed: dict[str, Any] = {"label_smoothing": 0.1, "reduction": "none"}
        logits = logits + 1e5
        row_loss = entropy_loss(logits, target, block_cap=32, **smoothed, **algorithm).row_loss
        torch.testing.assert_close(row_loss.cpu().double(), reference(logits, target, **smoothed)[1], rtol=1e-5, atol=0)
    else:  # target logits need not be normalised
        check(far_away(logits, 0.0), far_away(target, -4096.0), loss=loss, block_cap=32, **algorithm)


@pytest.mark.parametrize("grad", ["new", "in_place"])
@all_losses
def test_padding_stays_out_and_gets_zero(loss: Any, grad: Any, device: torch.device, algorithm: Any) -> None:
    logits, target = make(loss, device=device)
    if loss == "cross_entropy":
        target.clamp_(max=69)
    right = reference(logits, target, loss=loss, vocab_size=70)
    logits[:, 70:] = math.nan
    result = check(logits, target, right, loss=loss, vocab_size=70, grad=grad, block_cap=32, **algorithm)
    assert not result[:, 70:].any()


@pytest.mark.parametrize(
    ("layout", "grad"), [("rows apart", "in_place"), ("transposed", "new"), ("every other column", "in_place")]
)
@all_losses
def test_any_strides(loss: Any, grad: Any, layout: str, device: torch.device, algorithm: Any) -> None:
    plain, target = make(loss, device=device)
    room = torch.full((100, 400), 7.0, device=device)
    logits = {"rows apart": room[:9, :100], "transposed": room[:, :9].T, "every other column": room[:9, :200:2]}[layout]
    logits.copy_(plain)
    if loss != "cross_entropy":
        target = target.T.contiguous().T
    result = check(logits, target, reference(plain, target, loss=loss), loss=loss, grad=grad, block_cap=32, **algorithm)
    if grad == "in_place":
        assert result.data_ptr() == logits.data_ptr() and (room == 7.0).sum() == room.numel() - logits.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@all_losses
def test_where_the_gradient_goes(loss: Any, dtype: torch.dtype, device: torch.device, algorithm: Any) -> None:
    logits, target = make(loss, dtype=dtype, device=device)
    main_grad = torch.ones(9, 100, device=device)
    new, nothing, added, in_place = (
        entropy_loss(logits, target, loss=loss, block_cap=32, grad=grad, **algorithm)
        for grad in ("new", "none", main_grad, "in_place")
    )
    assert new.grad is not None and nothing.grad is None and added.grad is not None and in_place.grad is not None
    torch.testing.assert_close(nothing.row_loss, new.row_loss, rtol=1e-6, atol=1e-6)  # another compilation
    assert added.grad.data_ptr() == main_grad.data_ptr()
    torch.testing.assert_close(main_grad - 1, new.grad.float(), rtol=2**-7, atol=1e-6)
    assert in_place.grad.data_ptr() == logits.data_ptr()
    assert torch.equal(logits, new.grad) and torch.equal(in_place.row_loss, new.row_loss)


@all_losses
def test_the_gradient_is_scaled_before_it_is_rounded(loss: Any, device: torch.device, algorithm: Any) -> None:
    logits, target = make(loss, rows=7, dtype=torch.bfloat16, device=device)
    exact = target if loss == "cross_entropy" else target.float()
    rounded = entropy_loss(logits, target, loss=loss, grad_scale=1 / 3, **algorithm).grad
    full = entropy_loss(logits.float(), exact, loss=loss, grad_scale=1 / 3, **algorithm).grad
    assert rounded is not None and full is not None and torch.equal(rounded, full.bfloat16())


def _far_apart(values: torch.Tensor, transposed: bool) -> torch.Tensor:
    """With two elements 2^31 apart by strides of less, in memory that nothing touches between them."""
    rows, columns = values.shape
    strides = (1, 2**31 // (columns - 1) + 8) if transposed else (2**31 // (rows - 1) + 8, 1)
    reach = (rows - 1) * strides[0] + (columns - 1) * strides[1]
    room = torch.empty(reach + 64, dtype=values.dtype, device=values.device)
    return room.as_strided(values.shape, strides).copy_(values)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("far", ["logits", "target", "grad", "logits with labels"])
def test_offsets_past_2_to_the_31(far: str, transposed: bool, device: torch.device, algorithm: Any) -> None:
    loss: Any = "cross_entropy" if "labels" in far else "reverse_kl"
    plain, target = make(loss, rows=3, vocab=8, dtype=torch.bfloat16, device=device)
    if loss == "cross_entropy":
        target[:] = 7
    tensors = {"logits": plain, "target": target, "grad": torch.zeros_like(plain)}
    moved = far.split()[0]
    tensors[moved] = _far_apart(tensors[moved], transposed)
    grad: Any = {"logits": "in_place", "target": "new", "grad": tensors["grad"]}[moved]
    right = reference(plain, target, loss=loss)
    check(tensors["logits"], tensors["target"], right, loss=loss, grad=grad, **algorithm)
    if "labels" in far:  # the module scales the gradient in place
        leaf = _far_apart(plain, transposed).requires_grad_()
        scaled = torch.autograd.grad(EntropyLoss(in_place=True, **algorithm)(leaf, target) * 2.0, leaf)[0]
        assert_right(right[0], right[1], scaled, reference(plain, target, grad_scale=2.0))


@pytest.mark.parametrize("vocab", [1, 2, 17])
@all_losses
def test_small_vocabularies(loss: Any, vocab: int, device: torch.device, algorithm: Any) -> None:
    logits, target = make(loss, vocab=vocab, device=device)
    grad = entropy_loss(logits, target, loss=loss, **algorithm).grad
    assert grad is not None
    torch.testing.assert_close(grad.double().cpu(), reference(logits, target, loss=loss)[2], rtol=1e-5, atol=1e-7)


def test_many_rows(device: torch.device, algorithm: Any) -> None:
    """More than one program a kernel, and more than one block of the reductions."""
    logits, target = make("cross_entropy", rows=5000, vocab=700, dtype=torch.bfloat16, device=device)
    target[::3] = -100
    check(logits, target, **algorithm)
    if device.type == "cuda":  # the interpreter runs programs one after another
        first, second = entropy_loss(logits, target, **algorithm), entropy_loss(logits, target, **algorithm)
        assert torch.equal(first.loss, second.loss)


@needs_cuda
@all_losses
def test_a_graph_captures_it(loss: Any, algorithm: Any) -> None:
    logits, target = make(loss, device="cuda")
    entropy_loss(logits, target, loss=loss, **algorithm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = entropy_loss(logits, target, loss=loss, **algorithm)
    logits.copy_(make(loss, device="cuda", seed=1)[0])
    graph.replay()
    assert result.grad is not None
    assert_right(result.loss, result.row_loss, result.grad, reference(logits, target, loss=loss))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@all_losses
def test_tensors_on_another_gpu_than_the_current(loss: Any, algorithm: Any) -> None:
    """Each GPU has its own copy of a compiled kernel, whichever was first."""
    here, there = (make(loss, device=device) for device in ("cuda:0", "cuda:1"))
    for tensors in (here, there, here, there):
        check(*tensors, loss=loss, **algorithm)
        assert torch.cuda.current_device() == 0


@needs_cuda
@pytest.mark.parametrize(
    ("rows", "vocab", "block_cap", "dtype"),
    [
        (5, 33000, "auto", torch.bfloat16),
        (300, 40000, 4096, torch.float16),
        (700, 1000, "auto", torch.bfloat16),
        (2500, 264, "auto", torch.float32),
        (40, 131072, "auto", torch.bfloat16),
        (600, 130000, "auto", torch.bfloat16),
        (300, 65536, "auto", torch.float16),
        (400, 32760, "auto", torch.float32),
    ],
)
@all_losses
def test_rows_of_several_parts_and_tiles_of_several_rows(
    loss: Any, rows: int, vocab: int, block_cap: Any, dtype: torch.dtype, algorithm: Any
) -> None:
    logits, target = make(loss, rows=rows, vocab=vocab, dtype=dtype, device="cuda")
    if loss == "cross_entropy":
        target[::3] = -100
    for _ in range(3):
        check(logits, target, loss=loss, block_cap=block_cap, logits_scale=1.2, **algorithm)


@pytest.mark.parametrize("vocab", [40000, 65536, 65544, 131072] if torch.cuda.is_available() else [1000])
@all_losses
def test_long_rows_of_padding_and_minus_infinity(loss: Any, vocab: int, device: torch.device, algorithm: Any) -> None:
    """On a GPU: rows of one part and of several, of few tiles and whole."""
    if device.type == "cuda" and "exchange" not in algorithm:
        pytest.skip("the two-pass kernels treat long rows like short ones, and take long")
    logits, target = make(loss, rows=300, vocab=vocab, dtype=torch.bfloat16, device=device)
    logits[:, 8 : vocab // 3] = -INF
    if loss == "cross_entropy":
        target = (target + vocab // 3).clamp(max=vocab - 17)
        target[::3] = -100
    else:
        target[:, 8 : vocab // 3] = -INF
        (logits if loss == "reverse_kl" else target)[:, vocab // 2 : vocab // 2 + 77] = -INF
    options = {"loss": loss, "vocab_size": vocab - 16, "z_loss": 1e-3, "grad_scale": 3.0}
    right = reference(logits, target, **options)
    logits[:, vocab - 16 :] = math.nan
    assert not check(logits, target, right, grad="in_place", **options, **algorithm)[:, vocab - 16 :].any()
