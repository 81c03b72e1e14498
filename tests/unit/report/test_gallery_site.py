"""`report.py gallery`: names, counts and choices of the site, each on a few made-up problems."""

import datetime
from types import SimpleNamespace

import pandas as pd
import pytest

from tpbench.report.gallery.admission import Refusal
from tpbench.report.gallery.entry import Entry
from tpbench.report.gallery.site import _cell, _part, _table, write_site
from tpbench.report.gallery.winners import Machine, Problem, _name, headlines
from tpbench.report.numbers.clocks import DEVICE, WALL
from tpbench.report.numbers.metric import counted
from tpbench.report.numbers.ratio import Ratio
from tpbench.report.page.cells import MISSING_CELL, PageCell
from tpbench.settings import JobError


def entry(title="Host A", rows=(), refused=(), **fields):
    frame = pd.DataFrame(list(rows), columns=["finished_at", "gpu_name"])
    return Entry(title, **{"by": "a person", "link": "", "note": ""} | fields, frame=frame, refused=refused, faults=())


def verdict(column="fast", time_ms=1.5, runner_up=None, ratio=None, clock=DEVICE):
    return SimpleNamespace(
        fastest=SimpleNamespace(column=column) if column else None,
        runner_up=SimpleNamespace(column=runner_up) if runner_up else None,
        ratio=Ratio(ratio, ratio, ratio) if ratio else None,
        time_ms=time_ms,
        clock=clock,
    )


def problem(*by_machine, workload="entropy_loss", tp_size="2", dp_size="1", **key):
    fields = {"tokens": "4096", "tp_size": tp_size, "dp_size": dp_size} | key
    return Problem(workload, tuple(fields.items()), dict(enumerate(by_machine)))


@pytest.mark.parametrize(
    ("title", "hardware", "name"),
    [
        ("Host A", "NVIDIA H200", "Host A (NVIDIA H200)"),
        ("Our H200 host", "NVIDIA H200", "Our H200 host"),
        ("NVIDIA host", "NVIDIA H200", "NVIDIA host (NVIDIA H200)"),  # a maker is no model
        ("9654 host", "AMD EPYC 9654 96-Core", "9654 host"),
        ("A cpu", "cpu", "A cpu"),
        ("Host A", "cpu", "Host A (cpu)"),
    ],
)
def test_a_machine_is_named_by_its_title_and_its_model(title, hardware, name):
    assert Machine(entry(title), hardware).name == name


@pytest.mark.parametrize(
    ("title", "page"),
    [("Host A", "host-a.html"), ("  9 H200s, new! ", "9-h200s-new.html"), ("***", "entry.html")],
)
def test_a_page_is_named_by_its_title(title, page):
    assert entry(title).page == page


def test_ranks_are_the_product_of_the_sizes():
    assert problem(tp_size="2", dp_size="3").ranks == 6


def test_of_a_workload_and_number_of_ranks_the_most_widely_measured_problem_is_shown():
    two_machines = problem(verdict(), verdict())
    others = [problem(verdict(time_ms=9.0, runner_up="slow")), problem(verdict())]
    assert headlines([others[0], two_machines, others[1]]) == [two_machines]


def test_of_equally_widely_measured_problems_the_slowest_compared_one_is_shown():
    compared, slower = problem(verdict(runner_up="slow")), problem(verdict(time_ms=2.0, runner_up="slow"))
    alone = problem(verdict(time_ms=9.0))
    for order in ([alone, compared, slower], [slower, compared, alone]):
        (shown,) = headlines(order)
        assert shown is slower


def test_the_slowest_time_of_a_problem_is_that_of_its_slowest_machine():
    assert problem(verdict(time_ms=1.0), verdict(time_ms=3.0), verdict(time_ms=2.0)).slowest_ms == 3.0


def test_headlines_keep_their_order_and_those_of_several_machines():
    problems = [problem(*[verdict()] * (2 if ranks == 9 else 1), tp_size=str(ranks)) for ranks in range(1, 10)]
    assert [each.ranks for each in headlines(problems, most=3)] == [1, 2, 9]
    many = [problem(verdict(), tp_size=str(ranks)) for ranks in range(1, 30)]
    assert [each.ranks for each in headlines(many)] == list(range(1, 25))


def test_problems_are_named_by_the_fields_that_tell_them_apart():
    """The sizes are always named. Other workloads do not count."""
    problems = [problem(loss="a", dtype="x"), problem(loss="b", dtype="x"), problem(workload="tp_block", loss="a")]
    _name(problems)
    assert [each.name for each in problems] == [
        "tokens=4096 tp=2 loss=a",
        "tokens=4096 tp=2 loss=b",
        "tokens=4096 tp=2",
    ]


@pytest.mark.parametrize(
    ("found", "text", "detail"),
    [
        (verdict(), "fast 1.500 ms", ""),
        (verdict(runner_up="slow", ratio=2.0), "fast 1.500 ms", "2.00x slow"),
        (verdict(runner_up="slow"), "fast 1.500 ms", ""),
        (verdict(ratio=2.0), "fast 1.500 ms", ""),
        (verdict(clock=WALL), "fast 1.500 ms wall", ""),
    ],
)
def test_a_cell_names_the_fastest_variant_and_its_distance(found, text, detail):
    assert _cell(found) == PageCell(text, 1.5, "first", detail=detail)


def test_a_machine_without_a_correct_variant_has_an_empty_cell():
    assert _cell(None) == _cell(verdict(column="")) == MISSING_CELL


def test_a_table_has_a_column_for_each_machine():
    machines = [Machine(entry(name), "cpu") for name in "AB"]
    only_second = Problem("tp_block", (), {1: verdict()}, "tokens=1")
    table = _table("fastest", machines, [only_second], with_workload=True)
    assert list(table.columns) == ["workload", "problem", "A (cpu)", "B (cpu)"]
    assert [cell.text for cell in table.rows[0]] == ["tp_block", "tokens=1", "-", "fast 1.500 ms"]
    table = _table("problems", machines, [only_second])
    assert list(table.columns) == ["problem", "A (cpu)", "B (cpu)"]
    assert [cell.text for cell in table.rows[0]] == ["tokens=1", "-", "fast 1.500 ms"]


def test_an_entry_counts_its_rows_and_names_its_days_and_hardware():
    days = [datetime.datetime(2026, 11, day, 23, tzinfo=datetime.UTC) for day in (21, 20, 22)]
    part = _part(entry(rows=[(days[0], "B200"), (days[1], None), (days[2], "A100"), (None, "B200")]))
    assert part.rows == "4 rows, measured 2026-11-20 to 2026-11-22, A100, B200"
    assert _part(entry(rows=[(None, None)])).rows == "1 row"
    refused = _part(entry(refused=(Refusal("r1", "slow", "no time"),))).refused
    assert [cell.text for cell in refused.rows[0]] == ["r1", "slow", "no time"]


@pytest.mark.parametrize(("count", "text"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows")])
def test_counts_have_a_plural(count, text):
    assert counted(count, "row") == text


def test_no_entry_takes_the_name_of_the_first_page(tmp_path):
    with pytest.raises(JobError, match="no entry can have the title index"):
        write_site([entry("Index")], tmp_path / "site")
    with pytest.raises(JobError, match="two entries have the title Host A!"):
        write_site([entry("Host A!"), entry("Other"), entry("Host  a")], tmp_path / "site")
    assert not (tmp_path / "site").exists()
