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
        synthetic.write(rows, folder / sweep[-6:], sweep)
        synthetic.write(rows, folder / "rows", sweep)
    return folder


def sides(outputs, before, after):
    old, new, remark = read_sides(*(",".join(f"{outputs}/{name}" for name in side.split()) for side in (before, after)))
    return [sorted({sweep[-1] for sweep in side["sweep_id"]}) for side in (old, new)], [len(old), len(new)], remark


def test_commas_separate_folders_and_globs(outputs):
    assert sides(outputs, "aaaaaa", "bbbbbb cccccc") == ([["a"], ["b", "c"]], [1, 5], "")
    assert sides(outputs, "[ad]aa*", "dddddd/") == ([["a"], ["d"]], [1, 4], "")


def test_a_folder_may_have_a_comma_in_its_name_and_means_the_user_s_own_rows(outputs, tmp_path):
    folder = tmp_path / "one,two"
    synthetic.write([synthetic.cell("triton_tp", 7000, 4, sweep_id="x")], folder)
    synthetic.write([synthetic.cell("triton_tp", 8000, 4, sweep_id="y")], folder / "reference")
    assert list(map(len, read_sides(str(folder), f"{outputs}/aaaaaa")[:2])) == [1, 1]


@pytest.mark.parametrize(
    ("before", "after", "counts", "smaller"),
    [
        ("rows", "bbbbbb", [8, 2], "bbbbbb"),
        ("bbbbbb", "rows", [2, 8], "bbbbbb"),
        ("aaaaaa bbbbbb", "bbbbbb cccccc", [3, 3], "bbbbbb"),
    ],
)
def test_rows_of_both_sides_count_for_the_smaller_one(outputs, before, after, counts, smaller):
    _, found, remark = sides(outputs, before, after)
    assert found == counts
    assert remark.endswith(f"{smaller} only")


def test_what_names_no_rows_is_explained(outputs):
    with pytest.raises(JobError, match="are the same 10 rows, so there is nothing to compare"):
        sides(outputs, "rows", "rows")
    with pytest.raises(JobError, match=r"no such folder or file: .*eeeeee"):
        sides(outputs, "eeeeee aaaaaa", "rows")
