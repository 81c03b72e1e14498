"""`tpbench predict` answers in its first sentence, for the GPU in question, and says what it does not know."""

import json
import re

import pytest

from tests.support import synthetic
from tests.support.commands import predict as main
from tpbench.predict import target
from tpbench.predict.answer import Answer
from tpbench.predict.model import Estimate, Prediction, VariantModel
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


def prediction(label, gib, device_ms=None, error=0.1):
    estimates = {"peak_gib": Estimate(gib, 0.01)} | ({"device_ms": Estimate(device_ms, error)} if device_ms else {})
    return Prediction(VariantModel(label, []), LossSize(), estimates)


FASTEST = "triton_tp takes 1.000 ms (device_ms) and 0.250 GiB, the fastest of {} that fit. The gather takes"


@pytest.mark.parametrize(
    "gather, kernel, said",
    [
        ((14, 118), (0.25, 1), f"{FASTEST.format(2)} 14.00 GiB and 118 times as long."),
        ((14, 0.5), (0.25, 1), "pytorch_gather takes 0.500 ms (device_ms) and 14.00 GiB, the fastest of 2 that fit."),
        ((14, 1.1), (0.25, 1), f"{FASTEST.format(2)} 14.00 GiB and 1.10 times as long, within the error."),
        ((90, 1), (0.25, 1), f"{FASTEST.format(1)} 90.00 GiB: OOM."),
        ((77.5, 1), (0.25, 1), f"{FASTEST.format(1)} 77.50 GiB: tight."),
        ((90, 1), (90, 1), "No variant surely fits into 78.00 GiB."),
        ((14,), (0.25,), "triton_tp takes 0.250 GiB, the least; no time is known well enough."),
        ((14, 118, 0.6), (0.25, 1), f"{FASTEST.format(2)} 14.00 GiB."),
    ],
)  # fmt: skip
def test_the_first_sentence(gather, kernel, said):
    predictions = [prediction("triton_tp", *kernel), prediction("pytorch_gather", *gather)]
    assert Answer(LossSize(), predictions, Target(78 + RESERVE_GIB, "NVIDIA H200")).first_sentence == said


def test_variants_without_a_known_time_are_named_first(predict):
    said = predict("--tp", "4", "--vocab", "128k", "--tokens", "8k")
    assert said.startswith("No time is known of torch_loss_parallel, fast_llm, megatron, megatron_fused, liger")
    assert ". triton_tp takes 0." in said.splitlines()[0]


def test_several_problems_have_a_sentence_each_before_the_tables(predict):
    lines = predict("--tp", "4,8", "--vocab", "128k", "--tokens", "8k").splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == [
        f"cross_entropy, tokens=8192 vocab=131072 tp_size={tp}, bfloat16" for tp in (4, 8)
    ]
    assert all("The gather takes" in line for line in lines[:2]) and lines[2] == ""
    assert sum(line.startswith("  variant ") for line in lines) == 2
    single = json.loads(predict("--tp", "4", "--vocab", "128k", "--format", "json"))
    several = json.loads(predict("--tp", "4,8", "--vocab", "128k", "--format", "json"))
    assert several[: len(single)] == single and {line["tp_size"] for line in several} == {"4", "8"}


def times(said):
    names = tuple(f"  {name}" for name in synthetic.VARIANTS)
    lines = [line.strip().split("  ") for line in said.splitlines() if line.startswith(names)]
    return [[word.strip() for word in line[1:] if word.strip()][:2] for line in lines]


def test_another_gpu_has_times_by_the_datasheets_of_both_or_none(predict, monkeypatch):
    measured = by_variant(predict("--tp", "1", "--vocab", "128k", "--format", "json"))
    other = by_variant(predict("--tp", "1", "--vocab", "128k", "--format", "json", "--gpu", "B200"))
    ratios = [other[name]["device_ms"] / measured[name]["device_ms"] for name in synthetic.VARIANTS]
    assert all(4800 / 8000 < ratio < 0.65 for ratio in ratios)  # launches are not scaled
    said = predict("--gpu", "B200")
    assert "another GPU (NVIDIA H200) than B200" in said and "memory: 178.4 GiB of a GPU" in said
    monkeypatch.setattr(target, "this_gpu", lambda: ("NVIDIA L40", 44.0, True))
    said = predict()
    assert times(said) == [["-", "-"]] * 3 and "than NVIDIA L40, whose bandwidth is unknown" in said
    assert all("ms" in line[1] for line in times(predict("--gpu", "h200", "--gpu-memory", "80")))


def test_ranks_that_cannot_share_memory_have_no_such_exchange(predict, monkeypatch):
    monkeypatch.setattr(target, "this_gpu", lambda: ("NVIDIA H200", 139.8, False))
    assert "triton_tp" not in by_variant(predict("--tp", "4", "--format", "json"))


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
