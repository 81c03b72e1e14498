"""The arguments and constants of a one-pass kernel's launch, from tensors and options."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.fake_gpu import FakeGpu, pointer
from tpbench.kernels import symmetric
from tpbench.kernels.cached_launch import Form, form
from tpbench.kernels.kernel_arguments import RowInputs, RowOutputs, Scales
from tpbench.kernels.one_pass.launch import OnePassLaunch, Prepared, prepare
from tpbench.kernels.row_loss import Vocabulary
from tpbench.kernels.symmetric import PeerWorkspace, Workspace

ROWS, COLUMNS = 6, 1024
ROOM = torch.zeros(4 * ROWS * COLUMNS, dtype=torch.bfloat16)
LABELS = torch.zeros(ROWS, dtype=torch.int64)
LOSS, UPSTREAM = torch.zeros(ROWS + 1), torch.ones(ROWS)
SCALES = Scales(*(0.5 * each for each in range(1, len(Scales._fields) + 1)))
pytestmark = pytest.mark.usefixtures("h200")


def logits(offset: int = 0, rows: int = ROWS, row_stride: int = COLUMNS) -> torch.Tensor:
    return ROOM.as_strided((rows, COLUMNS), (row_stride, 1), offset)


def prepared(x: Any, target: Any, out: Any, shard: Vocabulary | None = None, **changes: Any) -> Prepared | str:
    """Prepare a call with tensors or their forms. `shard`: all columns by default."""
    forms = [each if each is None or isinstance(each, Form) else form(each) for each in (x, target, out)]
    columns = x.shape[1]
    options: dict[str, Any] = {
        "LOSS": "cross_entropy",
        "ignore_index": -100,
        "block_cap": "auto",
        "reduce": True,
        "count": True,
    }
    return prepare(*forms, 0, shard or Vocabulary(0, columns, columns, None, 1, 0), **{**options, **changes})


def by_name(gpu: FakeGpu) -> Any:
    """The last launch's arguments by name, with the fields of named tuples."""
    last = gpu.launched[-1]
    found: dict[str, Any] = {}
    for name, value in zip(last.kernel.src.fn.arg_names, last.arguments, strict=True):
        constants = vars(value) if name == "SPEC" else {name: value}
        found |= value._asdict() if name in ("mailbox", "strides") else constants
    return SimpleNamespace(**found)


def test_arguments_arrive_under_their_names(h200: FakeGpu) -> None:
    workspace = Workspace(torch.device("cpu"))
    x, out = logits(row_stride=2 * COLUMNS), logits()
    found = prepared(x, LABELS, out, Vocabulary(COLUMNS, COLUMNS + 1000, COLUMNS, None, 2, 1))
    assert isinstance(found, Prepared), found
    for _ in range(2):  # as Triton binds them, and the short way
        inputs, outputs = RowInputs(row_grad=UPSTREAM), RowOutputs(LOSS[:ROWS])
        OnePassLaunch(found, workspace, x.device, SCALES)(x, LABELS, out, inputs, outputs, LOSS[ROWS])
        it = by_name(h200)
        assert (it.logits, it.target, it.grad) == (pointer(x), pointer(LABELS), pointer(out))
        assert (it.inputs.row_grad, it.inputs.entropy_grad) == (pointer(UPSTREAM), None)
        assert (it.outputs.loss, it.loss) == (pointer(LOSS[:ROWS]), pointer(LOSS[ROWS]))
        assert (it.words, it.peers) == (pointer(workspace.words), pointer(workspace.peers))
        assert (it.control, it.failed) == (pointer(workspace.control), pointer(workspace.failed))
        assert (it.n_rows, it.n_columns, it.n_valid, it.n_parts) == (ROWS, COLUMNS, 1000, 1)
        assert it.part_columns * 8 == COLUMNS
        assert (it.vocab_start, it.vocab_size, it.ignore_index, it.rank) == (COLUMNS, COLUMNS + 1000, -100, 1)
        assert (it.logits_row * 8, it.logits_column, it.grad_row * 8, it.grad_column) == (2 * COLUMNS, 1, COLUMNS, 1)
        assert (it.target_row, it.target_column) == (0, 0)
        assert it.scales == SCALES
        assert it.limit_ns == 120 * 10**9
        assert it.half == workspace.half and it.capacity >= ROWS
        assert 3 * it.capacity * it.WORLD * it.SLOTS <= it.half  # words of the last row's last queue end in their half
        assert (it.LOSS, it.GRAD, it.REDUCE, it.COUNT, it.WORLD) == ("cross_entropy", True, True, True, 2)
        assert it.PADDED and it.VECTOR == 8
    assert h200.bound == 1 and h200.launched[0] == h200.launched[1]


