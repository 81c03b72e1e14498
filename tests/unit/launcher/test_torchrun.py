"""The torchrun command and environment of a job, and what the logs say of its end."""

import os
import sys
from pathlib import Path

import pytest

from tpbench.job import Job, parse_job
from tpbench.kernels.distributed import ENVIRONMENT
from tpbench.launcher import torchrun
from tpbench.launcher.failure import describe
from tpbench.worker.torchrun import FAILURES_FILE

JOBS = {
    "tiny_tp2": {"tp_size": 2, "device": "cpu"},
    "v131k_tp8": {"tokens": 4096, "vocab": 131072, "tp_size": 8, "device": "cuda"},
    "dp2_tp2": {"tp_size": 2, "dp_size": 2, "device": "cuda"},
}
GOLDEN = """\
-m tpbench.worker.torchrun --nnodes=1 --nproc-per-node={ranks} --rdzv-backend=tpbench --local-addr=127.0.0.1
--max-restarts=0 --monitor-interval=0.1 --redirects=3 --rdzv-id=20260101-000000-abcdef-3
--log-dir=/runs/20260101-000000-abcdef/3 -m tpbench.worker.rank /runs/20260101-000000-abcdef/3/cell.json
"""


def job(name: str, variant: str = "triton_tp") -> Job:
    return parse_job({"variant": variant, "tokens": 64, "vocab": 1000, **JOBS[name]})


@pytest.mark.parametrize(("name", "ranks"), [("tiny_tp2", 2), ("v131k_tp8", 8), ("dp2_tp2", 4)])
def test_command(name: str, ranks: int) -> None:
    logs = Path("/runs/20260101-000000-abcdef/3")
    assert torchrun.command(job(name), logs / "cell.json", logs) == [
        sys.executable, *GOLDEN.format(ranks=ranks).split()
    ]  # fmt: skip


def test_a_job_on_a_cpu_sees_no_gpu_and_interprets_kernels_and_one_on_gpus_never_does() -> None:
    inherited = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "0,1", "PET_STANDALONE": "1"}
    env = torchrun.environment(job("tiny_tp2"), "row", inherited, interprets_triton=True)
    assert (env["CUDA_VISIBLE_DEVICES"], env["TRITON_INTERPRET"], env[torchrun.MARKER]) == ("", "1", "row")
    assert "TRITON_INTERPRET" not in torchrun.environment(job("tiny_tp2", "pytorch_gather"), "row", {})
    env = torchrun.environment(job("v131k_tp8"), "row", inherited)
    assert "TRITON_INTERPRET" not in env and env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "PET_STANDALONE" not in env  # an option of torchrun


def test_no_communicator_of_a_job_makes_multicast_objects() -> None:
    env = torchrun.environment(job("v131k_tp8"), "row", {})
    assert env.items() >= ENVIRONMENT.items() == torchrun.NO_MULTICAST.items()
    assert torchrun.environment(job("v131k_tp8"), "row", {"NCCL_NVLS_ENABLE": "1"})["NCCL_NVLS_ENABLE"] == "1"
    assert not torchrun.environment(job("tiny_tp2"), "row", {}).keys() & ENVIRONMENT.keys()


def test_variables_of_the_user_stay_but_one_host_communicates_over_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {"NCCL_SOCKET_IFNAME": "eth7", "GLOO_SOCKET_IFNAME": "eth7", "OMP_NUM_THREADS": "5", "PYTHONPATH": "/mine"}
    env = torchrun.environment(job("tiny_tp2"), "row", mine)
    assert env["OMP_NUM_THREADS"] == "5"
    assert env["NCCL_SOCKET_IFNAME"] == env["GLOO_SOCKET_IFNAME"] == "lo"
    assert torchrun.environment(job("tiny_tp2"), "row", mine, nodes=2)["NCCL_SOCKET_IFNAME"] == "eth7"
    assert env["PYTHONPATH"].split(os.pathsep)[1] == "/mine"
    monkeypatch.setattr(torchrun, "INSTALLED", True)  # then the package must not be before what the user put there
    assert torchrun.environment(job("tiny_tp2"), "row", mine)["PYTHONPATH"] == "/mine"


def test_ranks_share_the_cores_on_a_cpu_and_have_one_thread_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "available_cores", lambda: 24)
    assert torchrun.environment(job("tiny_tp2"), "row", {})["OMP_NUM_THREADS"] == "12"
    assert torchrun.environment(job("v131k_tp8"), "row", {})["OMP_NUM_THREADS"] == "1"


CRASH = """\
[1.7 s] rank 0: first pass
Fatal Python error: Segmentation fault

Thread 0x00007fca2faa7b81 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 1 in wait

Current thread 0x00007fca2faa7b80 (most recent call first):
  File "/home/me/site-packages/torch/_ops.py", line 519 in call
  File "/home/me/fast.py", line 69 in step

Extension modules: numpy._core._multiarray_umath, numpy.linalg._umath_linalg (total: 2)
"""


def test_a_crash_is_told_by_its_line_and_an_end_without_a_result_by_its_rank(tmp_path: Path) -> None:
    log = tmp_path / "run/attempt_0/0/stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text(CRASH)
    _, reason = describe(0, 60, tmp_path)
    assert reason.startswith("rank 0 ended with exit code 0 before its result, as os._exit(0) does")
    (tmp_path / FAILURES_FILE).write_text("[[0, 0, -11]]")
    _, reason = describe(1, 60, tmp_path)
    assert reason == (
        "rank 0 ended with signal 11 (SIGSEGV); the last lines:\n[1.7 s] rank 0: first pass\n"
        "Fatal Python error: Segmentation fault\nnow in fast.py:69 (step)"
    )
