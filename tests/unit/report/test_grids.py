"""Keys of grids: which of them vary, follow from others, or tell rows of one cell apart."""

import datetime

import pytest

from tpbench.report.analysis.grid import GridRow, RecordGrid, _newest, heading

NOON = datetime.datetime(2026, 11, 20, 12, tzinfo=datetime.UTC)


def grid(names, keys, records=None, **options):
    rows = tuple(GridRow(key, ((records or {}).get(key),)) for key in keys)
    return RecordGrid("w", {}, tuple(names), ("v",), rows, **options)


def test_keys_that_vary_or_all_if_none_does():
    found = grid(("a", "b", "c"), [(1, 2, 3), (1, 5, 4)], derived=frozenset({"c"}))
    assert found.independent == (0, 1) and found.varying == (1,)
    assert grid(("a", "b"), [(1, 2)]).varying == (0, 1)
    assert found.problem_text((1, 5, 4)) == "a=1 b=5" and found.problem_text((1, 5, 4), [2]) == "c=4"


@pytest.mark.parametrize(
    ("keys", "at", "other", "determined"),
    [
        ([("x", 1), ("y", 2)], 1, 0, True),  # a name has one number
        ([("x", 1), ("y", 1)], 1, 0, True),
        ([("x", 1), ("x", 2)], 1, 0, False),
        ([(1, 10), (2, 20)], 1, 0, True),  # two numbers that imply each other
        ([(1, 10), (2, 10)], 1, 0, False),  # by chance
        ([(1, 10), (2, 10)], 0, 1, False),
    ],
)
def test_a_key_is_determined_by_a_name_or_by_its_equivalent(keys, at, other, determined):
    assert grid(("a", "b"), keys).is_determined_by(at, other) == determined


def test_names_tell_rows_apart_before_numbers():
    found = grid(("layers", "model", "tokens"), [(2, "small", 1), (4, "large", 1), (4, "large", 2)])
    assert found.has_text_values(1) and not found.has_text_values(0)
    assert found.distinguishing_keys((0, 1, 2)) == (1, 2)
    assert found.distinguishing_keys((0, 2)) == (0, 2)


def record(hour, status="ok", **fields):
    return {"status": status, "interpreted": False, "warmed_up": True, "finished_at": NOON.replace(hour=hour), **fields}


def test_the_newest_measurement_of_a_column():
    early, late, failed = record(1), record(2), record(3, "oom")
    assert _newest([early, None, late, failed]) is late
    assert _newest([failed, record(2, "oom")]) is failed
    assert _newest([record(1), record(9, interpreted=True)])["finished_at"].hour == 1
    undated = record(1) | {"finished_at": None}
    assert _newest([undated, failed]) is undated and _newest([early, undated]) is early
    assert _newest([None]) is None


def test_rows_of_one_problem_are_one_row_without_tie_breaking_keys():
    keys = [(1, "fast"), (1, "slow"), (2, "fast")]
    records = {keys[0]: record(1), keys[1]: record(2), keys[2]: record(3)}
    found = grid(("a", "job budget"), keys, records, tie_breaking_keys=frozenset({"job budget"})).problems
    assert found.key_names == ("a",) and found.tie_breaking_keys == frozenset()
    assert [(row.key, row.records) for row in found.rows] == [((1,), (records[keys[1]],)), ((2,), (records[keys[2]],))]
    plain = grid(("a",), [(1,)])
    assert plain.problems is plain


def test_a_heading_names_numbers_only():
    facts = {"workload": "w", "device": "cuda", "hardware": "GPU", "loss": "l", "dtype": "d", "tokens": "64"}
    assert heading(facts) == "w, cuda, GPU, l, d, tokens=64"
