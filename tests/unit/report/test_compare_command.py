"""`report.py compare` answers what was asked, or says why it cannot, with an exit code that CI can trust."""

import csv
import io

import pytest

from tests.support import synthetic
from tpbench.report.command import main

VOCABS = (32768, 65536)


@pytest.fixture
def outputs(tmp_path):
    """Two sweeps in one folder of rows, as a user has them."""
    for sweep in ("20261120-100000-aaaaaa", "20261121-100000-bbbbbb"):
        rows = [synthetic.cell("triton_tp", vocab, 4, run=sweep, sweep_id=sweep) for vocab in VOCABS]
        synthetic.write(rows, tmp_path / "outputs/rows", sweep)
        (tmp_path / "outputs/sweeps" / sweep).mkdir(parents=True)
    return tmp_path / "outputs"


@pytest.fixture
def compare(tmp_path, capsys):
    """Compares two lists of rows: the exit code, each cell's line by vocabulary, and the messages."""

    def run(before, after, *arguments):
        for name, rows in (("before", before), ("after", after)):
            synthetic.write(rows, tmp_path / name, name)
        code = main(["compare", str(tmp_path / "before"), str(tmp_path / "after"), "--format", "csv", *arguments])
        printed = capsys.readouterr()
        return code, list(csv.DictReader(io.StringIO(printed.out))), printed.err

    return run


def cells(**changes):
    return [synthetic.cell("triton_tp", vocab, 4, **changes) for vocab in VOCABS]


def test_cells_that_all_vanish_are_no_pass(compare):
    code, lines, said = compare(cells(), [synthetic.cell("triton_tp", 1000, 4), synthetic.cell("quack", 32768, 4)])
    assert (code, lines) == (2, [])
    sides = "Before: 2 cells, such as triton_tp vocab=32768 tp=4, triton_tp vocab=65536 tp=4. After: 2 cells, such as"
    assert f"nothing can be compared, because no cell is on both sides. {sides} triton_tp vocab=1000" in said


@pytest.mark.parametrize(
    "before, after",
    [
        ({"status": "oom"}, {"status": "oom"}),
        ({"status": "skipped"}, {"status": "skipped"}),
        ({}, {"gpu_name": "NVIDIA H100"}),
        ({}, {"status": "skipped"}),
    ],
)
def test_cells_that_were_not_measured_twice_are_no_pass(compare, before, after):
    """The cell that is on one side only does not make it a pass either."""
    code, lines, said = compare([*cells(**before), synthetic.cell("quack", 32768, 4)], cells(**after))
    assert code == 2 and "only before" in {line["verdict"] for line in lines}
    assert "nothing was compared, so this is no pass" in said


@pytest.mark.parametrize("arguments, passes", [((), False), (("--allow-missing",), True)])
def test_a_cell_that_vanishes_is_no_pass_unless_that_is_allowed(compare, arguments, passes):
    code, lines, said = compare([*cells(), synthetic.cell("quack", 32768, 4)], cells(), *arguments)
    assert code == (not passes) and {line["verdict"] for line in lines} == {"same", "only before"}
    complaint = "1 cell measured before and missing after, so this is no pass: quack vocab=32768"
    assert (complaint in said) == (not passes)


@pytest.mark.parametrize("changes", [{"status": "oom"}, {"status": "skipped"}, {"gpu_name": "NVIDIA H100"}])
def test_a_cell_may_vanish_that_did_not_work_or_ran_on_another_machine(compare, changes):
    code, lines, said = compare([*cells(), synthetic.cell("quack", 32768, 4, **changes)], cells())
    assert code == 0 and "only before" in {line["verdict"] for line in lines} and "missing" not in said


