"""`tpbench predict` answers in its first sentence, for the GPU in question, and says what it does not know."""

import argparse
import json
import re

import pytest

from tests.support import synthetic
from tests.support.commands import predict as main
from tpbench.predict.answer import Answer
from tpbench.predict.command import whole_numbers
from tpbench.predict.model import Estimate, Prediction
from tpbench.predict.target import RESERVE_GIB, Target
from tpbench.workloads.entropy_loss.cost_model import LossSize


@pytest.fixture
def predict(rows, capsys):
    def run(*arguments):
        assert main([*arguments, "--rows", rows]) == 0
        return capsys.readouterr().out

    return run


def by_variant(printed):
    return {line["variant"]: line for line in json.loads(printed)}


def prediction(label, gib, device_ms=None, error=0.1, wall_ms=None):
    times = [value and Estimate(value, error) for value in (wall_ms, device_ms)]
    return Prediction(label, LossSize(), *times, 0.0, Estimate(gib, 0.01))


@pytest.mark.parametrize(
    "gather, kernel, said",
    [
        ((14, 118), (0.25, 1), "takes 14.00 GiB and 118 times as long as triton_tp (device time): do not gather"),
        ((14, 0.5), (0.25, 1), "takes 14.00 GiB and 0.50 times as long as triton_tp (device time): gather"),
        ((14, 1.1), (0.25, 1), "and 1.10 times as long as triton_tp (device time), within the error: memory decides"),
        ((90, 1), (0.25, 1), "takes 90.00 GiB and does not fit into 78.00 GiB: use triton_tp, which does"),
        ((77.5, 1), (0.25, 1), "takes 77.50 GiB and may not fit into 78.00 GiB: use triton_tp, which does"),
        ((90, 1), (90, 1), "does not fit into 78.00 GiB"),
        ((14, 1), (90, 1), "takes 14.00 GiB and fits into 78.00 GiB; no other predicted variant surely does"),
        ((14,), (0.25,), "and fits, triton_tp takes 0.250 GiB: their times on this GPU are not known well enough"),
        ((14, 118, 0.6), (0.25, 1), "their times on this GPU are not known well enough to compare"),
    ],
)  # fmt: skip
def test_the_first_sentence_on_the_gather(gather, kernel, said):
    predictions = [prediction("triton_tp", *kernel), prediction("pytorch_gather", *gather)]
    sentence = Answer(LossSize(), predictions, Target(78 + RESERVE_GIB, "NVIDIA H200")).first_sentence
    assert sentence.startswith("The gather takes") and said in sentence


OUT_OF_MEMORY = ("--tp", "4", "--vocab", "128k")


def test_a_cell_that_ran_out_of_memory_does_not_fit(predict):
    reason = "a measured cell that needs 120.0 GiB ran out of memory within 139.8 GiB"
    said = predict(*OUT_OF_MEMORY, "--tokens", "64k")
    first, lines = said.splitlines()[0], {line.split()[0]: line for line in said.splitlines()[1:] if line}
    assert first.startswith("No time is known of torch_loss_parallel, fast_llm, megatron, liger")
    advice = first.partition(". ")[2]
    assert advice == "The gather takes 116.0 GiB and does not fit into 137.8 GiB: use triton_tp, which does."
    assert lines["pytorch_gather"].endswith(" OOM") and lines["triton_tp"].endswith(" fits") and reason in said
    for arguments in (["--tokens", "72k"], ["--tokens", "64k", "--gpu-memory", "141"]):
        found = by_variant(predict(*OUT_OF_MEMORY, *arguments, "--format", "json"))
        assert found["pytorch_gather"]["memory"] == "OOM" and reason in found["pytorch_gather"]["notes"]
        assert found["triton_tp"]["memory"] == "fits" and "memory" not in found["triton_tp"]["notes"]
    # The cell that ran out of memory tells nothing of a larger GPU, or of a smaller problem.
    for arguments in (["--tokens", "64k", "--gpu-memory", "180"], ["--tokens", "32k"]):
        found = by_variant(predict(*OUT_OF_MEMORY, *arguments, "--format", "json"))
        assert found["pytorch_gather"]["memory"] == "fits"


