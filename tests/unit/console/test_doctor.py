"""Findings of the doctor: each problem has a fix."""

import json
import sys

import pytest

from tpbench.console import doctor, information, torch_probe
from tpbench.console.doctor import Finding

PROBED = {"torch": "2.13.0", "cuda": "13.0", "gpus": 4, "nccl": "2.28.9", "capability": [[9, 0]] * 4, "unreachable": []}


def states(findings):
    return {finding.subject: finding.state for finding in findings}


def test_arguments(capsys):
    assert information(["doctor", "gpu"]) == 2
    assert "doctor has one argument, output_dir=DIR, and not gpu" in capsys.readouterr().err


def test_a_good_machine():
    found = [*doctor.torch_findings(PROBED, 4), *doctor.rank_findings({"nccl": True, "symmetric": True}, 4)]
    assert set(states(found).values()) == {"ok"}
    assert set(states(found)) == {"torch", "NCCL", "peer access", "symmetric memory"}


@pytest.mark.parametrize(
    "probed, present, subject",
    [
        (PROBED | {"cuda": None, "gpus": 0}, 4, "torch"),
        (PROBED | {"gpus": 0, "cuda_error": "driver too old"}, 4, "torch"),
        (PROBED | {"unreachable": [[0, 1], [1, 0]]}, 4, "peer access"),
        (PROBED | {"capability": [[7, 0]] * 4}, 4, "GPUs"),
    ],
)
def test_what_is_wrong_has_a_fix(probed, present, subject):
    failed = [finding for finding in doctor.torch_findings(probed, present) if finding.state == "fail"]
    assert [finding.subject for finding in failed] == [subject] and failed[0].fix


def test_a_failed_check_is_printed_with_its_fix(capsys, monkeypatch):
    monkeypatch.setattr(
        doctor, "examine", lambda output_dir: [Finding("disk", "fail", "it is full", "free some space")]
    )
    assert information(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["FAIL  disk: it is full", "      fix: free some space"]
    assert lines[-1] == "Verdict: do not measure here before you fix one problem: disk"


def test_ranks_that_do_not_reach_each_other():
    (failed,) = doctor.rank_findings("NCCL error", 4)
    assert failed.state == "fail" and "NCCL_DEBUG" in failed.fix
    assert states(doctor.rank_findings({"nccl": True, "symmetric": "not supported"}, 2))["symmetric memory"] == "note"
    assert states(doctor.rank_findings({"nccl": False, "symmetric": False}, 2))["NCCL"] == "fail"


def test_the_probe(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["torch_probe"])
    torch_probe.main()
    printed = json.loads(capsys.readouterr().out)
    assert printed["torch"] and printed["gpus"] >= 0


def test_a_disk_that_is_full_or_closed(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "MIN_DISK_GIB", 1e9)
    assert all(finding.fix for finding in doctor.disk(str(tmp_path)) if finding.state == "fail")
    assert states(doctor.disk(str(tmp_path)))["disk"] == "fail"
    (finding,) = doctor.disk("/proc/rows")
    assert finding.state == "fail" and "cannot be written" in finding.message


@pytest.mark.parametrize(
    "failed, gpus, verdict",
    [
        ([], 4, "no problem found; this machine can measure on 4 GPUs"),
        ([], 0, "no problem found; sweeps run on 2 CPU cores, where times of Triton kernels are no measurement"),
        (["disk"], 4, "do not measure here before you fix one problem: disk"),
        (["GPU 0", "GPU 0", "disk"], 4, "do not measure here before you fix 3 problems: GPU 0, disk"),
    ],
)
def test_the_verdict(failed, gpus, verdict):
    assert doctor.verdict(failed, gpus, cores=2) == verdict