def test_a_sweep_may_have_fewer_cells_than_the_folder_that_it_is_in(outputs, capsys):
    synthetic.write([synthetic.cell("quack", 32768, 4, run="more", sweep_id="more")], outputs / "rows", "more")
    assert main(["compare", str(outputs), "bbbbbb", "--rows", str(outputs)]) == 0
    assert "missing" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "before", ["20261120-100000-aaaaaa", "20261120", "aaaaaa", "{outputs}/sweeps/20261120-100000-aaaaaa"]
)
def test_sweeps_by_their_ids(outputs, capsys, before):
    arguments = ["compare", before.format(outputs=outputs), "bbbbbb", "--rows", str(outputs)]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("2 cells compared in time_ms: 2 same\n")


def test_a_folder_and_one_of_its_sweeps(outputs, capsys):
    assert main(["compare", str(outputs), "bbbbbb", "--rows", str(outputs)]) == 0
    printed = capsys.readouterr()
    assert "2 same" in printed.out and "2 rows of both sides count for bbbbbb only" in printed.err
    assert main(["compare", str(outputs), str(outputs)]) == 2
    said = capsys.readouterr().err
    assert "are the same 4 rows" in said and "20261121-100000-bbbbbb (2 rows), 20261120-100000-aaaaaa (2 rows)" in said


@pytest.mark.parametrize(
    "side, said",
    [
        ("cccccc", "no such folder, file or sweep: cccccc. Newest sweeps in"),
        ("2026", "2 sweeps of {outputs} match 2026. Newest sweeps in"),
        ("{outputs}/rows,aaaaaa", "name sweeps or folders on one side, not both"),
    ],
)
def test_sweeps_that_do_not_exist(outputs, capsys, side, said):
    assert main(["compare", side.format(outputs=outputs), "bbbbbb", "--rows", str(outputs)]) == 2
    assert said.format(outputs=outputs) in capsys.readouterr().err


def test_several_sweeps_are_repeated_rows(outputs, capsys):
    for sweep in ("20261122-100000-cccccc", "20261123-100000-dddddd"):
        rows = [synthetic.cell("triton_tp", vocab, 4, run=sweep, sweep_id=sweep) for vocab in VOCABS]
        synthetic.write(rows, outputs / "rows", sweep)
    assert main(["compare", "aaaaaa,cccccc", "bbbbbb,dddddd", "--rows", str(outputs), "--format", "csv"]) == 0
    assert {
        (line["rows before"], line["rows after"]) for line in csv.DictReader(io.StringIO(capsys.readouterr().out))
    } == {("2", "2")}


@pytest.mark.parametrize(
    "metric, factor, verdict, code",
    [
        ("peak_gib", 1.5, "worse", 1),
        ("peak_gib", 0.5, "better", 0),
        ("gb_per_s", 0.5, "worse", 1),
        ("gb_per_s", 1.5, "better", 0),
        ("flops", 2, "higher", 0),
        ("time_p95_ms", 3, "slower", 1),
    ],
)
def test_any_metric(compare, metric, factor, verdict, code):
    before = [row | {metric: row.get(metric) or 100} for row in cells()]
    after = [row | {metric: factor * row[metric]} for row in before]
    found, lines, _ = compare(before, after, "--metric", metric)
    assert found == code and {line["verdict"] for line in lines} == {verdict}
    assert float(lines[0]["ratio"]) == pytest.approx(factor) and lines[0][f"before {metric}"]


def test_memory_below_a_mebibyte_does_not_count(compare):
    small = [row | {"peak_gib": 5e-5} for row in cells()]
    code, lines, _ = compare(small, [row | {"peak_gib": 15e-5} for row in cells(run="again")], "--metric", "peak_gib")
    assert code == 0 and {line["verdict"] for line in lines} == {"same"}


def test_a_metric_that_no_row_has(compare, tmp_path, capsys):
    code, lines, said = compare(cells(), cells(run="again"), "--metric", "mfu")
    assert (code, lines) == (2, []) and f"no row of {tmp_path}/before has mfu (model FLOPs utilisation" in said
    assert "they have: time_ms," in said
    assert main([str(tmp_path / "before"), "--metric", "mfu"]) == 2
    printed = capsys.readouterr()
    assert not printed.out and "no row has mfu" in printed.err


