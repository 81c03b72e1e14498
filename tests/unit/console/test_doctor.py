"""The doctor says what is wrong and what to mend, and is wrong about neither."""

import json
import sys

import pytest

from tpbench.console import answer, checks, doctor, torch_probe
from tpbench.console.checks import Finding

SEEN = {"torch": "2.13.0", "cuda": "13.0", "gpus": 4, "nccl": "2.28.9", "capability": [[9, 0]] * 4, "refused": []}


def states(findings):
    return {finding.what: finding.state for finding in findings}


@pytest.mark.timeout(120)
def test_here(capsys, tmp_path):
    code = answer(["doctor", f"output_dir={tmp_path}/new/folder"])
    said = capsys.readouterr().out
    assert code == int("BAD" in said)
    for what in ("GPU", "Triton", "Slurm", "disk", "torch", "shared memory"):
        assert what in said
    assert said.rstrip().endswith("to mend") and f"free in {tmp_path}" in said


def test_arguments(capsys):
    assert answer(["doctor", "gpu"]) == 2
    assert "doctor takes output_dir=DIR" in capsys.readouterr().err


def test_a_good_machine():
    found = [*doctor.of_torch(SEEN, 4), *doctor.of_ranks({"nccl": True, "symmetric": True}, 4)]
    assert set(states(found).values()) == {"good"}
    assert set(states(found)) == {"torch", "NCCL", "peer access", "symmetric memory"}


@pytest.mark.parametrize(
    "seen, present, what",
    [
        (SEEN | {"cuda": None, "gpus": 0}, 4, "torch"),
        (SEEN | {"gpus": 0, "cuda_error": "driver too old"}, 4, "torch"),
        (SEEN | {"refused": [[0, 1], [1, 0]]}, 4, "peer access"),
        (SEEN | {"capability": [[7, 0]] * 4}, 4, "GPUs"),
    ],
)
def test_what_is_wrong_has_a_mend(seen, present, what):
    bad = [finding for finding in doctor.of_torch(seen, present) if finding.state == "bad"]
    assert [finding.what for finding in bad] == [what] and bad[0].mend


def test_ranks_that_do_not_reach_each_other():
    (failed,) = doctor.of_ranks("NCCL error", 4)
    assert failed.state == "bad" and "NCCL_DEBUG" in failed.mend
    assert states(doctor.of_ranks({"nccl": True, "symmetric": "not supported"}, 2))["symmetric memory"] == "note"
    assert states(doctor.of_ranks({"nccl": False, "symmetric": False}, 2))["NCCL"] == "bad"


def test_asking_a_command():
    assert doctor._ask([sys.executable, "-c", "print('noise'); print('{\"a\": 1}')"]) == {"a": 1}
    assert "ZeroDivisionError" in doctor._ask([sys.executable, "-c", "1/0"])
    assert "No such file" in doctor._ask(["/no/such/program"])


def test_the_probe(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["torch_probe"])
    torch_probe.main()
    seen = json.loads(capsys.readouterr().out)
    assert seen["torch"] and seen["gpus"] >= 0


def test_a_disk_that_is_full_or_closed(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "ENOUGH_DISK_GIB", 1e9)
    assert all(finding.mend for finding in checks.disk(str(tmp_path)) if finding.state == "bad")
    assert states(checks.disk(str(tmp_path)))["disk"] == "bad"
    (finding,) = checks.disk("/proc/rows")
    assert finding.state == "bad" and "cannot be written" in finding.said


def test_a_cluster(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checks.slurm() == [Finding("Slurm", "note", "not here: sweeps run on this machine")]
    for name, body in (("sbatch", "exit 0"), ("sinfo", "echo all up 2")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    assert checks.slurm()[0].said == "1 partitions"
    (tmp_path / "sinfo").write_text("#!/bin/sh\nexit 3\n")
    assert "no cluster answers: sinfo exits with 3" in checks.slurm()[0].said
