"""`test` and `profile`: which sweep they run, and what they say about its rows."""

import contextlib
from pathlib import Path

import pytest

from tpbench.console import information, trials
from tpbench.measure import machine
from tpbench.outside.variant import OutsideVariant
from tpbench.results.write import write_row

OK = {"status": "ok", "grad_error": 0.002}
WRONG = {"status": "wrong", "reason": "grad_error 1"}
SKIPPED = {"status": "skipped", "reason": "it is for one GPU"}


def test_each_variant_of_a_workload_passes_fails_or_did_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"triton_tp": [OK, SKIPPED], "pytorch_tp_manual": [OK, WRONG], "torch_loss_parallel": [SKIPPED]}

    def sweep(*arguments: str) -> int:
        values = dict(argument.split("=", 1) for argument in arguments)
        if values.get("tp_size") == "1":  # again what was skipped
            assert values["variant"] == "torch_loss_parallel"
            row = {"workload": "entropy_loss", "variant": values["variant"], **OK}
            write_row(row, values["output_dir"], "again")
            return 0
        assert (values["variant"], values["shape"], values["loss"]) == ("all", "tiny_tp2", "reverse_kl")
        for variant, cells in rows.items():
            for index, cell in enumerate(cells):
                row = {"workload": "entropy_loss", "variant": variant, **cell}
                write_row(row, values["output_dir"], f"{variant}{index}")
        return 1

    monkeypatch.setattr(trials, "_sweep", sweep)
    monkeypatch.setattr(machine, "gpu_count", lambda: 0)
    assert information(["test", "entropy_loss", "loss=reverse_kl"]) == 1
    lines = {words[1]: " ".join(words[2:]) for words in map(str.split, capsys.readouterr().out.splitlines())}
    assert lines["triton_tp"] == "pass 2.0e-03"
    assert lines["pytorch_tp_manual"] == "FAIL grad_error 1"
    assert lines["torch_loss_parallel"] == "pass 2.0e-03"


def test_a_variant_of_a_file_is_tested_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sweep(*arguments: str) -> int:
        values = dict(argument.split("=", 1) for argument in arguments)
        assert (values["variant"], values["shape"]) == ("folder/my.py:f", "tiny_tp2")
        write_row({"workload": "entropy_loss", "variant": "my.py:f", **OK}, values["output_dir"], "a")
        return 0

    variants = {"folder/my.py:f": OutsideVariant("my.py:f")}
    monkeypatch.setattr(trials, "find_outside", variants.get)
    monkeypatch.setattr(trials, "_sweep", sweep)
    assert information(["test", "folder/my.py:f"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["entropy_loss", "my.py:f", "pass", "2.0e-03"]


def test_a_sweep_that_was_refused_is_no_verdict_on_variants(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trials, "_sweep", lambda *arguments: 1)
    assert information(["test", "entropy_loss", "loss=none"]) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "argument, message",
    [
        ("variants", "no workload is called variants"),
        ("variant=quack", "it runs every variant"),
        ("output_dir=rows", "leave out output_dir=rows"),
    ],
)
def test_other_choices_are_refused(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):  # of argparse
        assert information(["test", argument]) == 2
    assert message in capsys.readouterr().err


def test_a_profile_compares_four_variants_in_one_table_without_earlier_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def sweep(*arguments: str) -> int:
        values = dict(argument.split("=", 1) for argument in arguments)
        assert values["layers"] == "3" and values["+experiment"] == "profile_tiny"
        for variant in ("block_no_tp", "block_tp", "block_tp_overlap", "block_copy_engine"):
            row = {"workload": "tp_block", "variant": variant, "status": "ok", "key": variant, "device": "cpu"}
            write_row({**row, "sweep_id": "new", "grad_norm": 2.5}, values["output_dir"], variant)
        return 0

    row = {"workload": "tp_block", "variant": "block_tp", "status": "ok", "key": "a", "sweep_id": "old", "grad_norm": 7}
    write_row(row, tmp_path, "a")
    monkeypatch.setattr(trials, "_sweep", sweep)
    monkeypatch.setattr(machine, "gpu_count", lambda: 0)
    assert information(["profile", "layers=3", f"output_dir={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    for word in ("block_no_tp", "block_tp_overlap", "block_copy_engine", "grad_norm", "2.5"):
        assert word in printed
    assert " 7" not in printed


def test_a_profile_of_a_file_is_a_sweep_with_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps: list[tuple[str, ...]] = []
    monkeypatch.setattr(trials, "_sweep", lambda *arguments: sweeps.append(arguments) or 0)
    assert information(["profile", "my.py:f", "tokens=8"]) == 0
    assert sweeps == [("variant=my.py:f", "profile=true", "tokens=8")]
