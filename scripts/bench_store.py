#!/usr/bin/env python3
"""Measure how long rows take to read: single files, the same rows merged, and many more rows in merged files.

scripts/bench_store.py [--files 10000] [--rows 100000]
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401  finds the package below
import pyarrow as pa

import tpbench
from tpbench.job import parse_job
from tpbench.launcher.attempt import new_task
from tpbench.report.pivot import pivot
from tpbench.results.compact import compact, publish
from tpbench.results.write import parquet_bytes, row_table

VARIANTS = ("triton_tp", "pytorch_tp_manual", "pytorch_gather")
SAMPLES = 50


def row(index: int) -> pa.Table:
    """Return a row like that of a sweep on a GPU."""
    job = parse_job({
        "variant": VARIANTS[index % 3], "tokens": 4096, "vocab": 32768 * (1 + index % 4), "tp_size": 2,
        "seed": index % 50, "device": "cuda",
    })  # fmt: skip
    task = new_task(job, Path(), cell=index, sweep_id="bench", gpu_name="a GPU", torch_version="2.13.0")
    started = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=index)
    return row_table({
        **task.columns, "row_id": task.row_id, "status": "ok", "started_at": started,
        "finished_at": started + timedelta(seconds=9), "time_ms": 1.0 + index % 7, "loss_value": 10.0,
        "samples_ms": [1.0 + index % 7] * SAMPLES, "device_samples_ms": [0.9] * SAMPLES,
    })  # fmt: skip


def timed(what: str, function: Callable[[], Any]) -> Any:
    """Print how long the function takes, and return its result."""
    began = time.perf_counter()
    result = function()
    print(f"{what}: {time.perf_counter() - began:.2f} s", flush=True)
    return result


def main() -> None:
    """Print a line for each measurement."""
    parser = argparse.ArgumentParser(prog="bench_store.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=10_000, help="rows in files of their own (default: 10000)")
    parser.add_argument("--rows", type=int, default=100_000, help="rows in merged files (default: 100000)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tpbench-store-") as scratch:
        rows = Path(scratch, "rows")
        rows.mkdir()
        for index in range(options.files):  # not by write_row: a flush to the disk for each would take minutes
            table = row(index)
            (rows / f"{table['row_id'][0]}.parquet").write_bytes(parquet_bytes(table))
        frame = timed(f"load {options.files} files", lambda: tpbench.load(scratch))
        timed("pivot", lambda: pivot(frame))
        timed("compact", lambda: compact(scratch))
        timed(f"load {options.files} rows merged", lambda: tpbench.load(scratch))
        parts = [row(index) for index in range(options.files, options.files + 1000)]
        for batch in range((options.rows - options.files) // 1000):
            more = pa.concat_tables(parts)
            names = [f"{batch}-{name}" for name in more["row_id"].to_pylist()]
            more = more.set_column(more.column_names.index("row_id"), "row_id", pa.array(names))
            publish(more, rows)
        timed("compact again", lambda: compact(scratch))
        frame = timed(f"load {options.rows} rows merged", lambda: tpbench.load(scratch))
        assert len(frame) == options.rows
        timed("pivot", lambda: pivot(frame))


if __name__ == "__main__":
    main()
