"""The doctor on this machine, with the commands that it runs."""

from tpbench.console import doctor, information


def test_all_findings_of_this_machine(capsys, tmp_path):
    code = information(["doctor", f"output_dir={tmp_path}/new/folder"])
    printed = capsys.readouterr().out
    assert code == int("fail  " in printed)
    for subject in ("GPU", "Triton", "disk", "torch", "shared memory"):
        assert subject in printed
    assert printed.count("Verdict: ") == 1 and printed.splitlines()[-1].startswith("Verdict: ")
    assert f"free in {tmp_path}" in printed


def test_torch_and_an_all_reduce(monkeypatch):
    found = {finding.subject: finding for finding in doctor.torch_findings(0, 2)}
    assert {subject: finding.state for subject, finding in found.items()} == {"torch": "ok", "GLOO": "ok"}
    (failed,) = doctor.torch_findings(1, 2)  # a GPU that torch does not see
    assert failed.state == "fail" and "driver" in failed.fix
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    (failed,) = doctor.torch_findings(0, 1)
    assert (failed.subject, failed.state, failed.message) == ("torch", "fail", "it fails: exit code 1") and failed.fix
