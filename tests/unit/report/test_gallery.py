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
from tpbench.report.repeat_command import row_job
from tpbench.results.plain import plain_rows
from tpbench.results.read import load
from tpbench.results.schema import all_columns, common_columns
from tpbench.settings import JobError

FIELDS = {"title": "Host A", "by": "a person", "kernels_version": "k1"}


MOVED, FLOOR_MS = (synthetic.cell("triton_tp", 32768, 2)[name] for name in ("bytes_moved", "floor_ms"))


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
        ({"loss_error": None, "grad_error": None}, "no loss_error from the oracle; no grad_error from the oracle"),
        ({"grad_error": float("nan")}, "no grad_error from the oracle"),  # NaN is stored as null
        ({"grad_error": float("inf")}, "grad_error is no number"),
        ({"grad_error": -0.5}, "grad_error is no number"),
        ({"loss_error": 50.0}, "loss_error 50 is above 1.53e-05, the tolerance of bfloat16"),
        ({"grad_error": 0.0157}, "grad_error 0.0157 is above 0.0156, the tolerance of bfloat16"),
        ({"grad_error": 0.0156}, ""),
        ({"kernels_version": "k2"}, "kernels_version k2 is not among those that the entry states"),
        ({"kernels_version": None}, "no kernels_version"),
        ({"device_ms": FLOOR_MS * 0.9}, f"device_ms {FLOOR_MS * 0.9:.4g} is below the floor of {FLOOR_MS:.4g} ms"),
        (
            {"device_ms": FLOOR_MS * 0.9, "floor_ms": None},
            f"device_ms {FLOOR_MS * 0.9:.4g} is below the floor of {FLOOR_MS:.4g} ms",
        ),
        ({"device_ms": FLOOR_MS * 0.96}, ""),  # the floor may be too high by 5%
        (
            {"floor_ms": FLOOR_MS * 9, "device_ms": FLOOR_MS * 8, "time_ms": None},
            f"device_ms {FLOOR_MS * 8:.4g} is below the floor of {FLOOR_MS * 9:.4g} ms",
        ),
        ({"floor_ms": None}, ""),
        ({"floor_ms": 1e-9}, f"floor_ms 1e-09 is below the {FLOOR_MS:.3g} ms of its bytes_moved"),
        ({"bytes_moved": 1000, "floor_ms": None}, f"bytes_moved 1000 is below the {MOVED} of its problem"),
        ({"bytes_moved": None}, "no floor: bytes_moved and copy_gb_per_s are needed"),
        ({"copy_gb_per_s": None, "floor_ms": None}, "no floor: bytes_moved and copy_gb_per_s are needed"),
        ({"copy_gb_per_s": float("inf")}, "no floor: bytes_moved and copy_gb_per_s are needed"),
        ({"time_ms": -1.0}, "time_ms is -1"),
        ({"time_ms": None, "device_ms": None}, "no time"),
        ({"device_ms": None, "time_ms": 0.0}, "time_ms is 0"),
        ({"device_ms": float("inf")}, "device_ms is inf"),
        ({"time_ms": None}, ""),
        ({"dtype": "float16"}, "its job has another dtype"),
        ({"job": "{}"}, "its job cannot be checked: no variant is called None"),
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
    assert [each.reason[: len(said)] for each in found] == ([said] if said else [])
    assert all(each.variant == "triton_tp" and each.row_id in set(load(tmp_path)["row_id"]) for each in found)


def test_every_workload_has_limits_of_its_errors():
    """The committed rows are of all workloads, and their oracles have measured each of these errors."""
    checked = {}
    for row in plain_rows(load(ROOT / "outputs" / "reference")):
        if row["status"] == "ok":
            job = row_job(row)
            limits = job.workload.error_limits(job.problem)
            assert set(limits) <= set(all_columns())
            least = job.workload.least_bytes(job.problem, job.tp_size)
            assert 0 <= least <= row["bytes_moved"]
            checked.setdefault(row["workload"], set()).update(limits)
    both = {"loss_error", "grad_error"}
    assert checked == {
        "entropy_loss": both,
        "linear_loss": both | {"entropy_error", "hidden_grad_error", "weight_grad_error"},
        "embedding_grad": {"grad_error"},
        "tp_block": both | {"output_error"},
        "train_step": both,
    }


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
    reason = refused.reason.partition(";")[0]
    assert len(reason) == len("kernels_version  is not among those that the entry states") + 40 + gap


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
    assert len(found.frame) > least and not found.faults and not found.refused


def test_rows_of_another_version_and_hostile_names_stop_no_gallery(tmp_path, monkeypatch, capsys):
    future = {name: value for name, value in cell("mystery").items() if name in common_columns()}
    folder = entry(tmp_path / "rows", [cell("triton_tp", dp_size=None), future | {"workload": "of_the_future"}])
    found = read_entry(folder)
    (refused,) = found.refused
    assert refused.variant == "mystery" and "its job cannot be checked: no variant is called mystery" in refused.reason
    _, problems = measured_problems([found])
    assert [each.workload for each in headlines(problems)] == ["entropy_loss"]
    hostile = Refusal("\x1b[31mred", "triton_tp", "why")
    monkeypatch.setattr("tpbench.report.gallery.entry.refusals", lambda *_: [hostile])
    assert main(["gallery", str(folder), "-o", str(tmp_path / "site")]) == 0
    printed = capsys.readouterr().err
    assert "refused" in printed and "\x1b" not in printed
