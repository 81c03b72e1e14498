"""Which calls of `entropy_loss` repeat an earlier one, and what a repeated call does. The launch is a stand-in."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from tpbench.kernels import EntropyLossResult, LaunchRecord, TopK
from tpbench.kernels.kernel_arguments import RowInputs, RowOutputs
from tpbench.kernels.repeated_call import repeating

LOGITS = torch.zeros(2, 6, 32, dtype=torch.bfloat16)
LABELS = torch.zeros(12, dtype=torch.int64)
ROWS = torch.zeros(2, 8)


class Loss:
    """A loss whose first call of a form is counted, and whose launches are listed as the kernel's arguments."""

    def __init__(self, is_one_kernel: bool = True) -> None:
        self.first_calls, self.launches = 0, list[tuple[Any, ...]]()
        self.relaunch = self._launch if is_one_kernel else None
        self.call = repeating(self._first)

    def _launch(self, *tensors: Any) -> None:
        self.launches.append(tensors)

    def _first(self, logits: Tensor, target: Any, *, grad: Any = "new", reduction: str = "mean", **_: Any) -> Any:
        self.first_calls += 1
        row_loss = torch.zeros(len(logits))
        return EntropyLossResult(
            row_loss if reduction == "none" else row_loss.sum(), row_loss, None, row_loss.clone(), None, None,
            {"none": None, "in_place": logits}.get(grad, torch.empty_like(logits)),
            LaunchRecord("one_read", 16, relaunch=self.relaunch),
        )  # fmt: skip


def same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and one.data_ptr() == other.data_ptr())


@pytest.mark.parametrize("options", [{}, {"grad": "none"}, {"grad": "in_place"}, {"reduction": "none"}])
def test_a_repeated_call_launches_the_kernel_for_its_own_tensors(options: dict[str, Any]) -> None:
    loss = Loss()
    first, *later = [loss.call(LOGITS[x], LABELS[6 * x :][:6], row_grad=ROWS[x, :6], **options) for x in (0, 1, 0)]
    assert loss.first_calls == 1
    for result, x, launch in zip(later, (1, 0), loss.launches, strict=True):
        logits, target, grad, inputs, outputs, total = launch
        assert same(logits, LOGITS[x]) and same(target, LABELS[6 * x :]) and same(inputs.row_grad, ROWS[x])
        assert inputs == RowInputs(row_grad=inputs.row_grad) and same(grad, result.grad)
        assert same(grad, logits) == ("in_place" in options.values())
        assert outputs == RowOutputs(result.row_loss, None, result.logprobs, None)
        assert same(total, None if "reduction" in options else result.loss) and result.how == first.how
        for name, tensor in vars(first).items():
            if isinstance(tensor, Tensor):
                new = getattr(result, name)
                assert (new.shape, new.dtype, new.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
    assert len({result.row_loss.data_ptr() for result in (first, *later)}) == 3


def test_what_a_repeated_call_overwrites_is_noticed() -> None:
    """By autograd, which may have saved the logits, and by a check of the target, whose values decide this."""
    loss, logits = Loss(), torch.zeros(8, 32)
    for _ in range(2):
        loss.call(logits[:6], LOGITS[0].float(), grad="in_place")
    assert logits._version == 1  # by the repeated call: the first one is a stand-in
    loss.call(logits[:6], logits[:6], grad="in_place")
    with pytest.raises(ValueError, match="target must not share memory with logits"):
        loss.call(logits[:6], logits[2:], grad="in_place")
    assert loss.first_calls == 1


def test_a_top_k_is_repeated() -> None:
    loss, indices = Loss(), torch.zeros(6, 4, dtype=torch.int64)
    for values in torch.zeros(3, 6, 4):
        loss.call(LOGITS[0], TopK(values, indices), loss="forward_kl")
    assert loss.first_calls == 1 and same(loss.launches[-1][1].log_q, values) and same(loss.launches[0][1][0], indices)
    loss.call(LOGITS[0], TopK(values, indices, "bucket"), loss="forward_kl")
    assert loss.first_calls == 2


OTHER_FORMS: list[dict[str, Any]] = [
    {"reduction": "sum"}, {"z_loss": 0.5}, {"row_grad": ROWS[0, :6]}, {"z_loss": 0}, {"z_loss": False},
    {"logits": LOGITS[0, :3], "target": LABELS[:3]}, {"target": LABELS.int()[:6]}, {"logits": LOGITS[0].float()},
    {"logits": LOGITS[0, :, :16]}, {"logits": torch.zeros(200, dtype=torch.bfloat16)[1:193].view(6, 32)},
]  # fmt: skip


@pytest.mark.parametrize("changes", OTHER_FORMS)
def test_another_form_is_another_first_call(changes: dict[str, Any]) -> None:
    loss = Loss()
    for _ in range(3):
        for given in ({"z_loss": 0.0}, {"z_loss": 0.0, **changes}):
            loss.call(**{"logits": LOGITS[0], "target": LABELS[:6], **given})
    assert loss.first_calls == 2 and len(loss.launches) == 4


NEVER: list[dict[str, Any]] = [
    {"target": LABELS[::2]},  # labels are copied
    {"group": object()},
    {"block_cap": [16]},
    {"logits": LOGITS[0].to_sparse()},
    {"target": TopK(torch.zeros(4, 6).t(), torch.zeros(6, 4))},
]


@pytest.mark.parametrize("changes", NEVER)
def test_calls_that_are_never_repeated(changes: dict[str, Any]) -> None:
    """These calls check or do more than to launch a kernel."""
    loss, several_kernels = Loss(), Loss(is_one_kernel=False)
    for _ in range(3):
        loss.call(**{"logits": LOGITS[0], "target": LABELS[:6], **changes})
        several_kernels.call(LOGITS[0], LABELS[:6])
    assert (loss.first_calls, several_kernels.first_calls) == (3, 3) and not loss.launches


def test_ranks_that_exchange_their_sizes_do_so_in_each_call() -> None:
    group = dist.ProcessGroup(0, 2)
    for sizes, first_calls in (({}, 3), ({"vocab_start": 0}, 3), ({"vocab_start": 0, "vocab_size": 64}, 1)):
        loss = Loss()
        for _ in range(3):
            loss.call(LOGITS[0], LABELS[:6], group=group, **sizes)
        assert loss.first_calls == first_calls


def test_tensors_of_transformations_are_checked_each_time() -> None:
    loss = Loss()
    for _ in range(2):
        loss.call(LOGITS[0], LABELS[:6])
    with forward_ad.dual_level():
        loss.call(forward_ad.make_dual(*LOGITS), LABELS[:6])
    torch.vmap(lambda logits: loss.call(logits, LABELS[:6]).grad)(LOGITS)
    assert loss.first_calls == 3
