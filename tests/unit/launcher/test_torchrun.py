"""The torchrun command and environment of a job, against files that a reviewer can read."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from tpbench.job import Job, parse_job
from tpbench.kernels.collectives import ENVIRONMENT
from tpbench.launcher import torchrun

GOLDEN = Path(__file__).parent / "golden"
JOBS = {
    "tiny_tp2": {"tp_size": 2, "device": "cpu"},
    "v131k_tp8": {"tokens": 4096, "vocab": 131072, "tp_size": 8, "device": "cuda"},
    "dp2_tp2": {"tp_size": 2, "dp_size": 2, "device": "cuda"},
}


def job(name: str, variant: str = "triton_tp") -> Job:
    return parse_job({"variant": variant, "tokens": 64, "vocab": 1000, **JOBS[name]})


@pytest.mark.parametrize("name", JOBS)
def test_command(name: str) -> None:
    logs = Path("/runs/20260101-000000-abcdef/3")
    line = torchrun.command(job(name), logs / "cell.json", logs)
    assert line[0] == sys.executable
    text = "python \\\n  " + " \\\n  ".join(shlex.quote(each) for each in line[1:]) + "\n"
    assert text == (GOLDEN / f"{name}.sh").read_text()


def test_environment_of_a_cpu_job_hides_the_gpus_and_interprets_kernels() -> None:
    env = torchrun.environment(job("tiny_tp2"), "row", {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1"})
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert env["TRITON_INTERPRET"] == "1"
    assert env[torchrun.MARKER] == "row"
    assert "TRITON_INTERPRET" not in torchrun.environment(job("tiny_tp2", "pytorch_gather"), "row", {})


def test_environment_of_a_gpu_job_never_interprets() -> None:
    env = torchrun.environment(job("v131k_tp8"), "row", {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "0,1"})
    assert "TRITON_INTERPRET" not in env
    assert env["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_no_communicator_of_a_job_makes_multicast_objects() -> None:
    env = torchrun.environment(job("v131k_tp8"), "row", {})
    assert env.items() >= ENVIRONMENT.items() == torchrun.NO_MULTICAST.items()
    assert torchrun.environment(job("v131k_tp8"), "row", {"NCCL_NVLS_ENABLE": "1"})["NCCL_NVLS_ENABLE"] == "1"
    assert not torchrun.environment(job("tiny_tp2"), "row", {}).keys() & ENVIRONMENT.keys()


def test_an_installed_package_is_not_put_before_what_the_user_put_on_the_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torchrun, "INSTALLED", True)
    assert torchrun.environment(job("tiny_tp2"), "row", {"PYTHONPATH": "/mine"})["PYTHONPATH"] == "/mine"
    assert "PYTHONPATH" not in torchrun.environment(job("tiny_tp2"), "row", {})


def test_environment_keeps_what_the_user_set() -> None:
    mine = {"NCCL_SOCKET_IFNAME": "eth7", "OMP_NUM_THREADS": "5", "PYTHONPATH": "/mine"}
    env = torchrun.environment(job("tiny_tp2"), "row", mine)
    assert env["OMP_NUM_THREADS"] == "5"
    assert env["PYTHONPATH"].split(os.pathsep)[1] == "/mine"
    assert torchrun.environment(job("tiny_tp2"), "row", mine, nodes=2)["NCCL_SOCKET_IFNAME"] == "eth7"


def test_on_one_host_communication_stays_on_the_loopback_interface() -> None:
    mine = {"NCCL_SOCKET_IFNAME": "eth7", "GLOO_SOCKET_IFNAME": "eth7"}
    env = torchrun.environment(job("tiny_tp2"), "row", mine)
    assert {env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]} <= {"lo", "lo0"}
