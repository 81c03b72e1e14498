"""Rows that are half there, or of another time."""

import warnings
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import tpbench as package
from tests.support.launcher_rows import FACTS, cell, measured
from tpbench.launcher.attempt import new_task, store
from tpbench.launcher.planning.resume import decide
from tpbench.results.read import RowWarning
from tpbench.results.write import write_row


def test_a_file_cut_at_every_length_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    content = write_row({"status": "ok"}, tmp_path / "whole", "r1").read_bytes()
    cut = tmp_path / "cut"
    cut.mkdir()
    for length in range(len(content)):
        (cut / f"{length}.parquet").write_bytes(content[:length])
    measured(cell(0, cut))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = package.load(cut)
    assert list(rows["status"]) == ["ok"]
    said = [str(each.message) for each in caught if each.category is RowWarning]
    assert len(said) == len(content)
    assert {each.split(": ")[0] for each in said} == {str(cut / f"{length}.parquet") for length in range(len(content))}
    assert all("\n" not in each and "broken" in each for each in said)


def test_a_clock_that_steps_back(tmp_path: Path) -> None:
    one = cell(0, tmp_path)
    later = datetime.now(UTC) + timedelta(hours=1)
    ahead = replace(new_task(one.job, tmp_path, **FACTS), started_at=later)
    store(ahead.result("error", "it broke"), one.job, tmp_path)  # ended before the clock was set back
    store(new_task(one.job, tmp_path, **FACTS).result("ok"), one.job, tmp_path)
    rows = package.load(tmp_path)
    assert (rows["wall_s"] >= 0).all()
    assert decide([one], FACTS)[0].reason == "measured before"
