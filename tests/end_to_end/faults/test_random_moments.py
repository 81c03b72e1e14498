"""A sweep under fire. After every fault: nothing lost, no process and no lock left behind, one finished row a cell."""

import os
import random
from pathlib import Path

import pytest

import tpbench as package
from tests.support.command import tpbench
from tests.support.disturbed_sweeps import AT_RANDOM_MOMENTS, SMALL
from tests.support.random_faults import SIGNALS, disturbed_sweep, finished

TRIES = 5
"""Times that a fault is tried again if its moment comes too late."""

MODE = dict(zip(SIGNALS, ("interleaved", "warm", "cold"), strict=True)) | {"kill -9 of the launcher": "warm"}
"""By the fault, how the sweep that it disturbs runs its cells; all others are cold."""

SHOWN_ELSEWHERE = ("kill -9 of a rank", "SIGINT of the launcher", "SIGHUP of the launcher")
"""Faults of a campaign only: other tests kill ranks, and one signal stands for those that have the same handler."""


@pytest.mark.timeout(900)
def test_at_random_moments(tmp_path: Path) -> None:
    """Each fault strikes once; `scripts/campaign` tries more moments."""
    chance = random.Random(int(os.environ.get("CAMPAIGN_SEED", "20")))
    outputs = tmp_path / "outputs"
    seeds = 0
    # Faults that a sweep survives come first. Cells that the others leave undone remain for the sweep at the end.
    is_campaign = "CAMPAIGN_SEED" in os.environ
    for fault in (fault for fault in AT_RANDOM_MOMENTS if is_campaign or fault not in SHOWN_ELSEWHERE):
        for _ in range(TRIES):
            seeds += 1  # a new seed: each round has a cell to run, even if the last round finished all of its cells
            if disturbed_sweep(fault, MODE.get(fault, "cold"), tmp_path, seeds, chance):
                break
        else:
            raise AssertionError(f"{fault}: each of {TRIES} moments was too late")
    sweep = ("-m", *SMALL, f"seed={','.join(map(str, range(seeds)))}", "resume=true", "reuse=true")
    done = tpbench(*sweep, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(finished(outputs)["seed"]) == set(range(seeds))
    rows = package.load(outputs)  # failures too: none is left of a cell that was finished after it
    assert not rows[["key", "kernels_version"]].duplicated().any()
