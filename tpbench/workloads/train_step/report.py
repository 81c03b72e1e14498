"""`python -m tpbench.workloads.train_step.report outputs`: what each implementation reaches, and what it needs.

A table for each kind of hardware and dtype; a line for each implementation of a problem, the fastest first. They are
compared by tokens a second and GPU, so that meshes of one model stand beside each other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import pandas as pd

from tpbench.fields import JobError
from tpbench.report.layout import Section, lay_out
from tpbench.report.metric import number, times
from tpbench.report.pivot import mark
from tpbench.report.records import Record, say
from tpbench.report.render import markdown_table
from tpbench.workloads.train_step.workload import WORKLOAD

MEMORY = ("model", "gradients", "optimizer", "activations")
COLUMNS = (
    "tokens_per_s_per_gpu", "mfu", "exposed_share", "peak_gib", "steady_gib", "time_ms", "device_ms", "forward_ms",
    "backward_ms", "optimizer_ms", "loss_value", "expected_gib", *(f"expected_{each}_gib" for each in MEMORY),
)  # fmt: skip
HEADS = (
    "model", "layers", "S", "dp x tp", "implementation", "tokens/s/GPU", "of best", "MFU", "exposed", "step",
    "fwd / bwd / opt", "peak GiB", "expected GiB: model + gradients + optimizer + activations",
)  # fmt: skip


def markdown(frame: pd.DataFrame) -> str:
    """All right rows and those that ran out of memory, as Markdown."""
    rows = frame[(frame["workload"] == WORKLOAD.name) & frame["status"].isin(["ok", "oom"])]
    if rows.empty:
        raise JobError(f"no row of {WORKLOAD.name} was measured there")
    parts = []
    for section in lay_out(rows, COLUMNS).sections:
        parts += [section.heading, markdown_table(HEADS, list(_lines(section)))]
    return "\n\n".join(parts) + "\n"


def _lines(section: Section) -> list[tuple[str, ...]]:
    """Problems as they come, their implementations by speed; the best of a model and sequence is of all meshes."""
    cells: list[tuple[dict[str, Any], str, Record]] = [
        (dict(zip(section.names, row.key, strict=True)), head, record)
        for row in section.rows
        for head, record in zip(section.heads, row.records, strict=True)
        if record is not None
    ]
    best: dict[tuple[Any, ...], float] = {}
    for key, _, record in cells:
        if speed := _speed(record):
            best[_contest(key)] = max(speed, best.get(_contest(key), 0.0))
    cells.sort(key=lambda cell: (*map(str, _contest(cell[0])), -(_speed(cell[2]) or 0.0)))
    return [_line(key, head, record, best.get(_contest(key))) for key, head, record in cells]


def _contest(key: dict[str, Any]) -> tuple[Any, ...]:
    """What must be equal for speeds to be compared: all but the mesh."""
    return tuple(value for name, value in key.items() if name not in ("dp_size", "tp_size"))


def _speed(record: Record) -> float | None:
    return record["tokens_per_s_per_gpu"] if record["status"] == "ok" and not mark(record) else None


def _line(key: dict[str, Any], head: str, record: Record, best: float | None) -> tuple[str, ...]:
    speed = _speed(record)
    ms = record["device_ms"] if record["device_ms"] is not None else record["time_ms"]
    phases = [record[f"{phase}_ms"] for phase in ("forward", "backward", "optimizer")]
    parts = [record[f"expected_{each}_gib"] for each in MEMORY]
    return (
        say(key["model"]),
        say(key["num_layers"]),
        say(key["seq_length"]),
        f"{say(record['dp_size'])} x {say(record['tp_size'])}",
        head,
        "OOM" if record["status"] == "oom" else f"{number(record['tokens_per_s_per_gpu'])}{mark(record)}",
        times(best / speed) if best and speed else "-",
        _share(record["mfu"]),
        _share(record["exposed_share"]),
        "-" if ms is None else f"{number(ms)} ms",
        "-" if None in phases else " / ".join(map(number, phases)),
        "-" if record["peak_gib"] is None else number(record["peak_gib"]),
        "-" if None in parts else f"{number(record['expected_gib'])}: {' + '.join(map(number, parts))}",
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; exits 2 for what cannot be answered."""
    parser = argparse.ArgumentParser(prog="train_step.report", description="Speed and memory by implementation.")
    parser.add_argument("where", nargs="*", default=["outputs"], help="folders, files or globs of rows (outputs)")
    asked = parser.parse_args(arguments)
    try:
        from tpbench.report.rows import read_rows

        print(markdown(read_rows(asked.where)), end="")
    except (JobError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
