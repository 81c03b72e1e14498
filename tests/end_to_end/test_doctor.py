"""The doctor on this machine, with the commands that it runs."""

from tpbench.console import doctor, information
from tpbench.console.doctor import Finding


def test_all_findings_of_this_machine(capsys, tmp_path):
    code = information(["doctor", f"output_dir={tmp_path}/new/folder"])
    printed = capsys.readouterr().out
    assert code == int("FAIL" in printed)
    for subject in ("GPU", "Triton", "Slurm", "disk", "torch", "shared memory"):
        assert subject in printed
    assert printed.count("Verdict: ") == 1 and printed.splitlines()[-1].startswith("Verdict: ")
    assert f"free in {tmp_path}" in printed


def test_a_probe_that_fails(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/no/such/folder")
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    assert doctor.probe(1) == {"error": "exit code 1"}


def test_findings_of_a_cluster(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.slurm() == [Finding("Slurm", "note", "not installed: sweeps run on this machine")]
    for name, body in (("sbatch", "exit 0"), ("sinfo", "echo all up 2")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    assert doctor.slurm()[0].message == "1 partition"
    (tmp_path / "sinfo").write_text("#!/bin/sh\nexit 3\n")
    assert "no cluster answers: sinfo exits with 3" in doctor.slurm()[0].message
