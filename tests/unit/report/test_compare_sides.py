"""Which rows a side of `tpbench compare` names."""

import pytest

from tests.support import synthetic
from tpbench.report.compare import read_sides
from tpbench.settings import JobError

SWEEPS = ("20261120-100000-aaaaaa", "20261121-100000-bbbbbb", "20261122-100000-cccccc", "20261123-100000-dddddd")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Sweeps of one to four rows: those of one sweep in a folder, all in `rows`."""
    folder = tmp_path_factory.mktemp("sides")
    for number, sweep in enumerate(SWEEPS, start=1):
        rows = [synthetic.cell("triton_tp", 1000 * (at + 1), 4, run=sweep, sweep_id=sweep) for at in range(number)]
        synthetic.write(rows, folder / sweep, sweep)
        synthetic.write(rows, folder / "rows", sweep)
    return folder


def sides(outputs, before, after):
    old, new, remark = read_sides(before.format(o=outputs), after.format(o=outputs), [str(outputs / "rows")])
    return [sorted({sweep[-1] for sweep in side["sweep_id"]}) for side in (old, new)], [len(old), len(new)], remark


@pytest.mark.parametrize(
    ("before", "after", "letters", "counts"),
    [
        ("aaaaaa", "bbbbbb,cccccc", [["a"], ["b", "c"]], [1, 5]),
        ("aaaaaa,", "20261123", [["a"], ["d"]], [1, 4]),
        (f"{{o}}/{SWEEPS[0]},{{o}}/{SWEEPS[2]}", f"{{o}}/{SWEEPS[1]}", [["a", "c"], ["b"]], [4, 2]),
        ("{o}/*-[ad]aa*", f"{{o}}/{SWEEPS[3]}/", [["a"], ["d"]], [1, 4]),
    ],
)
def test_commas_separate_sweeps_or_folders(outputs, before, after, letters, counts):
    assert sides(outputs, before, after) == (letters, counts, "")


def test_a_folder_may_have_a_comma_in_its_name_and_means_the_user_s_own_rows(outputs, tmp_path):
    folder = tmp_path / "one,two"
    synthetic.write([synthetic.cell("triton_tp", 7000, 4, sweep_id="x")], folder)
    synthetic.write([synthetic.cell("triton_tp", 8000, 4, sweep_id="y")], folder / "reference")
    assert sides(outputs, str(folder), "aaaaaa")[1] == [1, 1]


@pytest.mark.parametrize(
    ("before", "after", "counts", "smaller"),
    [
        ("{o}/rows", "bbbbbb", [8, 2], "bbbbbb"),
        ("bbbbbb", "{o}/rows", [2, 8], "bbbbbb"),
        ("aaaaaa,bbbbbb", "bbbbbb,cccccc", [3, 3], "aaaaaa,bbbbbb"),
    ],
)
def test_rows_of_both_sides_count_for_the_smaller_one(outputs, before, after, counts, smaller):
    _, found, remark = sides(outputs, before, after)
    assert found == counts
    assert remark.endswith(f"rows of both sides count for {smaller} only")


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("{o}/rows", "are the same 10 rows, so there is nothing to compare. Name two sweeps"),
        ("aaaaaa,{o}/rows", "no such folder or file: aaaaaa"),
        ("eeeeee", "no such folder, file or sweep: eeeeee. Newest sweeps in"),
        ("2026", "4 sweeps of {o}/rows match 2026."),
        (",", "no such folder or file: ,"),
    ],
)
def test_what_names_no_rows_is_explained(outputs, before, said):
    with pytest.raises((JobError, FileNotFoundError)) as raised:
        sides(outputs, before, "{o}/rows")
    assert said.format(o=outputs) in str(raised.value)
    if "Newest" in str(raised.value) or "Name two" in str(raised.value):  # the newest first, and three of them
        assert f"{SWEEPS[3]} (4 rows), {SWEEPS[2]} (3 rows), {SWEEPS[1]} (2 rows)" in str(raised.value)
        assert SWEEPS[0] not in str(raised.value)
