"""Findings of the doctor: each problem has a fix."""

import sys
from types import SimpleNamespace

from tpbench.console import doctor, information
from tpbench.console.doctor import Finding


def states(findings):
    return {finding.subject: finding.state for finding in findings}


def test_arguments(capsys):
    assert information(["doctor", "gpu"]) == 2
    assert "doctor has one argument, output_dir=DIR, and not gpu" in capsys.readouterr().err


def test_a_failed_check_is_printed_with_its_fix(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "disk", lambda output_dir: [Finding("disk", "fail", "it is full", "free some space")])
    for name in ("gpus", "compiler"):
        monkeypatch.setattr(doctor, name, list)
    monkeypatch.setattr(doctor, "torch_findings", lambda gpus, ranks: [])
    assert information(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["fail  disk: it is full", "      fix: free some space"]
    assert lines[-1] == "Verdict: do not measure here before you fix: disk"


def test_a_disk_that_is_full_or_closed(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "MIN_FREE_GIB", 1e9)
    assert all(finding.fix for finding in doctor.disk(str(tmp_path)) if finding.state == "fail")
    assert states(doctor.disk(str(tmp_path)))["disk"] == "fail"
    finding = next(doctor.disk("/proc/rows"))
    assert finding.state == "fail" and "cannot be written" in finding.message


def test_only_a_gpu_that_jobs_would_use_must_be_free(monkeypatch):
    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda index: f"GPU-{index}",
        nvmlDeviceGetName=lambda index: "A",
        nvmlDeviceGetMemoryInfo=lambda index: SimpleNamespace(total=80 * 2**30, used=(40 - 40 * index) * 2**30),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (busy,) = [finding for finding in doctor.gpus() if finding.state == "fail"]
    assert busy.subject == "GPU 0" and "CUDA_VISIBLE_DEVICES" in busy.fix
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert states(doctor.gpus()) == {"GPU 0": "ok", "GPU 1": "ok"}
