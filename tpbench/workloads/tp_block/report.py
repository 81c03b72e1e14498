"""`python -m tpbench.workloads.tp_block.report outputs`: for each problem, what each variant's step is made of."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpbench.fields import JobError, unknown
from tpbench.results.plain import plain_rows
from tpbench.workloads.tp_block.problem import WORKLOAD

if TYPE_CHECKING:
    import pandas as pd

PROBLEM = ("hardware", "dtype", "part", "hidden", "ffn", "tokens", "tp_size")
"""What makes rows comparable."""
OPTIONS = {"save_gathered": True, "signals": "stream"}
"""What makes another line of a variant, with what is not mentioned."""

TABLE: dict[str, tuple[str, str]] = {
    "loss": ("loss_value", "{:.4g}"),
    "gradient norm": ("grad_norm", "{:.4g}"),
    "forward ms": ("forward_ms", "{:.3f}"),
    "backward ms": ("backward_ms", "{:.3f}"),
    "step ms": ("step_ms", "{:.3f}"),
    "exposed ms": ("exposed_ms", "{:.3f}"),
    "hidden": ("hidden_share", "{:.0%}"),
    "gathers hidden": ("gather_hidden", "{:.0%}"),
    "scatters hidden": ("scatter_hidden", "{:.0%}"),
    "overlapped": ("overlap_fraction", "{:.0%}"),
    "TFLOP/s": ("tflops", "{:.4g}"),
    "of GEMM rate": ("gemm_share", "{:.0%}"),
    "peak GiB": ("peak_gib", "{:.3g}"),
    "shared GiB": ("workspace_gib", "{:.3g}"),
}
"""Heads of the table: the column and how it is written."""

Row = dict[str, Any]


def problems(frame: pd.DataFrame) -> dict[tuple[Any, ...], dict[str, Row]]:
    """By problem, the newest row of each variant (with its options), in the order in which variants are declared."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    rows = plain_rows(frame[frame["workload"] == WORKLOAD.name].sort_values("started_at"))
    declared = list(WORKLOAD.variants)
    rows.sort(key=lambda row: declared.index(row["variant"]) if row["variant"] in declared else len(declared))
    for row in rows:
        row["hardware"] = row.get("gpu_name") or row.get("cpu_model") or "unknown"
        row["step_ms"] = row.get("device_ms") or row.get("time_ms")
        unusual = {name: row[name] for name, plain in OPTIONS.items() if row.get(name) not in (None, plain)}
        options = [f" {name}={value}".lower() for name, value in unusual.items()]
        found.setdefault(tuple(row[name] for name in PROBLEM), {})[row["variant"] + "".join(options)] = row
    return dict(sorted(found.items(), key=lambda item: [str(each).rjust(12) for each in item[0]]))


def markdown(frame: pd.DataFrame) -> str:
    """A table for each problem."""
    parts = []
    for key, rows in problems(frame).items():
        parts.append(", ".join(f"{name} {value}" for name, value in zip(PROBLEM, key, strict=True)))
        known = {name for row in rows.values() for name in row if _number(row, name) is not None}
        heads = [head for head, (name, _) in TABLE.items() if name in known]
        lines = [f"| variant | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(heads)]
        for variant, row in rows.items():
            cells = [_cell(row, *TABLE[head]) for head in heads]
            if row["status"] != "ok":
                cells = [row["status"], *("" for _ in heads[1:])]
            lines.append(f"| {variant} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _number(row: Row, name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _cell(row: Row, name: str, form: str) -> str:
    value = _number(row, name)
    return "-" if value is None else form.format(value)


def only(frame: pd.DataFrame, wanted: Sequence[str]) -> pd.DataFrame:
    """The rows that have the given values, each as NAME=VALUE. Raises JobError for what no row has."""
    for each in wanted:
        name, _, value = each.partition("=")
        if name not in frame:
            raise JobError(unknown("column", name, [*PROBLEM[1:], "variant"]))
        present = frame[name].astype(str)
        if value not in set(present):
            raise JobError(f"in these rows, {unknown(name, value, set(present))}")
        frame = frame[present == value]
    return frame


def timeline(frame: pd.DataFrame, file: Path) -> None:
    """Draw a step of each variant of the only problem that was traced, or JobError that says how to choose one."""
    from tpbench.report.plots import style
    from tpbench.report.plots.timeline import is_traced, panels

    style.require()
    if file.suffix not in (".png", ".svg"):
        raise JobError(f"--timeline {file} must end in .png or .svg")
    traced = {
        " ".join(f"{name}={value}" for name, value in zip(PROBLEM[1:], key[1:], strict=True)): cells
        for key, rows in problems(frame).items()
        if (cells := [(variant, row) for variant, row in rows.items() if is_traced(row)])
    }
    if not traced:
        raise JobError("no row of these has a traced step")
    if len(traced) > 1:
        raise JobError("the timeline is of one problem: choose with --only NAME=VALUE among\n  " + "\n  ".join(traced))
    ((problem, cells),) = traced.items()
    with style.drawing("timeline"):
        figure = panels(problem, cells)
        file.write_bytes(style.png(figure) if file.suffix == ".png" else style.svg(figure))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; exits 2 for what cannot be answered."""
    parser = argparse.ArgumentParser(prog="tp_block.report", description="What a block's step is made of, by variant.")
    parser.add_argument("where", nargs="*", default=["outputs"], help="folders, files or globs of rows (outputs)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME=VALUE", help="only rows that have these values")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="draw a step of each variant (.png, .svg)")
    asked = parser.parse_args(arguments)
    try:
        from tpbench.report.rows import read_rows

        frame = read_rows(asked.where)
        frame = only(frame[frame["workload"] == WORKLOAD.name], asked.only)
        if frame.empty:
            raise JobError(f"no row of {WORKLOAD.name} is there")
        if asked.timeline:
            timeline(frame, asked.timeline)
        else:
            print(markdown(frame), end="")
    except (JobError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
