"""Every report of a few synthetic rows has the texts that it had: pages, tables, comparisons and histories.

After a change of a report read the new texts, and write them with `python -m tests.unit.report.test_reports_described`.
"""

import functools
import re
import tempfile
from pathlib import Path

import pytest

from tests.support import report_rows, synthetic
from tests.support.tp_block_rows import TRACE
from tests.support.tp_block_rows import row as block
from tpbench.report.compare import render as compared
from tpbench.report.compare.changes import compare_cells
from tpbench.report.compare.pairs import pair_cells
from tpbench.report.gallery.admission import refusals
from tpbench.report.gallery.entry import Entry
from tpbench.report.gallery.site import index
from tpbench.report.history import render as told
from tpbench.report.history.series import all_series
from tpbench.report.numbers.metric import metric
from tpbench.report.page.html_page import page
from tpbench.report.tables import render
from tpbench.report.tables.columns import column_tables
from tpbench.report.tables.pivot import pivot
from tpbench.report.tables.study import study_csv, study_document, study_tables
from tpbench.report.tables.writer import as_text
from tpbench.results.read import load

FOLDER = Path(__file__).with_name("described")


@functools.cache
def every_kind():
    return read(report_rows.of_every_kind())


def read(rows):
    with tempfile.TemporaryDirectory() as folder:
        return load(synthetic.write(rows, Path(folder)))


def rounded(text):
    """Return a text whose numbers have at most six digits, because libraries differ in the last ones."""
    return re.sub(r"\d+\.\d{6,}(e-?\d+)?", lambda found: f"{float(found[0]):.6g}", text)


def described(html):
    """Return the body of a page with an element in each line, and without scripts and commands."""
    removed = r'<script.*?</script>|(?<=class="copy") title="[^"]*"'
    body = re.sub(removed, "", html[html.index("<body") :], flags=re.DOTALL)
    lines = re.sub(r"(<(?:h\d|p|li|tr|div|details|summary|svg|path|text|button)\b)", r"\n\1", body).splitlines()
    return "\n".join(line.strip() for line in lines if line.strip()) + "\n"


def blocks():
    absent = dict.fromkeys(("time_ms", "device_ms", "loss_value", *TRACE))
    made = [
        block("block_tp", 9),
        block("block_no_tp", 10, hidden_share=None, exposed_ms=None, device_ms=30.0, **dict.fromkeys(TRACE)),
        block("block_symm_mem", 11, status="skipped", reason="needs a CUDA GPU", **absent),
        block("block_tp", 12, tokens=2048, device_ms=2.0, throttle_reasons="hw_slowdown", grad_norm=float("nan")),
    ]
    return [each | {"learning_rate": 0.001} for each in made]


def comparison(metric_name):
    return compare_cells(pair_cells(*map(read, report_rows.sides())), metric_name, 0.03)


def tables(metric_name, **options):
    return render.text(pivot(every_kind(), metric_name, **options)).plain


def study(name, form):
    found = study_tables(every_kind(), name)
    return study_csv(found) if form == "csv" else as_text(study_document(found)).plain


def gallery():
    frame = every_kind()
    refused = tuple(refusals(frame, [report_rows.CODE["kernels_version"]]))
    admitted = frame[~frame["row_id"].isin([each.row_id for each in refused])]
    entries = [
        Entry("Four H200s", "a person", "https://example.org", "A note.", admitted, refused, ("a broken file",)),
        Entry("Another", "two people", "", "", admitted[admitted["vocab"] > 32768], (), ()),
    ]
    return described(index(entries))


def history(form):
    shown = metric("device_ms")
    return told.__dict__[form](all_series(read(report_rows.history()), shown, 0.03), shown, 0.03, False)


REPORTS = {
    "page": lambda: described(page(every_kind())),
    "page_of_blocks": lambda: described(page(read(blocks()), "peak_gib")),
    "time_with_floor": lambda: tables("time_ms", floor=True),
    "device_transposed": lambda: tables("device_ms", transpose=True),
    "loss_error": lambda: tables("loss_error"),
    "bandwidth": lambda: tables("gb_per_s"),
    "study": lambda: study("block_cap", "text"),
    "study_csv": lambda: study("block_cap", "csv"),
    "columns": lambda: as_text(study_document(column_tables(every_kind(), ["peak_gib", "time_ms/device_ms"]))).plain,
    "comparison": lambda: compared.text(comparison("time_ms")),
    "comparison_of_memory": lambda: compared.text(comparison("peak_gib")),
    "comparison_csv": lambda: compared.comma_separated(comparison("device_ms")),
    "comparison_page": lambda: described(compared.page(comparison("gb_per_s"))),
    "history": lambda: history("text"),
    "history_csv": lambda: history("comma_separated"),
    "gallery": gallery,
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_as_it_was(name):
    assert rounded(REPORTS[name]()) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each, make in REPORTS.items():
        (FOLDER / f"{each}.txt").write_text(rounded(make()), encoding="utf-8")
