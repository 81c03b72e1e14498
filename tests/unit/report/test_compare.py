"""A comparison separates slower cells from noise, from other hardware and from failures."""

import csv
import io

import numpy as np
import pytest

from tests.support import synthetic
from tpbench.report.analysis.metrics import ratio
from tpbench.report.command import main
from tpbench.report.compare.changes import ALPHA, compare_cells, holm
from tpbench.report.compare.pairs import ACROSS, pair_cells
from tpbench.results.read import load
from tpbench.results.schema import common_columns


@pytest.fixture
def compare(tmp_path, capsys):
    """Compares two lists of rows: the exit code, and each cell's line by name."""

    def run(before, after, *arguments):
        for name, rows in (("before", before), ("after", after)):
            synthetic.write(rows, tmp_path / name, name)
        code = main(["compare", str(tmp_path / "before"), str(tmp_path / "after"), "--format", "csv", *arguments])
        printed = capsys.readouterr()
        lines = {line["cell"].removesuffix(" tp=4"): line for line in csv.DictReader(io.StringIO(printed.out))}
        return code, lines, printed.err

    return run


def some(**changes):
    return [
        synthetic.cell(variant, vocab, 4, **changes)
        for variant in ("triton_tp", "pytorch_gather")
        for vocab in (32768, 65536, 131072)
    ]


def test_the_same_code_twice(compare):
    code, lines, _ = compare(some(), some(run="again"))
    assert code == 0 and {line["verdict"] for line in lines.values()} == {"same"} and len(lines) == 6


@pytest.mark.parametrize(("version", "verdict"), [("this", "same"), ("another", "fails now")])
def test_a_failure_hides_a_measurement_of_other_versions_only(compare, version, verdict):
    later = synthetic.cell("triton_tp", 32768, 4, run="later", status="timeout", kernels_version=version)
    code, lines, _ = compare(some(), [*some(run="again", kernels_version="this"), later])
    assert lines["triton_tp vocab=32768"]["verdict"] == verdict and code == (verdict != "same")


def test_slower_and_faster(compare):
    after = some(run="again")
    after[0] = synthetic.cell("triton_tp", 32768, 4, factor=2.5, run="again")
    after[5] = synthetic.cell("pytorch_gather", 131072, 4, factor=0.8, run="again")
    code, lines, _ = compare(some(), after, "--metric", "device_ms")
    assert code == 1
    slow = lines["triton_tp vocab=32768"]
    assert slow["verdict"] == "slower" and float(slow["low"]) < 2.5 < float(slow["high"]) * 1.01
    assert float(slow["ratio"]) == pytest.approx(2.5, rel=0.02)
    assert lines["pytorch_gather vocab=131072"]["verdict"] == "faster"
    assert sum(line["verdict"] == "same" for line in lines.values()) == 4


def test_the_threshold(compare):
    after = some(factor=1.1, run="again")
    assert compare(some(), after, "--metric", "device_ms", "--threshold", "0.2")[0] == 0
    assert compare([], [], "--metric", "device_ms")[0] == 1


@pytest.mark.parametrize(
    "change, said",
    [
        ({"gpu_name": "NVIDIA H100"}, "gpu_name NVIDIA H200 and NVIDIA H100"),
        ({"driver_version": "590.2"}, "driver_version 580.1 and 590.2"),
        ({"torch_version": "2.13.0"}, "torch_version 2.11.0 and 2.13.0"),
        ({"triton_version": "3.9.0"}, "triton_version 3.6.0 and 3.9.0"),
        ({"warmed_up": False}, "warmed_up true and false"),
        ({"beside": "another-sweep"}, "other jobs ran beside it after"),
    ],
)
def test_differing_machines_are_not_compared_silently(compare, change, said):
    code, lines, told = compare(some(), some(factor=3, **change))
    assert code == 2 and "6 of 6 cells could not be compared" in told
    assert all(line["verdict"] == "not comparable" and line["note"] == said for line in lines.values())
    code, lines, _ = compare([], [], "--across", next(iter(change)))
    if "warmed_up" not in change:
        assert code == 1 and {line["verdict"] for line in lines.values()} == {"slower"}
        assert said in lines["triton_tp vocab=32768"]["note"]


