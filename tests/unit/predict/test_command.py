"""`tpbench predict` as users call it."""

import dataclasses
import re

import pytest

from tests.support import synthetic
from tests.support.commands import predict as main
from tpbench.predict import model


def test_text_answer(rows, capsys):
    arguments = ["--vocab", "131072", "--tp", "8", "--tokens", "8192", "--gpu-memory", "80", "--rows", rows]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    lines = {line.split()[0]: line for line in said.splitlines()[4:7]}
    assert set(lines) == set(synthetic.VARIANTS) and all(line.endswith(" fits") for line in lines.values())
    assert "14.50 GiB +-" in lines["pytorch_gather"] and "1792 MiB" in lines["pytorch_gather"]
    assert main([*arguments[:-3], "8", "--rows", rows, "--variant", "pytorch_gather"]) == 0
    assert capsys.readouterr().out.splitlines()[4].endswith(" OOM")


def test_validation(rows, capsys):
    assert main(["--validate", "--rows", rows, "--variant", "triton_tp,pytorch_tp_manual"]) == 0
    said = capsys.readouterr().out
    assert "the aims are reached" in said and re.search(r"\na size +\d+ +\d+ +\d+ +(9\d|100)", said)
    assert re.search(r"\na loss +\d+ +0 +0 ", said) and "a GPU is not validated" in said


def test_hosts_and_gpus_are_validated_if_rows_have_several(tmp_path, capsys):
    """The rows of another GPU are those of the first one, times the ratio of the bandwidths."""
    one_rank, several = synthetic.SIZES[:3], synthetic.SIZES[3:]
    for host, gpu, factor, sizes in (
        ("a", "NVIDIA H200", 1, one_rank),
        ("b", "NVIDIA H200", 1, several),
        ("c", "NVIDIA H100 80GB HBM3", 4.8 / 3.35, synthetic.SIZES),
    ):
        cells = [
            synthetic.cell(variant, vocab, tp, host=host, gpu_name=gpu, factor=factor)
            for variant in synthetic.VARIANTS
            for vocab, tp in sizes
        ]
        synthetic.write(cells, tmp_path, host)
    main(["--validate", "--gpu", "H200", "--rows", str(tmp_path)])
    said = capsys.readouterr().out
    assert "a loss is not validated" in said and "a host is not" not in said and re.search(r"\na host +42 ", said)
    assert re.search(r"\na GPU +42 +0 +42 +100.0%", said)


@pytest.mark.parametrize("counted", ["memory", "sent"])
def test_counts_that_scale_a_gather_by_its_shard_fail_the_validation(rows, capsys, monkeypatch, counted):
    """A gather holds the logits of all ranks, and each rank sends to tp - 1 others."""

    def by_shard(variant, size):
        right = counts(variant, size)
        wrong = {name: value / size.tp_size for name, value in getattr(right, counted).items()}
        return dataclasses.replace(right, **{counted: wrong})

    counts = model.counts
    monkeypatch.setattr(model, "counts", by_shard)
    assert main(["--validate", "--rows", rows]) == 1
    printed = capsys.readouterr().out
    assert "the aims are not reached" in printed
    assert re.search(r"median error of a variant's (peak_gib|bytes_communicated): (?!0\.0%)", printed)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--rows", "nowhere"], "no such folder or file: nowhere"),
        (["--variant", "triton"], "no variant with enough cells is called triton, did you mean triton_tp?"),
        (["--loss", "forward_kl"], "loss=forward_kl was not measured on NVIDIA H200"),
        (["--tokens", "4x"], "tokens=4x must be a whole number"),
        (["--tp", "0"], "tp_size=0 must be at least 1"),
        (["--loss", "ce"], "did you mean cross_entropy?"),
        (["--gpu", "L40"], "no row was measured on L40 (there are: NVIDIA H200)"),
        (["--vocab", "4", "--tp", "8"], "cannot be sharded"),
        (["--gpu-memory", "1"], "CUDA, NCCL and fragments alone take 2 GiB"),
        (["--variant", ""], "is a variable of the shell not set?"),
        (["--tp", "16"], "tp_size=16 is not predicted: rows are of one node, at most 8 GPUs"),
    ],
)
def test_what_cannot_be_answered(rows, capsys, arguments, said):
    assert main(["--rows", rows, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_what_another_command_answers(rows, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--rows", rows, "--model", "qwen3_8b"])
    assert "dry_run=true" in capsys.readouterr().err
