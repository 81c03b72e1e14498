"""The doctor on this machine, with the commands that it runs."""

import sys

from tests.support.listening import alone_on_loopback
from tpbench.console import doctor, information


def test_all_findings_of_this_machine(capsys, tmp_path):
    code = information(["doctor", f"output_dir={tmp_path}/new/folder"])
    printed = capsys.readouterr().out
    assert code == int("fail  " in printed)
    for subject in ("GPU", "Triton", "disk", "torch", "shared memory"):
        assert subject in printed
    assert printed.count("Verdict: ") == 1 and printed.splitlines()[-1].startswith("Verdict: ")
    assert f"free in {tmp_path}" in printed


def test_an_all_reduce_over_ranks_that_listen_on_loopback_only(tmp_path):
    code, printed = alone_on_loopback([sys.executable, "-m", "tpbench.console.torch_probe", "0", "2"], tmp_path)
    assert code == 0 and '["torch", "ok"' in printed and '["GLOO", "ok"' in printed, printed


def test_a_torch_that_fails(monkeypatch):
    (failed,) = doctor.torch_findings(1, 2)  # a GPU that torch does not see
    assert failed.state == "fail" and "driver" in failed.fix
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    (failed,) = doctor.torch_findings(0, 1)
    assert (failed.subject, failed.state, failed.message) == ("torch", "fail", "it fails: exit code 1") and failed.fix
