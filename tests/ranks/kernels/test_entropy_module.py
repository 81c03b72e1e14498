"""`EntropyLoss`, the module: upstream gradients, fp16, and what autograd must notice."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.kernel_reference import LOSSES, make, make_linear, make_policy, reference
from tests.support.ranks import Rank, ranks_here, run_on_ranks
from tpbench.kernels import EntropyLoss, LinearEntropyLoss, TopK, entropy_loss

LOGITS, LABELS = make("cross_entropy", rows=4, vocab=8, device="cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_module_scales_by_the_upstream_gradient(reduction: str, in_place: bool, device: torch.device) -> None:
    values, target = make("cross_entropy", device=device)
    target[1] = -100
    upstream = torch.tensor([3.0, 1.0, 0.0, -2.5, 1.0, 1.0, 7.0, 1.0, 0.5], device=device)
    upstream = upstream if reduction == "none" else upstream[3]
    expected = values.clone().requires_grad_()
    F.cross_entropy(expected * 2, target, reduction=reduction, label_smoothing=0.1).backward(upstream)
    leaf = values.clone().requires_grad_()
    module = EntropyLoss(reduction=reduction, label_smoothing=0.1, logits_scale=2.0, in_place=in_place)
    loss = module(leaf * 1.0, target)
    loss.backward(upstream)
    torch.testing.assert_close(leaf.grad, expected.grad)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_repeated_call_has_its_own_tensors_and_checks(in_place: bool, device: torch.device) -> None:
    module = EntropyLoss(in_place=in_place, reduction="sum")
    for step in range(6):
        values, target = make("cross_entropy", device=device)
        leaf, expected = ((values + 0.1 * step * target[:, None]).requires_grad_() for _ in range(2))
        mask = torch.arange(len(target), device=device) != step
        weight = mask if step % 2 else mask.float()  # a mask of bool becomes another tensor
        loss, right = (
            module(leaf * 1.0, target, row_weight=weight),
            F.cross_entropy(expected[mask], target[mask], reduction="sum"),
        )
        (loss * 2.0).backward()
        (right * 2.0).backward()
        torch.testing.assert_close((loss, leaf.grad), (right, expected.grad))
        with torch.no_grad():
            torch.testing.assert_close(module(leaf.detach().clone(), target, row_weight=weight), right)
    with pytest.raises(NotImplementedError, match="row_weight requires a gradient"):
        module(leaf * 1.0, target, row_weight=mask.float().requires_grad_())


def test_an_upstream_gradient_and_labels_with_strides(device: torch.device, algorithm: dict[str, Any]) -> None:
    """The backward pass of a sum hands one expanded number to all rows: a gradient whose stride is 0."""
    values, target = make("cross_entropy", device=device)
    apart = torch.stack((target, target * 0), 1)[:, 0]
    leaf, expected = values.clone().requires_grad_(), values.clone().requires_grad_()
    (EntropyLoss(reduction="none", **algorithm)(leaf, apart).sum() * 3.0).backward()
    (F.cross_entropy(expected, target, reduction="sum") * 3.0).backward()
    torch.testing.assert_close(leaf.grad, expected.grad)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_loss_scaler_comes_in_time_for_fp16(
    loss: Any, in_place: bool, device: torch.device, algorithm: dict[str, Any]
) -> None:
    """Many gradients of a mean over 1000 rows are too small for fp16: the scale of 2^16 comes before the rounding."""
    values, target = make(loss, rows=1000, vocab=64, dtype=torch.float16, device=device)
    right = reference(values, target, loss=loss, grad_scale=2.0**16)[2]
    leaf = values.clone().requires_grad_()
    (EntropyLoss(loss=loss, in_place=in_place, **algorithm)(leaf * 1.0, target) * 2.0**16).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.double().cpu(), right, rtol=2.0**-10, atol=2.0**-14)


@pytest.mark.parametrize(("logits_scale", "grad_scale"), [(1.0, 2.0**16), (30.0, -3.0), (1.0, 0.0), (2.0**-20, 1.0)])
def test_gradients_in_fp16_stay_finite_with_any_factors(
    logits_scale: float, grad_scale: float, device: torch.device, algorithm: dict[str, Any]
) -> None:
    """Also of a mean over one row of many."""
    for counted in (1, 4000):
        values, target = make("cross_entropy", rows=4000, vocab=8, dtype=torch.float16, device=device)
        target[counted:] = -100
        options = {"logits_scale": logits_scale, "grad_scale": grad_scale / (4000 if counted == 1 else 1)}
        right = reference(values, target, **options)[2]
        leaf = values.requires_grad_()
        EntropyLoss(**options, **algorithm)(leaf, target).backward()
        assert leaf.grad is not None
        # A probability of one less one leaves an fp32's rounding, times the factors; and fp16 its smallest number.
        slack = abs(logits_scale * grad_scale) * 2.0**-23 / counted + 2.0**-24
        torch.testing.assert_close(leaf.grad.double().cpu(), right, rtol=2.0**-10, atol=slack)


def test_errors_name_the_argument_that_decides_the_scale_in_fp16() -> None:
    for name, value in (("grad_scale", math.nan), ("logits_scale", -1.0)):
        with pytest.raises(ValueError, match=f"{name} must be"):
            EntropyLoss(**{name: value})(LOGITS.half().requires_grad_(), LABELS)


def test_a_second_backward_raises(device: torch.device) -> None:
    values, target = make("cross_entropy", device=device)
    leaf = HIDDEN.clone().requires_grad_()
    for loss in (EntropyLoss()(values.requires_grad_(), target), LinearEntropyLoss()(leaf, WEIGHT, LABELS)):
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="run forward again"):
            loss.backward()
    with torch.no_grad():
        assert not EntropyLoss(in_place=True)(values, target).requires_grad
        assert not LinearEntropyLoss()(leaf, WEIGHT, LABELS).requires_grad


LEAF = LOGITS.clone().requires_grad_()
HIDDEN, WEIGHT, _ = (each.to(LOGITS.device) for each in make_linear(rows=4, vocab=8))
CALLS: dict[str, tuple[Any, Any]] = {
    "logits": (LOGITS, lambda logits: EntropyLoss()(logits, LABELS)),
    "hidden": (HIDDEN, lambda hidden: LinearEntropyLoss()(hidden, WEIGHT, LABELS)),
    "weight": (WEIGHT, lambda weight: sum(LinearEntropyLoss(loss="logprob")(HIDDEN, weight, LABELS)).sum()),
    "target": (LOGITS, lambda target: EntropyLoss(loss="reverse_kl")(LEAF, target)),
}
"""By the name of an argument: a value for it, and a loss of the value."""


@pytest.mark.parametrize("name", CALLS)
def test_derivatives_that_do_not_exist_are_refused(name: str) -> None:
    value, call = CALLS[name]
    leaf = value.clone().requires_grad_()
    if name != "target":
        for loss_of in (call, torch.compile(call, backend="eager")):
            with pytest.raises(NotImplementedError, match="no second derivatives, which create_graph=True asks for"):
                torch.autograd.grad(loss_of(leaf), leaf, create_graph=True)
    call(value)  # whose repetition must not skip the checks
    for tensor in (value, leaf):
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"{name} has a tangent"):
            call(forward_ad.make_dual(tensor, torch.ones_like(tensor)))


def test_a_target_that_wants_a_gradient_is_refused() -> None:
    module = EntropyLoss(loss="forward_kl")
    with pytest.raises(NotImplementedError, match="target requires a gradient"):
        module(LEAF, LEAF)
    with torch.no_grad():
        module(LEAF, LEAF)


@pytest.mark.parametrize("name", CALLS)
def test_a_dtensor_is_refused_with_the_call_that_is_right(name: str) -> None:
    value, call = CALLS[name]
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        whole = DTensor.from_local(value, DeviceMesh(value.device.type, [0, 1]), [Replicate()])
        with pytest.raises(TypeError, match=rf"{name} must be .*, got a DTensor: pass {name}.to_local\(\)"):
            call(whole)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", CALLS)
def test_tensors_without_memory_are_refused_by_name(name: str) -> None:
    value, call = CALLS[name]
    for transformed in (torch.func.grad(call), torch.vmap(call)):
        with pytest.raises(TypeError, match=f"^{name} must have memory of its own.* Tensors of torch.func"):
            transformed(value if transformed is not torch.vmap else value[None])
    with FakeTensorMode() as mode, pytest.raises(TypeError, match="must have memory of its own, got FakeTensor"):
        call(mode.from_tensor(value))
    for trace in (make_fx(call), lambda value: torch.jit.trace(call, value)):
        with pytest.raises(TypeError, match="must not be traced"):
            trace(value)
    freed = value.clone()
    freed.untyped_storage().resize_(0)
    for other, kind in ((freed, "Tensor. .* FSDP has freed"), (torch.nested.nested_tensor([value]), "a nested one")):
        with pytest.raises(TypeError, match=f"^{name} must .* got {kind}"):
            call(other)
    with pytest.raises(TypeError, match=rf"Async.*: pass {name}.clone\(\)"):
        call(AsyncCollectiveTensor(value))


def test_settings_are_those_of_the_function() -> None:
    with pytest.raises(TypeError, match="no setting zloss; there are algorithm, beta, block_cap, "):
        EntropyLoss(zloss=0.5)
    for wrong in ({"loss": "ce"}, {"reduction": "avg"}, {"clip": 0.2}, {"block_cap": 1000}, {"vocab_size": 0}):
        with pytest.raises((TypeError, ValueError), match=f"^{next(iter(wrong))} must be"):
            EntropyLoss(**wrong)
    with pytest.raises(ValueError, match=r"^in_place must be one of False, True; got 'yes'"):
        EntropyLoss(in_place="yes")
    with pytest.raises(ValueError, match=r"^workspace_gib must be"):
        LinearEntropyLoss(workspace_gib=-1)
    with pytest.raises(TypeError, match=r"got float32: pass float\(temperature\)$"):
        LinearEntropyLoss(temperature=np.float32(0.5))
    loss = EntropyLoss(z_loss=0.5, in_place=True)
    assert repr(loss) == "EntropyLoss(z_loss=0.5, in_place=True)"
    for module, tensors in ((loss, (LOGITS,)), (LinearEntropyLoss(), (HIDDEN, WEIGHT))):
        with pytest.raises(TypeError, match="a call has no argument reduction: "):
            module(*tensors, LABELS, reduction="sum")
    assert copy.deepcopy(torch.nn.Sequential(loss))[0] is loss  # as for an average of weights: a group has no copy


def test_a_backward_that_needs_overwritten_values_raises(device: torch.device, algorithm: dict[str, Any]) -> None:
    """tanh, as of soft-capped logits, keeps its result for its backward."""
    values, target = make("cross_entropy", device=device)
    capped = values.requires_grad_().tanh()
    loss = EntropyLoss(in_place=True, **algorithm)(capped, target)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    main_grad = torch.zeros_like(values)
    entropy_loss(values, target, grad=main_grad, **algorithm)
    assert main_grad._version == 1 and values._version == 0
    with torch.inference_mode():
        entropy_loss(torch.zeros_like(values), target, grad="in_place", **algorithm)


def _targets(loss: str, rows: int) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
    """Return logits, a target and the tensors of rows of a loss."""
    logits, target = make("cross_entropy" if loss in ("policy", "top k") else loss, rows=rows, device=LOGITS.device)
    if loss == "top k":
        values, indices = (logits * 0.5).topk(4)
        return logits, TopK(values, indices, "drop"), {}
    given = make_policy(rows) if loss == "policy" else {}
    of_rows = {name: each.to(logits.device) for name, each in given.items() if torch.is_tensor(each)}
    return logits, target, of_rows


GRAPHS: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("cross_entropy", torch.float16, {"label_smoothing": 0.1, "in_place": True}),
    ("reverse_kl", torch.bfloat16, {"reduction": "none"}),
    ("top k", torch.float32, {"loss": "forward_kl"}),
    ("policy", torch.float32, {"kl_weight": 0.1, "clip": (0.1, 0.3), "reduction": "sum"}),
]


@pytest.mark.parametrize(("loss", "dtype", "settings"), GRAPHS)
def test_a_whole_graph_has_the_bits_of_uncompiled_code(loss: Any, dtype: torch.dtype, settings: dict[str, Any]) -> None:
    module = EntropyLoss(**{"loss": "forward_kl" if loss == "top k" else loss, **settings})

    def loss_of(logits: torch.Tensor, target: Any, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        return module(logits.to(dtype) * 1.5, target, **rows) * 3.0

    for dynamic, graphs in ((True, 1), (False, 2)):
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(loss_of, fullgraph=True, backend=counter, dynamic=dynamic)
        for rows in (6, 9):
            logits, target, of_rows = _targets(loss, rows)
            target = target.to(dtype) if loss == "reverse_kl" else target
            (right, grad), (value, got) = (_with_grad(each, logits, target, of_rows) for each in (loss_of, compiled))
            assert torch.equal(right, value) and torch.equal(grad, got) and grad.any()
            with torch.no_grad():
                assert torch.equal(compiled(logits, target, of_rows), loss_of(logits, target, of_rows))
        assert counter.frame_count == 2 * graphs  # with and without a gradient


def _with_grad(loss_of: Any, logits: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = loss_of(leaf, *others)
    return loss.detach(), torch.autograd.grad(loss, leaf, torch.full_like(loss, 0.7))[0]


def test_a_graph_refuses_what_the_module_refuses() -> None:
    module = EntropyLoss()
    whole = torch.compile(module, fullgraph=True, backend="aot_eager")
    loss = whole(LEAF, LABELS)
    torch.autograd.grad(loss, LEAF, retain_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(loss, LEAF)
    with pytest.raises(ValueError, match="target must have shape"):
        whole(LEAF, LABELS[:3])
    against = torch.compile(EntropyLoss(loss="forward_kl"), backend="aot_eager")
    with pytest.raises(NotImplementedError, match="target requires a gradient"):
        against(LOGITS, LEAF)


def _graph_over_ranks(rank: Rank) -> None:
    logits, target = (each.to(rank.device) for each in make("cross_entropy"))
    shard = logits.chunk(2, 1)[rank.rank].contiguous()
    settings = {"group": rank.group, "vocab_size": 100, "exchange": "nccl"}
    module = EntropyLoss(vocab_start=50 * rank.rank, **settings)
    whole = torch.compile(module, fullgraph=True, backend="aot_eager")
    (right, grad), (value, got) = (_with_grad(each, shard, target) for each in (module, whole))
    assert torch.equal(right, value) and torch.equal(grad, got)
    mesh = DeviceMesh.from_group(rank.group, rank.device.type)
    of_dtensor = torch.compile(EntropyLoss(exchange="nccl"), backend="aot_eager")
    assert torch.equal(of_dtensor(DTensor.from_local(shard, mesh, [Shard(1)]), target), right)
    with pytest.raises(ValueError, match=r"\[0, 50\] by rank; got"):
        torch.compile(EntropyLoss(vocab_start=0, **settings), fullgraph=True, backend="aot_eager")(shard, target)


@pytest.mark.skipif(ranks_here(2) < 2, reason="needs two GPUs")
def test_a_whole_graph_over_ranks() -> None:
    run_on_ranks(2, _graph_over_ranks)
