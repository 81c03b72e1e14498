"""The doctor on this machine, with the commands that it runs."""

from tpbench.console import doctor, information


def test_all_findings_of_this_machine(capsys, tmp_path):
    code = information(["doctor", f"output_dir={tmp_path}/new/folder"])
    printed = capsys.readouterr().out
    assert code == int("FAIL" in printed)
    for subject in ("GPU", "Triton", "disk", "torch", "shared memory"):
        assert subject in printed
    assert printed.count("Verdict: ") == 1 and printed.splitlines()[-1].startswith("Verdict: ")
    assert f"free in {tmp_path}" in printed


def test_a_probe_that_fails(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/no/such/folder")
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    assert doctor.probe(1) == {"error": "exit code 1"}