def test_numbers_of_people():
    assert [whole_numbers(text) for text in ("4,8", "128k", "1M, 2")] == [[4, 8], [131072], [2**20, 2]]
    for text in ("131,072", "4x", "", "0", "-1", "1.5k", "k", "4,,8", "131,0720"):
        with pytest.raises(argparse.ArgumentTypeError, match="write 131072 or 128k, and 4,8 for several"):
            whole_numbers(text)


def test_several_problems_have_a_sentence_each_before_the_tables(predict):
    lines = predict("--tp", "4,8", "--vocab", "128k", "--tokens", "8k").splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == [
        f"cross_entropy, tokens=8192 vocab=131072 tp_size={tp}, bfloat16" for tp in (4, 8)
    ]
    assert all("do not gather." in line for line in lines[:2]) and lines[2] == ""
    assert sum(line.startswith("  variant ") for line in lines) == 2
    single = json.loads(predict("--tp", "4", "--vocab", "128k", "--format", "json"))
    several = json.loads(predict("--tp", "4,8", "--vocab", "128k", "--format", "json"))
    assert several[: len(single)] == single and {line["tp_size"] for line in several} == {"4", "8"}


def times(said):
    lines = [line.strip().split("  ") for line in said.splitlines() if line.strip().startswith(synthetic.VARIANTS)]
    return [[word.strip() for word in line[1:] if word.strip()][:2] for line in lines]


def test_another_gpu_without_its_bandwidth_has_no_times(predict):
    said = predict("--gpu-memory", "80")
    assert times(said) == [["-", "-"]] * 3
    assert "another GPU (NVIDIA H200) than yours, so times are withheld: --bandwidth GB_PER_S" in said
    for arguments in (["--gpu-memory", "141"], ["--gpu-memory", "80", "--gpu", "h200"]):
        assert all("ms" in line[1] for line in times(predict(*arguments)))
    assert "device_ms" not in by_variant(predict("--gpu-memory", "80", "--format", "json"))["triton_tp"]


def test_another_gpu_with_its_bandwidth_has_scaled_times(predict):
    def device_ms(*arguments):
        found = by_variant(predict("--tp", "1", "--vocab", "128k", "--format", "json", *arguments))
        return found["pytorch_tp_manual"]["device_ms"]

    measured, halved = device_ms(), device_ms("--gpu-memory", "80", "--bandwidth", str(synthetic.COPY / 2))
    assert halved == pytest.approx(2 * measured, rel=0.02) and halved < 2 * measured  # launches are not scaled
    assert device_ms("--bandwidth", str(synthetic.COPY)) == measured
    said = predict("--bandwidth", str(synthetic.COPY / 2))
    assert "another GPU (NVIDIA H200) than yours: the part of a time that its bandwidth limits" in said
    assert "is multiplied by 2.000" in said


def test_a_number_that_says_nothing_is_unknown(tmp_path, capsys):
    few = [
        synthetic.cell(variant, vocab, tp, factor=factor)
        for variant in synthetic.VARIANTS
        for (vocab, tp), factor in zip(synthetic.SIZES, (1, 9, 1, 9, 1, 9, 1), strict=True)
    ]
    assert main(["--rows", str(synthetic.write(few, tmp_path)), "--tokens", "64k"]) == 0
    said = capsys.readouterr().out
    errors = [int(error) for error in re.findall(r"(?:ms|GiB) \+-(\d+)%", said)]
    too_large = [int(error) for error in re.findall(r"unknown \(\+-(\d+)%\)", said)]
    assert errors and max(errors) <= 50 and too_large and min(too_large) >= 50
    assert [True, True] in [[time.startswith("unknown") for time in line[:2]] for line in times(said)]
    assert "only within more than 50%, so measure a cell of about that size" in said
