"""`scripts/predict.py` as users call it."""

import json

import pytest

from tests.support import synthetic
from tpbench.predict.command import main


def test_text_answer(rows, capsys):
    arguments = ["--vocab", "131072", "--tp", "8", "--tokens", "8192", "--gpu-memory", "80", "--rows", rows]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    lines = {line.split()[0]: line for line in said.splitlines()[4:7]}
    assert set(lines) == set(synthetic.VARIANTS) and all(line.endswith(" fits") for line in lines.values())
    assert "14.50 GiB +-" in lines["pytorch_gather"] and "1792 MiB" in lines["pytorch_gather"]
    assert "extrapolates beyond what was measured: tp_size=8 2 times (all variants)" in said
    assert main([*arguments[:-3], "8", "--rows", rows, "--variant", "pytorch_gather"]) == 0
    assert capsys.readouterr().out.splitlines()[4].endswith(" OOM")


def test_json_answer(rows, capsys):
    assert main(["--format", "json", "--rows", rows, "--beside", "70B", "--loss", "reverse_kl"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["variants"]["triton_tp"]["memory"] == "fits" and said["free_gib"] < 121
    time = said["variants"]["pytorch_gather"]["time_ms"]
    assert time["low"] <= time["value"] <= time["high"]


def test_validation(rows, capsys):
    assert main(["--validate", "--rows", rows]) == 0
    said = capsys.readouterr().out
    assert "the aims are reached" in said and said.count("\none cell  ") == len(synthetic.VARIANTS) + 2
    assert "\n0 of 1 cells that ran out of memory are predicted to from the others" in said
    assert "pytorch_gather, cross_entropy, tokens=65536 vocab=131072 tp_size=4, bfloat16: predicted fits, 120.0" in said


def test_validation_predicts_a_cell_that_ran_out_from_a_smaller_one(tmp_path, capsys):
    failed = [
        synthetic.cell("pytorch_gather", 131072, 4, tokens=tokens, status="oom", reason="rank 0 ran out of memory")
        for tokens in (61440, 65536)
    ]
    rows = [*(each for each in synthetic.cells() if each["status"] == "ok"), *failed]
    assert main(["--validate", "--rows", str(synthetic.write(rows, tmp_path))]) == 0
    said = capsys.readouterr().out
    assert "1 of 2 cells that ran out of memory are predicted to" in said
    assert "tokens=61440 vocab=131072 tp_size=4, bfloat16: predicted tight" in said and "tokens=65536" not in said


@pytest.mark.parametrize("form, start", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_picture(rows, tmp_path, form, start):
    out = tmp_path / f"feasible.{form}"
    assert main(["--picture", str(out), "--rows", rows]) == 0
    made = out.read_bytes()
    assert made.startswith(start)
    if form == "svg":
        for words in ("80 GB GPU", "141 GB GPU", "8B", "70B", "405B", "predicted", "measured: fits", "out of memory"):
            assert words.encode() in made


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--rows", "nowhere"], "no such folder or file: nowhere"),
        (["--variant", "triton"], "no variant with enough cells is called triton, did you mean triton_tp?"),
        (["--loss", "forward_kl"], "loss=forward_kl was not measured on NVIDIA H200"),
        (["--gpu", "H100"], "no row was measured on H100 (there are: NVIDIA H200)"),
        (["--vocab", "4", "--tp", "8"], "cannot be sharded"),
        (["--workload", "tp_block"], "tp_block has no cost model"),
        (["--workload", "tp_blok"], "no workload is called tp_blok, did you mean tp_block?"),
        (["--picture", "x.pdf"], "must end in .png or .svg"),
    ],
)
def test_what_cannot_be_answered(rows, capsys, arguments, said):
    assert main(["--rows", rows, *arguments]) == 2
    assert said in capsys.readouterr().err
