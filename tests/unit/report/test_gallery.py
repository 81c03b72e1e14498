"""`report.py gallery`: entries with their files, refusals by name, and the fastest variant of each problem."""

import re

import pytest
import yaml

from tests.support import synthetic
from tests.support.command import ROOT
from tpbench.report.command import main
from tpbench.report.gallery.admission import Refusal, refusals
from tpbench.report.gallery.entry import read_entry
from tpbench.report.gallery.winners import headlines, measured_problems
from tpbench.results.read import load
from tpbench.results.schema import common_columns
from tpbench.settings import JobError

FIELDS = {"title": "Host A", "by": "a person", "kernels_version": "k1"}


def entry(folder, rows, **fields):
    """Write the rows and the file of an entry."""
    synthetic.write(rows, folder)
    (folder / "gallery.yaml").write_text(yaml.safe_dump(FIELDS | fields))
    return folder


def cell(variant, **changes):
    return synthetic.cell(variant, 32768, 2, **{"kernels_version": "k1"} | changes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    top = tmp_path_factory.mktemp("gallery")
    slow = [cell("triton_tp", factor=30.0), cell("pytorch_gather")]
    return (
        entry(top / "a", [cell("triton_tp"), cell("pytorch_gather")], note="<script>window.owned=1</script>"),
        entry(top / "b", [*slow, *(each | {"gpu_name": "NVIDIA B200"} for each in slow[:1])], title="Host B"),
    )


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"loss_error": None, "grad_error": None}, "no error from the oracle (loss_error or grad_error)"),
        ({"grad_error": float("nan"), "loss_error": 0.0}, ""),  # NaN is stored as null; the other error is enough
        ({"grad_error": float("inf")}, "the oracle's error is no number"),
        ({"kernels_version": "k2"}, "kernels_version k2 is not among those that the entry states"),
        ({"device_ms": 0.01, "floor_ms": 0.02}, "device_ms 0.01 is below the floor of 0.02 ms"),
        ({"device_ms": 0.0196, "floor_ms": 0.02}, ""),
        ({"time_ms": -1.0}, "time_ms is -1"),
        ({"time_ms": None, "device_ms": None}, "no time"),
        ({"device_ms": 19.0, "time_ms": 20.0, "floor_ms": 20.0}, ""),  # the floor may be too high by 5%
        ({"device_ms": None, "floor_ms": None, "time_ms": 0.0}, "time_ms is 0"),
        ({"device_ms": float("inf")}, "device_ms is inf"),
        ({"time_ms": None}, ""),
        ({"loss_error": 0.0, "grad_error": -0.5}, "the oracle's error is no number"),
        ({"kernels_version": None}, ""),
        (
            {"kernels_version": "k2", "time_ms": -1.0},
            "kernels_version k2 is not among those that the entry states; time_ms is -1",
        ),
        ({"status": "error", "reason": "x"}, ""),
    ],
)
def test_rows_are_refused_by_name(tmp_path, changes, said):
    synthetic.write([cell("triton_tp", **changes), cell("pytorch_gather")], tmp_path)
    found = refusals(load(tmp_path), ["k1"])
    assert [each.reason for each in found] == ([said] if said else [])
    assert all(each.variant == "triton_tp" and each.row_id in set(load(tmp_path)["row_id"]) for each in found)


