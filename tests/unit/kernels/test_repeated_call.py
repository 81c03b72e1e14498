"""A repeated call of `entropy_loss` launches what a first one would, with a fake compiler, driver and group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._decomp.decompositions_for_jvp  # before the fixture replaces torch.zeros, which it compiles
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.fake_gpu import FakeGpu, pointer
from tpbench.kernels import TopK, checks, entropy_loss, launch_rows, symmetric
from tpbench.kernels.symmetric import PeerWorkspace, Workspace

ROWS, COLUMNS = 6, 1024
LOGITS = torch.zeros(2, ROWS, COLUMNS, dtype=torch.bfloat16)
LABELS = torch.zeros(2 * ROWS, dtype=torch.int64)


class LocalWords(PeerWorkspace):
    """A group's workspace in the memory of one rank."""

    _allocate = Workspace._allocate


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def gpu(h200: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(checks, "_runnable", lambda *_: None)
    monkeypatch.setattr(launch_rows, "launching", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launch_rows, "INTERPRETED", False)
    peers = LocalWords(None, torch.device("cpu"))  # type: ignore[arg-type]
    monkeypatch.setattr(symmetric, "workspace", lambda group, device: peers)
    monkeypatch.setattr(symmetric, "stream_of", lambda device: 7)
    monkeypatch.setattr(launch_rows, "_remembered", {})
    return h200


def call(group: Any, x: torch.Tensor = LOGITS[0], labels: torch.Tensor = LABELS[:ROWS], **changes: Any) -> Any:
    given = {"group": group, "vocab_start": 0, "vocab_size": 2 * COLUMNS, **changes}
    return entropy_loss(x, labels, **given)


def test_later_calls_launch_the_same_for_their_own_tensors(gpu: FakeGpu, group: Any) -> None:
    results = [call(group, x) for x in (LOGITS[0], LOGITS[1], LOGITS[1], LOGITS[0])]
    assert gpu.bound == 1 and len(launch_rows._remembered) == 1
    for launched, x, result in zip(gpu.launched, (0, 1, 1, 0), results, strict=True):
        assert launched.arguments[:3] == (pointer(LOGITS[x]), pointer(LABELS), pointer(result.grad))
        assert launched.arguments[4].loss == pointer(result.row_loss) and launched.arguments[5] == pointer(result.loss)
        assert launched.arguments[6:] == gpu.launched[0].arguments[6:]
        assert (launched.kernel, launched.grid) == (gpu.launched[0].kernel, gpu.launched[0].grid)
        assert (result.grad.shape, result.grad.dtype) == (LOGITS[x].shape, LOGITS.dtype)
        assert (result.row_loss.shape, result.loss.shape, result.loss.dtype) == ((ROWS,), (), torch.float32)
        assert result.how == results[0].how and result.how.algorithm == "one_read"
    assert len({result.grad.data_ptr() for result in results}) == 4


def test_calls_with_a_top_k_are_repeated(gpu: FakeGpu, group: Any) -> None:
    for values in torch.zeros(3, ROWS, 4):
        top: Any = TopK(values, torch.zeros(ROWS, 4, dtype=torch.int64))
        call(group, labels=top, loss="forward_kl")
        assert gpu.launched[-1].arguments[1] == (pointer(top.indices), pointer(values))
    assert gpu.bound == 1 and len(launch_rows._remembered) == 1


def test_later_calls_pass_their_own_numbers_of_rows(gpu: FakeGpu, group: Any) -> None:
    rows = [each[:ROWS] for each in torch.zeros(2, 8)]
    for at in (0, 1, 1):
        result = call(group, loss="policy", old_logprobs=rows[at], advantages=rows[1 - at])
        inputs, outputs = gpu.launched[-1].arguments[3:5]
        assert (inputs.old_logprobs, inputs.advantages) == (pointer(rows[at]), pointer(rows[1 - at]))
        assert (outputs.logprobs, outputs.clipped) == (pointer(result.logprobs), pointer(result.clipped))
    assert gpu.bound == 1 and len(launch_rows._remembered) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"reduction": "sum"},
        {"reduction": "none"},
        {"grad": "none"},
        {"z_loss": 0.5},
        {"ignore_index": 3},
        {"logits_scale": 2.0},
        {"grad_scale": 0.25},
        {"x": LOGITS[0, :3], "labels": LABELS[:3]},
        {"labels": torch.zeros(ROWS, dtype=torch.int32)},
    ],
)
def test_each_form_launches_as_its_first_call_does(gpu: FakeGpu, group: Any, changes: dict[str, Any]) -> None:
    for each in 3 * ({}, changes):
        call(group, **each)
    assert len(launch_rows._remembered) == 2
    usual, other = ({(id(each.kernel), each.arguments[6:]) for each in gpu.launched[at::2]} for at in (0, 1))
    assert len(usual) == len(other) == 1 and usual != other


@pytest.mark.parametrize(
    "changes",
    [
        {"grad": "in_place", "x": torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)},
        {"labels": LABELS[::2]},  # not contiguous: they are copied
    ],
)
def test_calls_that_do_more_than_launch_are_not_repeated(gpu: FakeGpu, group: Any, changes: dict[str, Any]) -> None:
    for _ in range(3):
        call(group, **changes)
    assert not launch_rows._remembered and len(gpu.launched) == 3


@pytest.mark.parametrize(
    ("valid", "invalid", "error"),
    [
        ({"ignore_index": 1}, {"ignore_index": True}, TypeError),
        ({"z_loss": 1.0}, {"z_loss": True}, TypeError),
        ({}, {"block_cap": [16]}, TypeError),
        ({}, {"labels": [0] * ROWS}, TypeError),
        ({}, {"x": LOGITS[0].to_sparse()}, TypeError),
    ],
)
def test_arguments_that_only_look_equal_are_still_refused(
    valid: dict[str, Any], invalid: dict[str, Any], error: type[Exception], group: Any
) -> None:
    for _ in range(2):
        call(group, **valid)
    assert launch_rows._remembered
    with pytest.raises(error):
        call(group, **invalid)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="logits has a tangent"):
        call(group, **valid, x=forward_ad.make_dual(*LOGITS))
    with pytest.raises(TypeError, match="logits must have memory"):
        torch.vmap(lambda x: call(group, **valid, x=x))(LOGITS)


def test_another_workspace_limit_or_a_lost_peer_is_noticed(
    gpu: FakeGpu, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = symmetric.workspace(group, torch.device("cpu"))
    assert isinstance(peers, PeerWorkspace)
    for _ in range(3):
        call(group)
    monkeypatch.setattr(symmetric, "WAIT_LIMIT_S", 4.0)
    call(group)
    call(group)
    assert 4 * 10**9 in gpu.launched[3].arguments and 4 * 10**9 not in gpu.launched[2].arguments
    assert gpu.launched[3].arguments[6:] == gpu.launched[4].arguments[6:]
    peers.reserve(1 << 22)
    call(group)
    call(group)
    words = [launched.arguments[6].words for launched in gpu.launched[-3:]]
    assert words[1] == words[2] != words[0]
    peers.failed.fill_(1)
    with pytest.raises(RuntimeError, match="in vain"):
        call(group)