def test_pairs_prefer_the_same_hardware(tmp_path):
    before = some() + some(gpu_name="NVIDIA H100", factor=9)
    synthetic.write(before, tmp_path / "before")
    synthetic.write(some(run="again"), tmp_path / "after")
    pairs = pair_cells(load(tmp_path / "before"), load(tmp_path / "after"))
    assert [each.before["gpu_name"] for each in pairs if each.after] == ["NVIDIA H200"] * 6
    assert [each.before["gpu_name"] for each in pairs if not each.after] == ["NVIDIA H100"] * 6


def test_cells_come_go_break_and_heal(compare):
    oom = {"status": "oom", "reason": "asked for 4 GiB"}
    before = [synthetic.cell("triton_tp", 32768, 4), synthetic.cell("triton_tp", 65536, 4, **oom),
              synthetic.cell("pytorch_gather", 32768, 4)]  # fmt: skip
    after = [synthetic.cell("triton_tp", 32768, 4, **oom), synthetic.cell("triton_tp", 65536, 4),
             synthetic.cell("pytorch_tp_manual", 32768, 4)]  # fmt: skip
    code, lines, _ = compare(before, after)
    assert code == 1
    verdicts = {name: line["verdict"] for name, line in lines.items()}
    assert verdicts == {
        "triton_tp vocab=32768": "fails now", "triton_tp vocab=65536": "works now",
        "pytorch_gather vocab=32768": "only before", "pytorch_tp_manual vocab=32768": "only after",
    }  # fmt: skip
    assert "asked for 4 GiB" in lines["triton_tp vocab=32768"]["note"]


def test_few_samples_cannot_tell(compare):
    few = {"samples_ms": [1.0, 1.1, 0.9], "time_ms": 1.0}
    many = {"samples_ms": [2.0, 2.1, 1.9], "time_ms": 2.0}
    code, lines, _ = compare(
        [synthetic.cell("triton_tp", 32768, 4, **few)], [synthetic.cell("triton_tp", 32768, 4, **many)]
    )
    (line,) = lines.values()
    assert (code, line["verdict"], line["note"]) == (2, "not comparable", "too few samples to tell")
    assert float(line["ratio"]) == 2.0 and line["low"] == ""


def test_wrong_cells_are_never_called_fast(compare):
    code, lines, _ = compare(some(), some(status="wrong", reason="grad_error 3"))
    assert code == 1 and {line["verdict"] for line in lines.values()} == {"fails now"}


def test_noise_alone_is_rarely_an_alarm(tmp_path):
    """Over a hundred cells of equal speed: the correction keeps the false alarms of a whole table under 5%."""
    alarms = 0
    random = np.random.default_rng(1)
    for round_ in range(8):
        frames = []
        for side in ("before", "after"):
            rows = [synthetic.cell("triton_tp", 1000 + vocab, 4) for vocab in range(12)]
            for row in rows:
                row["samples_ms"] = list(1 + 0.05 * random.standard_normal(30))
            frames.append(load(synthetic.write(rows, tmp_path / f"{side}{round_}", side)))
        changes = compare_cells(pair_cells(*frames), "time_ms", 0.0).changes
        alarms += any(change.verdict in ("slower", "faster") for change in changes)
    assert alarms <= 2


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == [] and holm([0.9, 0.8]) == [1.0, 1.0] and ALPHA == 0.05


def test_intervals_hold_the_truth_as_often_as_they_say():
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        found = ratio(2 * random.lognormal(0, 0.1, 41), random.lognormal(0, 0.1, 60))
        inside += found.low <= 2 <= found.high
    assert 0.91 <= inside / 400 <= 0.99


@pytest.mark.parametrize("form", ["text", "markdown", "html"])
def test_formats(tmp_path, capsys, form):
    for name, factor in (("before", 1), ("after", 3)):
        synthetic.write(some(factor=factor, run=name), tmp_path / name, name)
    code = main(["compare", str(tmp_path / "before"), str(tmp_path / "after"), "--format", form])
    printed = capsys.readouterr().out
    assert code == 1 and "slower" in printed and "t test" in printed and "Holm" in printed
    if form == "html":
        assert "Content-Security-Policy" in printed


def test_bad_arguments(tmp_path, capsys):
    synthetic.write(some(), tmp_path)
    assert main(["compare", str(tmp_path), str(tmp_path), "--across", "driver"]) == 2
    assert "did you mean driver_version?" in capsys.readouterr().err
    assert main(["compare", str(tmp_path), "nowhere"]) == 2
    with pytest.raises(SystemExit):
        main(["compare", str(tmp_path), str(tmp_path), "--threshold", "3"])


def test_the_columns_that_must_agree_exist():
    assert set(ACROSS) <= set(common_columns())
