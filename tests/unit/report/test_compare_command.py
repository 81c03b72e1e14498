"""`tpbench compare` separates slower cells from noise, other hardware and failures, with an exit code for CI."""

import csv
import io
import shutil

import numpy as np
import pytest

from tests.support import synthetic
from tests.support.commands import report as main
from tpbench.report.analysis.pairs import pair_cells
from tpbench.results.read import load

VOCABS = (32768, 65536)
OOM = {"status": "oom", "reason": "asked for 4 GiB"}


@pytest.fixture
def compare(tmp_path, capsys):
    """Compares two lists of rows, or those of the last time: the exit code, each cell's line, and the messages."""

    def run(before, after, *arguments):
        for name, rows in (("before", before), ("after", after)):
            if rows:
                shutil.rmtree(tmp_path / name, ignore_errors=True)
                synthetic.write(rows, tmp_path / name, name)
        code = main(["compare", str(tmp_path / "before"), str(tmp_path / "after"), "--format", "csv", *arguments])
        printed = capsys.readouterr()
        lines = {line["cell"].removesuffix(" tp=4"): line for line in csv.DictReader(io.StringIO(printed.out))}
        return code, lines, printed.err

    return run


def cells(**changes):
    return [synthetic.cell("triton_tp", vocab, 4, **{"bound": "memory", **changes}) for vocab in VOCABS]


def verdicts(lines):
    return {line["verdict"] for line in lines.values()}


def test_slower_faster_and_same(compare):
    before = [*cells(), synthetic.cell("quack", 32768, 4)]
    after = [synthetic.cell("triton_tp", 32768, 4, factor=2.5), synthetic.cell("triton_tp", 65536, 4, factor=0.8)]
    code, lines, _ = compare(before, [*after, synthetic.cell("quack", 32768, 4, run="again")], "--metric", "device_ms")
    slow = lines["triton_tp vocab=32768"]
    assert code == 1 and slow["verdict"] == "slower" and float(slow["low"]) < 2.5 < float(slow["high"]) * 1.01
    assert float(slow["ratio"]) == pytest.approx(2.5, rel=0.02)
    assert lines["triton_tp vocab=65536"]["verdict"] == "faster" and lines["quack vocab=32768"]["verdict"] == "same"
    assert next(iter(lines)) == "triton_tp vocab=32768"  # what fails comes first
    assert compare([], [], "--metric", "device_ms", "--threshold", "0.9")[0] == 1
    assert compare(cells(), cells(run="again"))[0] == 0


def run_of(name, factor=1.0, count=8, host="a"):
    """Return a sweep of several cells, which scatter by half a per cent, on a host that scatters by a thousandth."""
    random = np.random.default_rng(sum(map(ord, name)))
    run = 1 + 0.001 * random.standard_normal()
    shifts = factor * run * (1 + 0.005 * random.standard_normal(count))
    return [
        synthetic.cell("triton_tp", 32768 + 64 * at, 4, factor=shift, run=name, sweep_id=name, host=host)
        for at, shift in enumerate(shifts)
    ]


def test_a_slowdown_that_all_cells_have_in_common_is_found(compare):
    code, lines, _ = compare(run_of("a"), run_of("b", 1.025))
    together = lines.pop("all cells")
    assert code == 1 and together["verdict"] == "slower" and verdicts(lines) <= {"same", "unclear", "slower"}
    assert float(together["low"]) < 1.025 < float(together["high"]) < 1.05
    code, lines, _ = compare(run_of("a"), run_of("c"))
    assert code == 0 and lines["all cells"]["verdict"] == "same"
    code, lines, _ = compare(run_of("a"), [*run_of("b", 1.025), *run_of("d", 1.025, host="b")])
    assert lines["host b"]["verdict"] == "unclear"  # hosts differ as much
    assert lines["run b"]["verdict"] == "slower" == lines["host a"]["verdict"]


def test_a_comparison_that_could_not_have_seen_five_per_cent_is_no_pass(compare, tmp_path, capsys):
    """One's own operation takes 2.3 times as long on a noisy machine."""
    noisy = np.random.default_rng(3).lognormal(0, 0.5, 40)
    before = cells(device="cpu", samples_ms=noisy, time_ms=1.0, device_ms=None)
    after = cells(device="cpu", samples_ms=2.3 * noisy, time_ms=2.3, device_ms=None)
    code, lines, _ = compare(before, after)
    assert code == 3 and verdicts(lines) == {"unclear"} and all(float(line["sees"]) > 1 for line in lines.values())
    assert main(["compare", str(tmp_path / "before"), str(tmp_path / "after")]) == 3
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("This comparison could not have seen a change of 5% in 2 of 2 cells")
    assert compare([], [], "--threshold", "0.9")[0] == 3
    assert compare(cells(), cells(run="again"))[0] == 0


