"""Fixtures that write rows and load them as a frame."""

import datetime
import itertools
import json
import math

import pytest

from tpbench.measure.clocks import TIMED
from tpbench.results.read import load
from tpbench.results.write import write_row

START = datetime.datetime(2026, 11, 20, 12, tzinfo=datetime.UTC)
CPU = {"device": "cpu", "gpu_name": None, "cpu_model": "EPYC 9654"}
NOT_RUN = {"time_ms": None, "loss_value": None, "interpreted": None, "warmed_up": None, "graph": None}


@pytest.fixture
def add(tmp_path):
    """Return a function that adds a row to `tmp_path`, one second after the last. Keywords change its columns."""
    numbers = itertools.count()

    def add(variant, time_ms=None, *, job=None, **changes):
        index = next(numbers)
        moment = START + datetime.timedelta(seconds=index)
        row = {
            "workload": "entropy_loss", "variant": variant, "status": "ok", "time_ms": time_ms, "cell": index,
            "tokens": 4096, "vocab": 32768, "tp_size": 2, "dp_size": 1, "loss": "cross_entropy", "dtype": "bfloat16",
            "block_cap": "auto", "device": "cuda", "gpu_name": "NVIDIA H200", "interpreted": False, "warmed_up": True,
            "graph": False, "nodes": 1, "loss_value": 10.5, "seed": 0, "logits_scale": 1.0, "temperature": 1.0,
            "ignored": 0.0, "compile": False, "compute_dtype": "float32", "started_at": moment, "finished_at": moment,
        }  # fmt: skip
        if changes.get("status", "ok") != "ok":
            row |= NOT_RUN
        row |= changes
        resolved = {
            name: row[name] for name in row if name not in ("cell", "status", "time_ms", "reason", "loss_value")
        }
        resolved["job"] = job
        row.setdefault("job", json.dumps(job))
        row.setdefault("key", json.dumps(resolved, default=lambda _: None))
        for clock in TIMED:
            if row.get(clock.column) is not None and math.isfinite(row[clock.column]):
                row.setdefault(clock.samples, [row[clock.column] * (1 + 0.001 * at) for at in range(-5, 6)])
        if row["workload"] != "entropy_loss":
            for name in ("seed", "logits_scale", "temperature", "ignored", "compile", "compute_dtype"):
                del row[name]
        write_row(row, tmp_path, f"r{index}")

    return add


@pytest.fixture
def frame(tmp_path):
    """Return a function that loads the added rows."""
    return lambda: load(tmp_path)
