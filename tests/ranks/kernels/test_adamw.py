"""tpbench's AdamW against torch's."""

from __future__ import annotations

import io

import pytest
import torch

from tpbench.kernels.adamw import BLOCK, AdamW

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_equal_those_of_torch_with_scaled_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours = [torch.randn(shape, device=DEVICE).to(dtype).requires_grad_() for shape in ((BLOCK + 5,), (33, 7), (0,))]
    exact = [each.detach().double().requires_grad_() for each in ours]
    optimizer = AdamW(ours, lr=1e-2, weight_decay=0.1)
    reference = torch.optim.AdamW(exact, lr=1e-2, weight_decay=0.1, foreach=False)
    for step in range(4):
        optimizer.grad_scale = torch.tensor(2.0, device=DEVICE) if step else None
        for own, other in zip(ours, exact, strict=True):
            own.grad = torch.randn_like(own)
            other.grad = own.grad.double() * (0.5 if step else 1.0)
        optimizer.step()
        reference.step()
    unit = torch.finfo(dtype).eps
    for own, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(own.double(), other, rtol=4 * unit, atol=4 * unit * 1e-2)


def gradients(weights: list[torch.Tensor], step: int) -> None:
    for at, weight in enumerate(weights):
        weight.grad = torch.full_like(weight, (-1.0) ** step * (step + 1 + at))


@pytest.mark.parametrize("source", [AdamW, torch.optim.AdamW])
def test_a_loaded_state_continues_the_bias_correction(source: type[torch.optim.Optimizer]) -> None:
    exact, weights = ([torch.ones(size, device=DEVICE, requires_grad=True) for size in (5, 3)] for _ in range(2))
    reference, before = torch.optim.AdamW(exact, lr=0.1), source(weights, lr=0.1)  # type: ignore[call-arg]
    for step in range(3):
        for each, optimizer in ((exact, reference), (weights, before)):
            gradients(each, step)
            optimizer.step()
    saved = io.BytesIO()
    torch.save(before.state_dict(), saved)
    after = AdamW(weights, lr=0.1)
    after.load_state_dict(torch.load(io.BytesIO(saved.getvalue())))
    for step in range(3, 6):
        for each, optimizer in ((exact, reference), (weights, after)):
            gradients(each, step)
            optimizer.step()
    for own, other in zip(weights, exact, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
    assert {float(state["step"]) for state in after.state_dict()["state"].values()} == {6.0}


@pytest.mark.parametrize("changes", [{"step": None}, {"step": torch.tensor(7.0)}])
def test_a_state_without_one_count_of_steps_is_refused(changes: dict[str, torch.Tensor | None]) -> None:
    weights = [torch.ones(3, device=DEVICE, requires_grad=True) for _ in range(2)]
    gradients(weights, 0)
    optimizer = AdamW(weights)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][1] = {name: value for name, value in (saved["state"][1] | changes).items() if value is not None}
    with pytest.raises(ValueError, match=r"needs one `step` for all parameters of a device, not 1.0, (7.0|None)"):
        AdamW(weights).load_state_dict(saved)


def test_no_gradient_and_an_overflow_change_nothing() -> None:
    with_gradient, without = (torch.ones(3, device=DEVICE, requires_grad=True) for _ in range(2))
    with_gradient.grad = torch.ones_like(with_gradient)
    optimizer = AdamW([with_gradient, without])
    optimizer.found_inf = torch.tensor(1.0, device=DEVICE)
    optimizer.step()
    assert with_gradient.eq(1).all()
    optimizer.found_inf = torch.tensor(0.0, device=DEVICE)
    optimizer.step()
    # The skipped step does not count: this is the first one.
    expected = 1 - 1e-3 * 0.01 - 1e-3
    assert without.eq(1).all() and with_gradient.tolist() == pytest.approx([expected] * 3, rel=1e-6)


def test_gradients_with_gaps_are_an_error() -> None:
    weight = torch.ones(4, 4, device=DEVICE, requires_grad=True)
    weight.grad = torch.ones(4, 8, device=DEVICE)[:, ::2]
    with pytest.raises(ValueError, match="contiguous"):
        AdamW([weight]).step()
