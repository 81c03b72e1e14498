"""Runs of one cell scatter more than the samples of one run: a comparison must not call that a change."""

import datetime
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from tests.support import synthetic
from tpbench.measure.clocks import DEVICE
from tpbench.report.analysis import comparison
from tpbench.report.analysis.changes import ALPHA, compare_cells
from tpbench.report.analysis.grid import row_records
from tpbench.report.analysis.pairs import pair_cells
from tpbench.report.analysis.row_values import Record, metric
from tpbench.results.read import load

SWEEPS = json.loads(Path(__file__).with_name("repeated_sweeps.json").read_text())
"""Wall times of 12 equal sweeps in a row on two CPU cores, in ms: (variant, sweep, iteration).

`tiny_tp2` with `measure=quick`. On "quiet" other people's commands came and went; a busy loop ran beside "busy"."""


def measured(samples, index=0, device="cuda"):
    """Return a row of a run with these samples."""
    row = synthetic.cell("triton_tp", 32768, 4, samples_ms=samples, time_ms=float(np.median(samples)), device=device)
    return row | {"started_at": synthetic.START + datetime.timedelta(minutes=index), "hardware": "a machine"}


def compared(before, after, metric_name="time_ms"):
    """Compare two sides, each a list of lists of rows, one for each cell."""
    pairs = [(str(at), old, new) for at, (old, new) in enumerate(zip(before, after, strict=True))]
    return compare_cells(pairs, metric(metric_name), 0.03)


@pytest.mark.parametrize("load_beside", list(SWEEPS))
def test_equal_sweeps_on_a_busy_machine_are_not_slower_or_faster(load_beside):
    """Mann-Whitney's test of the samples called a change in 77% and 58% of these comparisons."""
    sweeps = [
        [measured(samples, device="cpu")]
        for samples in zip(*SWEEPS[load_beside].values(), strict=True)
        for samples in samples
    ]
    cells = len(SWEEPS[load_beside])
    by_sweep = [sweeps[at : at + cells] for at in range(0, len(sweeps), cells)]
    comparisons = [compared(before, after) for before, after in itertools.combinations(by_sweep, 2)]
    alarms = sum(any(change.verdict in ("slower", "faster") for change in made.changes) for made in comparisons)
    assert len(comparisons) == 66 and alarms <= ALPHA * 66


def simulated(cells, rows, change, random):
    """Return a comparison of committed cells with so many runs a side, which scatter as is assumed."""
    spread, shown = comparison.SPREADS[DEVICE], metric("device_ms")
    sides = [[], []]
    for cell in cells:
        (seen,) = comparison.observations([cell], shown)
        deviation = (seen.variance * spread.freedom / random.chisquare(spread.freedom)) ** 0.5
        for at, side in enumerate(sides):
            factors = np.exp(random.normal(0, deviation, rows)) * (change if at else 1)
            side.append([
                Record(
                    status="ok", device="cuda", device_ms=cell["device_ms"] * factor,
                    device_samples_ms=np.multiply(cell["device_samples_ms"], factor),
                    started_at=synthetic.START + datetime.timedelta(minutes=2 * run + at),
                )
                for run, factor in enumerate(factors)
            ])  # fmt: skip
    return compared(*sides, "device_ms")


@pytest.mark.parametrize(("rows", "found"), [(1, 0.85), (3, 0.95)])
def test_false_alarms_are_rare_and_changes_of_five_per_cent_are_found(rows, found):
    """On the page stand the rates of a thousand such comparisons."""
    frame = load("outputs/reference", workload="entropy_loss", status="ok", tp_size=[1, 2])
    cells = [row for row in row_records(frame) if row["device_ms"]][::4]
    random = np.random.default_rng(11)
    same = [simulated(cells, rows, 1.0, random) for _ in range(20)]
    alarms = [any(change.verdict in ("slower", "faster") for change in made.changes) for made in same]
    slower = [simulated(cells, rows, 1.05, random) for _ in range(4)]
    shares = [np.mean([change.verdict == "slower" for change in made.changes]) for made in slower]
    assert len(cells) >= 20 and sum(alarms) <= 3 and np.mean(shares) >= found


def test_repeated_sweeps_in_turns_see_more():
    random = np.random.default_rng(7)

    def run(factor, at):
        return [measured(factor * random.lognormal(0, 0.003) * random.lognormal(0, 0.1, 30), at)]

    def side(factor, times):
        return [[row for at in times for row in run(factor, at)] for _ in range(3)]

    single = compared(side(1, [0]), side(1.1, [1]))
    in_turns = compared(side(1, [0, 2, 4, 6]), side(1.1, [1, 3, 5, 7]))
    one_after_the_other = compared(side(1, [0, 1, 2, 3]), side(1.1, [4, 5, 6, 7]))
    assert {change.verdict for change in single.changes} == {"unclear"}
    assert {change.verdict for change in in_turns.changes} == {"slower"}
    assert {change.verdict for change in one_after_the_other.changes} == {"unclear"}


def test_only_rows_of_equal_code_and_conditions_are_repeats(tmp_path):
    others = (
        {"git_commit": "b" * 40},
        {"beside": "another-job"},
        {"kernels_version": "b"},
        {"warmed_up": False},
    )
    rows = [
        synthetic.cell("triton_tp", 32768, 4, run=str(index), **{"git_commit": "a" * 40, **changes})
        for index, changes in enumerate((*others, {}, {"memory_limit_gib": 2.0}))
    ]
    frame = load(synthetic.write(rows, tmp_path))
    ((_, before, _),) = pair_cells(frame, frame)
    assert [row["row_id"] for row in before] == ["r4", "r5"]