def test_another_limit_or_workspace_or_a_lost_peer_is_noticed(h200: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, x = Workspace(torch.device("cpu")), logits()
    found = prepared(x, LABELS, x, Vocabulary(0, 2 * COLUMNS, COLUMNS, None, 2, 1))
    assert isinstance(found, Prepared), found
    launch = OnePassLaunch(found, workspace, x.device, SCALES)

    def twice() -> Any:
        for _ in range(2):
            launch(x, LABELS, x, RowInputs(), RowOutputs(LOSS[:ROWS]), LOSS[ROWS])
        assert h200.launched[-2] == h200.launched[-1]
        return by_name(h200)

    usual = twice()
    monkeypatch.setattr(symmetric, "WAIT_LIMIT_S", 4.0)
    assert (usual.limit_ns, twice().limit_ns) == (120 * 10**9, 4 * 10**9)
    workspace.reserve(1 << 22)
    assert twice().words == pointer(workspace.words) != usual.words
    workspace.failed.fill_(1)
    with pytest.raises(RuntimeError, match="in vain"):
        twice()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("loss", ["cross_entropy", "reverse_kl"])
@pytest.mark.parametrize("columns", [16384, 131072])
def test_what_it_is_compiled_and_launched_for(columns: int, loss: str, world_size: int) -> None:
    x = Form((4096, columns), (columns, 1), torch.bfloat16, 0)
    target = Form((4096,), (1,), torch.int64, 0) if loss == "cross_entropy" else x
    found = prepared(x, target, x, Vocabulary(0, columns * world_size, columns, None, world_size, 0), LOSS=loss)
    assert isinstance(found, Prepared), found
    constants, tiling = found.kernel.constants, found.tiling
    assert 0 <= 132 * tiling.programs_per_sm - found.programs < tiling.parts
    assert (tiling.TILES == constants["SPEC"].WHOLE_TILES) == (tiling.parts * tiling.room == columns)
    assert not constants["SPEC"].PADDED
    assert constants["enable_fp_fusion"] is False  # or the ranks' losses differ in their last bit
    assert constants["launch_cooperative_grid"] == (tiling.SLOTS > 0)  # or programs wait for some that never start
    assert constants.get("maxnreg") == (tiling.registers if tiling.programs_per_sm == 2 else None)
    numbers = 3 if loss == "cross_entropy" else 5
    assert found.bytes_sent == (world_size - 1) * 4096 * numbers * tiling.SLOTS * 8


def test_ranks_decide_alike_whether_to_meet() -> None:
    """A rank without a gradient must meet, too: the others would wait for it in vain."""
    for columns, meets in ((65536, True), (32768, False)):
        shard = Vocabulary(0, 2 * columns, columns, None, 2, 0)
        x, labels = (Form((4096, width), (width, 1), torch.bfloat16, 0) for width in (columns, 1))
        calls = [prepared(x, labels, out, shard) for out in (x, None)]
        assert [isinstance(call, Prepared) and call.meeting is not None for call in calls] == [meets, meets]


def test_what_one_pass_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = "its rows must be contiguous and made of whole 16-byte vectors"
    for x, out in ((logits(1), None), (logits(), logits(1)), (logits(row_stride=COLUMNS + 1), None)):
        assert prepared(x, LABELS, out) == whole
    for strided in (logits().T.contiguous().T, logits()[:, :12]):
        assert prepared(strided, LABELS, None) == whole
    two = Vocabulary(0, 2 * COLUMNS, COLUMNS, None, 2, 0)
    assert isinstance(prepared(logits(1), LABELS, None, two), Prepared)
    assert "targets of the logits' dtype" in str(prepared(logits(), logits().float(), None, LOSS="reverse_kl"))
    assert "too long with block_cap=16" in str(prepared(ROOM[: 2 * 8192].view(2, 8192), LABELS, None, block_cap=16))
    uneven = Vocabulary(0, COLUMNS, COLUMNS, COLUMNS * 9, 2, 0)
    assert "too uneven" in str(prepared(logits(), LABELS, None, uneven))
    prepare.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 8.0" in str(prepared(logits(), LABELS, None))


def test_a_groups_launches_follow_each_other_whatever_their_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[int, int]] = []

    class Stream:
        def __init__(self, handle: int) -> None:
            self.handle = handle

        def wait_stream(self, other: Any) -> None:
            waits.append((self.handle, other.handle))

    now = SimpleNamespace(stream=0, capturing=False)
    monkeypatch.setattr(symmetric, "stream_of", lambda device: now.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(now.stream))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.capturing)
    group: Any = None
    workspace = PeerWorkspace(group, torch.device("cpu"))
    for stream, capturing in ((0, False), (0, False), (5, True), (0, False), (6, False), (6, False), (0, False)):
        now.stream, now.capturing = stream, capturing
        workspace.enter()
    assert waits == [(6, 0), (0, 6)]
    workspace.failed.fill_(1)
    with pytest.raises(RuntimeError, match="in vain"):
        workspace.enter()