def test_a_metric_that_one_row_lacks(compare):
    after = cells(run="again")
    after[0]["peak_gib"] = None
    code, lines, said = compare(cells(), after, "--metric", "peak_gib")
    assert code == 0 and {line["note"] for line in lines} == {"no peak_gib above 0 after", ""}
    assert "1 of 2 cells could not be compared; 1 of them: no peak_gib above 0 after" in said


@pytest.mark.parametrize(
    "before, after, said",
    [
        ({"bound": "host"}, {"bound": "host"}, "bound by the host before and after"),
        ({"throttle_reasons": "none"}, {"throttle_reasons": "power thermal"}, "throttled after"),
        ({"warm": False}, {"warm": True}, "cold processes before, warm processes after"),
        ({"jobs_before": 3}, {"jobs_before": 0}, "warm processes before, cold processes after"),
        ({"host": "one"}, {"host": "two"}, "host one and two"),
        ({"git_commit": "a" * 40}, {"git_commit": "b" * 40}, f"git_commit {'a' * 12} and {'b' * 12}"),
        ({"git_dirty": False}, {"git_dirty": True}, "git_dirty false and true"),
        ({"sm_clock_mhz": 1980.0}, {"sm_clock_mhz": 1500.0}, "clock of the GPU -24%"),
        ({"gpu_count": 4}, {"gpu_count": 8}, "gpu_count 4 and 8"),
    ],
)
def test_other_conditions_are_pointed_out(compare, tmp_path, capsys, before, after, said):
    code, lines, _ = compare(cells(**before), cells(run="again", **after))
    assert code == 0 and [line["note"] for line in lines] == [said] * 2
    main(["compare", str(tmp_path / "before"), str(tmp_path / "after")])
    shown = capsys.readouterr().out
    assert shown.count(said) == 1 and f"All compared cells: {said}." in shown


def test_the_answer_comes_first_and_the_false_alarm_rate_is_stated(tmp_path, capsys):
    for name, factor in (("before", 1), ("after", 3)):
        synthetic.write(cells(factor=factor, run=name), tmp_path / name, name)
    assert main(["compare", str(tmp_path / "before"), str(tmp_path / "after")]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("2 cells compared in time_ms: 2 slower\n")
    assert "Of comparisons where nothing changed, at most 5% have a false alarm" in shown
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    assert "at most 5% have a false alarm" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "arguments, said",
    [
        (
            ["outputs", "--metrc", "x"],
            "report.py: no option is called --metrc, did you mean --metric? (report.py --hel",
        ),
        (["outputs", "--tp", "4"], "report.py: no option is called --tp: --only tp_size=VALUE selects rows (report.py"),
        (
            ["compare", "a", "b", "--treshold=1"],
            "report.py compare: no option is called --treshold=1, did you mean --t",
        ),
    ],
)
def test_an_unknown_option_is_answered_in_one_line(capsys, arguments, said):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    printed = capsys.readouterr().err
    assert end.value.code == 2 and printed.startswith(said) and printed.count("\n") == 1


@pytest.mark.parametrize("command", ["", "compare", "history"])
@pytest.mark.parametrize(
    ("program", "name"), [("/usr/bin/tpbench-report", "tpbench-report"), ("scripts/report.py", "report.py")]
)
def test_help_names_the_command_as_the_user_did(capsys, monkeypatch, program, name, command):
    monkeypatch.setattr("sys.argv", [program])
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    assert f"usage: {name} {command}".rstrip() + " [" in " ".join(capsys.readouterr().out.split())


def test_a_misspelled_command_is_told_apart_from_a_folder(capsys):
    assert main(["comapre", "before", "after"]) == 2
    assert capsys.readouterr().err == "report: no folder and no command is called comapre, did you mean compare?\n"
