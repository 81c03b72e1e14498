"""The kernels compiled for a GPU, which needs none. The interpreter cannot run those in Gluon."""

import contextlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import compile as compile_for

from tests.support.fake_gpu import H200, fake_h200
from tpbench.kernels.cached_launch import Form
from tpbench.kernels.kernel_arguments import RowInputs, RowOutputs, Scales, TopTarget
from tpbench.kernels.one_pass.launch import OnePassLaunch, Prepared, prepare
from tpbench.kernels.row_loss import Options, RowLoss, Rows, Vocabulary
from tpbench.kernels.symmetric import Workspace
from tpbench.kernels.two_pass import launch as two_pass


def compile_kernel(
    loss: str, columns: int, world_size: int, top_loss: str = "", trains: bool = True, **options: Any
) -> tuple[str, str, int]:
    """Compile the kernels of a call with 64 rows. Returns of the last its name, its PTX and its bytes of shared memory.

    top_loss: a loss against a teacher's top 64. options: of `prepare`, with constants of the loss in upper case.
    """
    x = Form((64, columns), (columns, 1), torch.bfloat16, 0)
    target = Form((64,), (1,), torch.int64, 0) if loss == "cross_entropy" else x
    if top_loss:
        options |= {"TOP_K": 64, "TOP_BLOCK": 64, "TOP_LOSS": top_loss, "BUCKET": True}
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu = fake_h200(monkeypatch)
        prepared = prepare(
            x, target, x if trains else None, 0,
            Vocabulary(0, columns * world_size, columns, None, world_size, 0), ignore_index=-100, block_cap="auto",
            reduce=True, count=loss == "cross_entropy", LOSS=loss, **options,
        )  # fmt: skip
        assert isinstance(prepared, Prepared), prepared
        logits, row_loss = torch.zeros(8, dtype=torch.bfloat16), torch.zeros(2)
        labels: Any = torch.zeros(2, dtype=torch.int64) if loss == "cross_entropy" else logits
        labels = TopTarget(labels, torch.zeros(2)) if top_loss else labels
        prepared.kernel.kernel.device_caches.clear()  # an earlier case's compiler
        launch_once = OnePassLaunch(
            prepared, Workspace(logits.device), logits.device, Scales(*len(Scales._fields) * (1.0,))
        )
        inputs = RowInputs(
            row_weight=row_loss if world_size > 1 else None,
            entropy_grad=row_loss if "entropy_grad" in options else None,
        )
        launch_once(logits, labels, logits if trains else None, inputs, RowOutputs(row_loss), row_loss)
    for kernel in filter(None, (prepared.kernel, prepared.late_rows)):
        source = next(each.src for each in gpu.compiled if each.src.fn is kernel.kernel)
        launched = {name: value for name, value in kernel.constants.items() if name not in kernel.kernel.arg_names}
        compiled = compile_for(source, target=GPUTarget("cuda", 90, 32), options=launched)
    return kernel.kernel.__name__, compiled.asm["ptx"], compiled.metadata.shared


def compile_two_pass(loss: str, **options: Any) -> list[str]:
    """Compile the two-pass kernels of a call over two kernels. Returns their names."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu = fake_h200(monkeypatch)
        monkeypatch.setattr(two_pass, "launching", lambda device: contextlib.nullcontext())
        logits, labels = torch.zeros((4, 4096), dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
        target: Any = labels if loss == "cross_entropy" else logits
        given = Options(loss=loss, group=None, algorithm="two_kernels", **options)
        of_row = RowLoss.of_call(given, 4096, logits.device, "logits", target)
        rows = Rows.of_call(of_row, 4, logits.device, RowInputs(), None, logits)
        two_pass.launch(of_row, logits, target, rows)
        two_pass.scale_rows(logits, torch.ones(4))
    for kernel in gpu.compiled:
        compile_for(kernel.src, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    return [kernel.src.name for kernel in gpu.compiled]


OPTIONS = {"SMOOTHED": True, "ENTROPY": True, "entropy_grad": True, "SOFTCAP": 30.0}
CASES: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...] = (
    ("whole_row", ("cross_entropy", 100352, 1), {}),
    ("shared_rows", ("cross_entropy", 151936, 1), {"SMOOTHED": True}),
    ("mixture", ("jsd", 151936, 1), {"BETA": 0.5}),
    ("one_pass", ("cross_entropy", 1024, 2), OPTIONS),
    ("one_pass", ("forward_kl", 1024, 2), {**OPTIONS, "SMOOTHED": False, "TARGET_SOFTCAP": 30.0}),
    ("shared_rows", ("cross_entropy", 151936, 1, "reverse_kl"), {}),
    ("one_pass", ("cross_entropy", 16384, 2, "forward_kl"), {}),
    ("late_rows", ("reverse_kl", 8192, 2), {"yields": True}),
    ("one_pass", ("reverse_kl", 75968, 2), {}),
    ("shared_rows", ("cross_entropy", 151936, 1), {"trains": False}),
    ("mixture", ("jsd", 32768, 1), {"BETA": 0.5, "trains": False}),
)
"""The kernel that a call has, or the last of several, and the arguments of `compile_kernel`."""


@pytest.fixture(scope="module")
def compiled() -> list[tuple[str, str, int]]:
    """The results of `compile_kernel` for CASES, from a process without the interpreter that other tests here use."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return [each.result() for each in [pool.submit(compile_kernel, *case, **more) for _, case, more in CASES]]


def test_two_pass_kernels_compile() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            labels = pool.submit(compile_two_pass, "cross_entropy", entropy=True, z_loss=0.1, label_smoothing=0.1)
            mixture = pool.submit(compile_two_pass, "jsd", entropy=False, softcap=30.0)
            kernels = labels.result() + mixture.result()
    of_all = {"statistics_kernel", "row_loss_kernel", "loss_and_gradient_kernel", "reduce_kernel", "scale_kernel"}
    assert set(kernels) == of_all | {"inverse_count_kernel", "mixture_kernel"}


def test_kernels_compile(compiled: list[tuple[str, str, int]]) -> None:
    for (name, code, shared_bytes), (kernel, (_, columns, world_size, *_), _) in zip(compiled, CASES, strict=True):
        assert name == f"{kernel}_kernel"
        assert "cp.async.cg.shared.global" in code  # tiles are copied in whole vectors
        sends = (world_size > 1 or name in ("shared_rows_kernel", "mixture_kernel")) and columns != 8192
        assert ("st.relaxed.sys.global.b64" in code) == sends
        assert shared_bytes <= H200.shared_bytes
