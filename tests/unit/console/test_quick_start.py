"""End of the quick start."""

import re
import shlex

import pytest

from tests.support import synthetic
from tests.support.command import DEFAULT, ROOT
from tests.support.composed_jobs import job
from tpbench.console import quick_start
from tpbench.launcher.command_line.checks import check_overrides
from tpbench.report.command import _parser
from tpbench.results.read import load


def rows_of(folder, *rows):
    return load(synthetic.write(rows, folder))


def cell(name, **values):
    return synthetic.cell(name, 1000, 2, tokens=64, **values)


def test_what_a_sweep_has_shown(tmp_path):
    rows = rows_of(
        tmp_path,
        cell("triton_tp", time_ms=9.0, interpreted=True, sweep_id="2"),
        cell("pytorch_tp_manual", time_ms=2.0, sweep_id="2"),
        cell("pytorch_gather", time_ms=3.0, sweep_id="2"),
        cell("liger", time_ms=1.0, sweep_id="1"),
    )
    assert quick_start.shown(rows) == [
        "Measured: the cross_entropy loss of 64 tokens x 1000 logits on 2 ranks, by 3 of 3 variants.",
        "Loss and gradient of each agree with a float64 reference. A variant that does not agree has no time.",
        "triton_tp ran in Triton's interpreter, because there is no GPU: its time is no measurement.",
        "The fastest measured variant is pytorch_tp_manual: 2.000 ms.",
    ]


def test_a_sweep_that_has_shown_nothing(tmp_path):
    rows = rows_of(tmp_path, cell("triton_tp", status="skipped", reason="needs 2 GPUs, found 1", sweep_id="1"))
    assert quick_start.shown(rows) == ["Nothing was measured: needs 2 GPUs, found 1."]


@pytest.mark.parametrize("gpus", [0, 1, 2, 4, 8, 16])
def test_three_commands_that_this_machine_can_run(gpus, tmp_path):
    listing, sweep, report = (shlex.split(command) for command, _ in quick_start.commands("scripts", gpus))
    assert listing == ["scripts/run", "list"]
    assert sweep[:2] == ["scripts/run", "-m"]
    check_overrides(sweep[1:], ROOT / "conf")
    size = job(*(each for each in sweep[2:] if "," not in each)).world_size
    assert size <= max(gpus, 2) and (gpus == 0 or size <= gpus)
    assert (ROOT / report[0]).exists() and _parser().parse_args(report[1:]).output.name == "report.html"
    text = quick_start.text(rows_of(tmp_path, cell("triton_tp", sweep_id="1")), "scripts", gpus)
    assert len(re.findall("^  scripts/", text, re.MULTILINE)) == 3 and len(text.splitlines()) <= 12
    assert max(map(len, text.splitlines())) <= 100


def test_the_script_runs_it_after_the_default_sweep():
    script = (ROOT / "scripts/run").read_text()
    assert DEFAULT[0] == "-m" and 'exec "$venv/bin/python" -m tpbench.console.quick_start "$0"' in script
