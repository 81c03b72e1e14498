"""Findings of the doctor: each problem has a fix."""

import json
import sys

import pytest

from tpbench.console import checks, doctor, information, torch_probe

PROBED = {"torch": "2.13.0", "cuda": "13.0", "gpus": 4, "nccl": "2.28.9", "capability": [[9, 0]] * 4, "refused": []}


def states(findings):
    return {finding.subject: finding.state for finding in findings}


def test_arguments(capsys):
    assert information(["doctor", "gpu"]) == 2
    assert "doctor takes output_dir=DIR" in capsys.readouterr().err


def test_a_good_machine():
    found = [*doctor.torch_findings(PROBED, 4), *doctor.rank_findings({"nccl": True, "symmetric": True}, 4)]
    assert set(states(found).values()) == {"good"}
    assert set(states(found)) == {"torch", "NCCL", "peer access", "symmetric memory"}


@pytest.mark.parametrize(
    "probed, present, subject",
    [
        (PROBED | {"cuda": None, "gpus": 0}, 4, "torch"),
        (PROBED | {"gpus": 0, "cuda_error": "driver too old"}, 4, "torch"),
        (PROBED | {"refused": [[0, 1], [1, 0]]}, 4, "peer access"),
        (PROBED | {"capability": [[7, 0]] * 4}, 4, "GPUs"),
    ],
)
def test_what_is_wrong_has_a_fix(probed, present, subject):
    bad = [finding for finding in doctor.torch_findings(probed, present) if finding.state == "bad"]
    assert [finding.subject for finding in bad] == [subject] and bad[0].fix


def test_ranks_that_do_not_reach_each_other():
    (failed,) = doctor.rank_findings("NCCL error", 4)
    assert failed.state == "bad" and "NCCL_DEBUG" in failed.fix
    assert states(doctor.rank_findings({"nccl": True, "symmetric": "not supported"}, 2))["symmetric memory"] == "note"
    assert states(doctor.rank_findings({"nccl": False, "symmetric": False}, 2))["NCCL"] == "bad"


def test_the_probe(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["torch_probe"])
    torch_probe.main()
    printed = json.loads(capsys.readouterr().out)
    assert printed["torch"] and printed["gpus"] >= 0


def test_a_disk_that_is_full_or_closed(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "MIN_DISK_GIB", 1e9)
    assert all(finding.fix for finding in checks.disk(str(tmp_path)) if finding.state == "bad")
    assert states(checks.disk(str(tmp_path)))["disk"] == "bad"
    (finding,) = checks.disk("/proc/rows")
    assert finding.state == "bad" and "cannot be written" in finding.message


@pytest.mark.parametrize(
    "bad, gpus, verdict",
    [
        ([], 4, "this machine can measure on 4 GPUs, nothing to mend"),
        ([], 0, "sweeps run on 2 CPU cores, times of Triton kernels are no measurement there, nothing to mend"),
        (["disk"], 4, "do not measure here yet, one problem (disk) to mend"),
        (["GPU 0", "GPU 0", "disk"], 4, "do not measure here yet, 3 problems (GPU 0, disk) to mend"),
    ],
)
def test_the_verdict(bad, gpus, verdict):
    assert doctor.verdict(bad, gpus, cores=2) == verdict
