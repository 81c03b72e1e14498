"""AdamW that clips while it updates: one pass over parameters, gradients and moments."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton decides the types of a kernel's arguments.

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpbench.kernels.cached_launch import cached_launch

BLOCK = 2048
"""Elements of a program: 8 for each thread, which are 16 bytes in bfloat16."""
WARPS = 8


@triton.jit
def _adamw_kernel(
    parameter, grad, mean, square, corrections, grad_scale, found_inf, numel,
    rate, decay, share1, beta2, share2, epsilon, BLOCK: tl.constexpr
):  # fmt: skip
    """Update BLOCK elements, unless `found_inf`, a pointer or None, is 1.

    Gradients are divided by `grad_scale`, a pointer or None. `corrections` divide the mean of the gradients and the
    root of the mean of their squares. `share1` and `share2` are 1 - beta1 and 1 - beta2; in fp32 this difference would
    lose half of its digits. A `numel` that 16 divides keeps loads and stores 16 bytes wide.
    """
    if found_inf is not None:
        if tl.load(found_inf) == 1:
            return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    gradient = tl.load(grad + at, inside, 0.0).to(tl.float32)
    weight = tl.load(parameter + at, inside, 0.0).to(tl.float32)
    first = tl.load(mean + at, inside, 0.0).to(tl.float32)
    second = tl.load(square + at, inside, 0.0).to(tl.float32)
    if grad_scale is not None:
        gradient *= 1.0 / tl.load(grad_scale)
    first += share1 * (gradient - first)
    second = beta2 * second + share2 * gradient * gradient
    weight -= rate * decay * weight
    weight -= rate / tl.load(corrections) * first / (tl.sqrt(second) / tl.load(corrections + 1) + epsilon)
    tl.store(parameter + at, weight.to(parameter.dtype.element_ty), inside)
    tl.store(mean + at, first.to(mean.dtype.element_ty), inside)
    tl.store(square + at, second.to(square.dtype.element_ty), inside)


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW in one kernel for each parameter, which also scales the gradients.

    The arithmetic is in fp32; parameters and moments keep the dtype of the parameter, as with torch's fused kernel. As
    there, the caller may set two attributes before a step, each an fp32 scalar on the device. `grad_scale` divides the
    gradients; where `found_inf` is 1, the step changes nothing. The count of steps, `step` in the state, is an fp64
    scalar on the device that its parameters share, so a CUDA graph can hold the update. Parameters and gradients must
    be contiguous.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load a state. Raises ValueError unless the parameters of each device have one count of steps."""
        super().__setstate__(state)
        by_device: dict[torch.device, list[dict[str, Any]]] = {}
        for parameter, own in self.state.items():
            if own:
                by_device.setdefault(parameter.device, []).append(own)
        for device, states in by_device.items():
            counts = {float(own["step"]) if "step" in own else None for own in states}
            if None in counts or len(counts) > 1:
                found = ", ".join(sorted(map(str, counts)))
                raise ValueError(f"AdamW of tpbench needs one `step` for all parameters of a device, not {found}")
            steps = torch.tensor(counts.pop(), dtype=torch.float64, device=device)
            for own in states:
                own["step"] = steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update each parameter that has a gradient. Gradients stay as they are."""
        result = None if closure is None else torch.enable_grad()(closure)()
        steps: dict[torch.device, Tensor] = {}
        for group in self.param_groups:
            corrections: dict[torch.device, Tensor] = {}
            for parameter in group["params"]:
                if parameter.grad is None or not parameter.numel():
                    continue
                device = parameter.device
                if device not in steps:
                    steps[device] = self._steps_so_far(device)
                    steps[device] += 1 if self.found_inf is None else 1 - self.found_inf
                if device not in corrections:
                    corrections[device] = _corrections(group["betas"], steps[device])
                self._update(parameter, steps[device], corrections[device], group)
        return result

    def _steps_so_far(self, device: torch.device) -> Tensor:
        for parameter, own in self.state.items():
            if own and parameter.device == device:
                found: Tensor = own["step"]
                return found
        return torch.zeros((), dtype=torch.float64, device=device)

    def _update(self, parameter: Tensor, steps: Tensor, corrections: Tensor, group: dict[str, Any]) -> None:
        grad, state, numel = parameter.grad, self.state[parameter], parameter.numel()
        assert grad is not None
        if not (parameter.is_contiguous() and grad.is_contiguous()):
            raise ValueError("AdamW of tpbench needs contiguous parameters and gradients")
        beta1, beta2 = group["betas"]
        if not state:
            state["step"] = steps
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
        cached_launch(_adamw_kernel, BLOCK=BLOCK, num_warps=WARPS)(
            triton.cdiv(numel, BLOCK),
            (parameter, grad, state["exp_avg"], state["exp_avg_sq"], corrections, self.grad_scale, self.found_inf),
            (numel,),
            (group["lr"], group["weight_decay"], 1 - beta1, beta2, 1 - beta2, group["eps"]),
        )


def _corrections(betas: tuple[float, float], steps: Tensor) -> Tensor:
    """Return the divisors of the mean of the gradients, and of the root of the mean of their squares: (2,) fp32."""
    first, second = (1 - torch.pow(beta, steps) for beta in betas)
    return torch.stack((first, second.sqrt())).float()