@pytest.mark.parametrize(
    "text, said",
    [
        (None, "is missing: write a line for each of title, by, kernels_version"),
        ("[1, 2]", "must have a line `name: value`"),
        ("title: [", "is no YAML"),
        ("title: A\nby: B", "kernels_version is missing"),
        ("title: A\nby: B\nkernels_version: 12", "kernels_version must be text, in quotes"),
        ("titel: A\nby: B\nkernels_version: k", "no field is called titel, did you mean title?"),
        ("title: A\nby: B\nkernels_version: k\nlink: javascript:alert(1)", "link must begin with https://"),
        ("title: !!python/object/apply:os.system ['true']", "is no YAML"),
        ("x: " + "[" * 60000, "is no YAML"),
        ("title: [A]\nby: B\nkernels_version: k", "title must be text, in quotes"),
        ("title: A\nby: [B]\nkernels_version: k", "by must be text, in quotes"),
        ("title: A\nby: B\nkernels_version: [k, 12]", "kernels_version must be text, in quotes"),
        ("title: A\nby: ''\nkernels_version: k", "by is missing (who measured)"),
        ("x: " + "y" * (65536 - 3), "no field is called x"),  # the largest file that is read
        ("x: " + "y" * 70000, "has more than 65536 bytes"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path, text, said):
    synthetic.write([cell("triton_tp")], tmp_path)
    if text is not None:
        (tmp_path / "gallery.yaml").write_text(text)
    with pytest.raises(JobError, match=re.escape(said)):
        read_entry(tmp_path)


def test_an_entry_states_one_or_several_versions(tmp_path):
    rows = [cell("triton_tp"), cell("pytorch_gather", kernels_version="k2"), cell("pytorch_tp_manual")]
    one = read_entry(entry(tmp_path, rows, link="https://a.example", note="a note"))
    assert (one.title, one.by, one.link, one.note) == ("Host A", "a person", "https://a.example", "a note")
    assert [each.variant for each in one.refused] == ["pytorch_gather"] and len(one.frame) == 2
    (tmp_path / "gallery.yaml").write_text(yaml.safe_dump(FIELDS | {"kernels_version": ["k2", "k1"]}))
    two = read_entry(tmp_path)
    assert two.refused == () and len(two.frame) == 3 and (two.link, two.note) == ("", "")


def test_long_texts_are_cut(tmp_path):
    long, gap = "x" * 1000, len(" ... ")
    fields = {"title": long, "by": long, "link": f"https://{long}", "note": long}
    found = read_entry(entry(tmp_path, [cell(long, kernels_version=long), cell("triton_tp")], **fields))
    assert [len(each) for each in (found.title, found.by, found.link, found.note)] == [
        at + gap for at in (60, 100, 300, 500)
    ]
    (refused,) = found.refused
    assert len(refused.variant) == 60 + gap
    assert len(refused.reason) == len("kernels_version  is not among those that the entry states") + 40 + gap


def test_machines_are_columns_and_equal_problems_share_a_line(folders):
    machines, problems = measured_problems([read_entry(folder) for folder in folders])
    (problem,) = problems
    assert headlines(problems) == [problem]
    assert {machines[at].name: verdict.fastest.column for at, verdict in problem.by_machine.items()} == {
        "Host A (NVIDIA H200)": "triton_tp",
        "Host B (NVIDIA H200)": "pytorch_gather",
        "Host B (NVIDIA B200)": "triton_tp",
    }


def test_the_site_names_winners_and_refusals(folders, tmp_path, capsys):
    third = entry(tmp_path / "c", [cell("triton_tp"), cell("pytorch_gather", kernels_version="k9")], title="Host C")
    site = tmp_path / "site"
    assert main(["gallery", *map(str, (*folders, third)), "-o", str(site)]) == 0
    assert "Host C: refused" in capsys.readouterr().err
    assert sorted(each.name for each in site.iterdir()) == ["host-a.html", "host-b.html", "host-c.html", "index.html"]
    index = (site / "index.html").read_text()
    assert "k9 is not among those that the entry states" in index and 'href="host-c.html"' in index
    assert "<script>window.owned" not in index
    assert "pytorch_gather" not in (site / "host-c.html").read_text()
    assert main(["gallery", str(third), str(third), "-o", str(site)]) == 2
    assert "two entries have the title Host C" in capsys.readouterr().err


@pytest.mark.parametrize("folder, least", [("reference", 500), ("options", 40)])
def test_the_committed_rows_are_an_entry(folder, least):
    found = read_entry(ROOT / "outputs" / folder)
    assert len(found.frame) > least and not found.faults
    assert all("below the floor" in each.reason for each in found.refused)


def test_rows_of_another_version_and_hostile_names_stop_no_gallery(tmp_path, monkeypatch, capsys):
    future = {name: value for name, value in cell("mystery").items() if name in common_columns()}
    folder = entry(tmp_path / "rows", [cell("triton_tp", dp_size=None), future | {"workload": "of_the_future"}])
    _, problems = measured_problems([read_entry(folder)])
    assert [each.workload for each in headlines(problems)] == ["entropy_loss", "of_the_future"]
    hostile = Refusal("\x1b[31mred", "triton_tp", "why")
    monkeypatch.setattr("tpbench.report.gallery.entry.refusals", lambda *_: [hostile])
    assert main(["gallery", str(folder), "-o", str(tmp_path / "site")]) == 0
    printed = capsys.readouterr().err
    assert "refused" in printed and "\x1b" not in printed