def test_rows_say_how_well_they_find_a_change(compare):
    code, lines, _ = compare(run_of("a"), run_of("b"), "--simulate", "5%")
    assert code == 0 and "all cells" in lines and all(float(line["found"]) > 0.9 for line in lines.values())
    _, small, _ = compare([], [], "--simulate", "0.01")
    assert all(float(line["found"]) < 0.3 for line in small.values())
    with pytest.raises(SystemExit):
        compare([], [], "--simulate", "5")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"torch_version": "2.13.0"}, "torch_version 2.11.0 and 2.13.0"),
        ({"warmed_up": False}, "warmed_up true and false"),
    ],
)
def test_differing_machines_are_not_compared_silently(compare, change, said):
    code, lines, told = compare(cells(), cells(factor=3, **change))
    assert code == 2 and "2 of 2 cells could not be compared" in told
    assert all(line["verdict"] == "not comparable" and line["note"] == said for line in lines.values())
    code, lines, _ = compare([], [], "--across", next(iter(change)))
    if "warmed_up" not in change:
        assert code == 1 and verdicts(lines) == {"slower"} and said in lines["triton_tp vocab=32768"]["note"]


def test_pairs_prefer_the_same_hardware(tmp_path):
    synthetic.write(cells() + cells(gpu_name="NVIDIA H100", factor=9), tmp_path / "before")
    synthetic.write(cells(run="again"), tmp_path / "after")
    pairs = pair_cells(load(tmp_path / "before"), load(tmp_path / "after"))
    assert [old[-1]["gpu_name"] for _, old, new in pairs if new] == ["NVIDIA H200"] * 2
    assert [old[-1]["gpu_name"] for _, old, new in pairs if not new] == ["NVIDIA H100"] * 2


def test_cells_that_all_vanish_are_no_pass(compare):
    code, lines, said = compare(cells(), [synthetic.cell("triton_tp", 1000, 4), synthetic.cell("quack", 32768, 4)])
    assert (code, lines) == (2, {})
    assert "no cell is on both sides: triton_tp vocab=32768 tp=4 is only before, triton_tp vocab=1000" in said


@pytest.mark.parametrize(
    "before, after",
    [(OOM, OOM), ({}, {"gpu_name": "NVIDIA H100"}), ({}, {"status": "skipped"})],
)
def test_cells_that_were_not_measured_twice_are_no_pass(compare, before, after):
    """The cell that is on one side only does not make it a pass either."""
    code, lines, said = compare([*cells(**before), synthetic.cell("quack", 32768, 4)], cells(**after))
    assert code == 2 and "only before" in verdicts(lines) and "nothing was compared, so this is no pass" in said


def test_a_cell_that_vanishes_is_no_pass_unless_that_is_allowed(compare):
    complaint = "1 cell measured before and missing after, so this is no pass: quack vocab=32768"
    code, lines, said = compare([*cells(), synthetic.cell("quack", 32768, 4)], cells())
    assert code == 1 and verdicts(lines) == {"same", "only before"} and complaint in said
    code, _, said = compare([], [], "--allow-missing")
    assert code == 0 and complaint not in said


@pytest.mark.parametrize("changes", [OOM, {"gpu_name": "NVIDIA H100"}])
def test_a_cell_may_vanish_that_did_not_work_or_ran_on_another_machine(compare, changes):
    code, lines, said = compare([*cells(), synthetic.cell("quack", 32768, 4, **changes)], cells())
    assert code == 0 and "only before" in verdicts(lines) and "missing" not in said


@pytest.mark.parametrize(
    "metric, factor, verdict, code",
    [("peak_gib", 0.5, "better", 0), ("gb_per_s", 0.5, "worse", 1), ("flops", 2, "higher", 0)],
)
def test_any_metric(compare, metric, factor, verdict, code):
    before = [row | {metric: row.get(metric) or 100} for row in cells()]
    found, lines, _ = compare(before, [row | {metric: factor * row[metric]} for row in before], "--metric", metric)
    line = lines["triton_tp vocab=32768"]
    assert found == code and verdicts(lines) == {verdict} and line[f"before {metric}"]
    assert float(line["ratio"]) == pytest.approx(factor)


def test_a_metric_that_rows_lack(compare, tmp_path, capsys):
    code, lines, said = compare(cells(), cells(run="again"), "--metric", "mfu")
    assert (code, lines) == (2, {}) and f"no row of {tmp_path}/before has mfu (" in said
    assert "they have: time_ms," in said
    after = cells(run="again")
    after[0]["peak_gib"] = None
    code, lines, said = compare(cells(), after, "--metric", "peak_gib")
    assert code == 0 and {line["note"] for line in lines.values()} == {"peak_gib is missing on a side", ""}
    assert "1 of 2 cells could not be compared; 1 of them: peak_gib is missing on a side" in said


def test_other_conditions_are_pointed_out_once(compare, tmp_path, capsys):
    said = "kernels_version a and b"
    code, lines, _ = compare(cells(kernels_version="a"), cells(run="again", kernels_version="b"))
    assert code == 0 and [line["note"] for line in lines.values()] == [said] * 2
    main(["compare", str(tmp_path / "before"), str(tmp_path / "after")])
    shown = capsys.readouterr().out
    assert shown.count(said) == 1 and f"All compared cells: {said}." in shown
