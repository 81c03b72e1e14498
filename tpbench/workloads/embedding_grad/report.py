"""`python -m tpbench.workloads.embedding_grad.report outputs`: speed-ups over dense by density, and where they end.

Rows of one table, world size, distribution and kind of machine, under one driver, NCCL and torch, belong together;
among them only how many rows are touched differs. Dates, hosts and tpbench's own versions may differ: the newest row of
a cell stands for it. Rows of other versions of what moves the bytes are a comparison of their own, whose heading names
them. Device times where there are any. Interpreted rows are no measurement and left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from tpbench.settings import JobError
from tpbench.workloads.embedding_grad import crossover
from tpbench.workloads.embedding_grad.problem import WORKLOAD

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DENSE = "dense_reduce_scatter"
PREDICTED = "sparse_all_to_all"
"""What the formula of the crossover is about: a gather, all-to-alls and a merge."""
SOFTWARE = {"driver_version": "driver", "nccl_version": "NCCL", "torch_version": "torch"}
"""Whose versions a time may depend on, with what they are called; torch's says which CUDA it was built with."""
TOGETHER = [
    "hardware",
    "software",
    "dtype",
    "table_rows",
    "width",
    "dp_size",
    "distribution",
    "overlap_ms",
    "transfers",
]
"""What must be the same for times to be compared over densities; of skewed rows the busiest rank has more."""
PANELS = 3
"""Side by side in a picture; further ones go below."""
OPTIONS = {"merge": "triton", "pinned": True, "graph": False}
"""Options that make another column of a variant, with what is not mentioned."""


def speedups(frame: pd.DataFrame) -> pd.DataFrame:
    """A line for each right row that is not the dense reduce-scatter: density, ms, dense_ms and their ratio `speedup`.

    dense_ms is of the newest dense row of the same density; where there is none, the median over those of any: it sends
    the whole table. Never of one with graph=true, as no sparse exchange can be captured: replayed dense rows are lines
    too.
    """
    rows = _usable(frame)
    if rows.empty:
        return pd.DataFrame(columns=[*TOGETHER, "head", "density", "ms", "dense_ms", "speedup", "predicted_crossover"])
    dense = rows[rows["head"] == DENSE]
    others = rows[rows["head"] != DENSE]
    exactly = [*TOGETHER, "density"]
    same = dense.groupby(exactly)["ms"].last().rename("same_ms").reset_index()
    any_ = dense.groupby(TOGETHER)["ms"].median().rename("any_ms").reset_index()
    others = others.merge(same, how="left", on=exactly).merge(any_, how="left", on=TOGETHER)
    others["dense_ms"] = others["same_ms"].fillna(others["any_ms"])
    others["speedup"] = others["dense_ms"] / others["ms"]
    kept = [*TOGETHER, "head", "density", "ms", "dense_ms", "speedup", "predicted_crossover"]
    return others[kept].sort_values([*TOGETHER, "head", "density"], ignore_index=True)


def crossovers(found: pd.DataFrame) -> pd.DataFrame:
    """From `speedups`: for each table and variant the density at which dense becomes faster, measured and predicted.

    `off` is predicted over measured, less 1; only all-to-alls with nothing beside them have a prediction. `instead`:
    where none was reached, what was measured. Not for variants that go dense themselves, nor of a single density, which
    has no crossover.
    """
    lines = []
    sparse = found[~found["head"].str.startswith(("dense", "sparse_auto"))].dropna(subset=["dense_ms"])
    for key, group in sparse.groupby([*TOGETHER, "head"]):
        points = [(float(str(at)), ms) for at, ms in group.groupby("density")["ms"].median().items()]
        if len(points) < 2:
            continue
        dense_ms = float(group["dense_ms"].median())
        measured = crossover.measured(points, dense_ms)
        (first, fastest), (last, slowest) = points[0], points[-1]
        instead = None
        if measured is None and slowest <= dense_ms:
            instead = f"none up to {100 * last:.3g}%"
        elif measured is None and fastest > dense_ms:
            instead = f"dense from {100 * first:.3g}% on"
        alone = key[TOGETHER.index("overlap_ms")] == 0
        of_formula = alone and str(key[-1]).split()[0] == PREDICTED
        predicted = float(group["predicted_crossover"].median()) if of_formula else None
        off = None if measured is None or predicted is None else predicted / measured - 1
        lines.append((*key, measured, predicted, off, instead))
    return pd.DataFrame(lines, columns=[*TOGETHER, "head", "measured", "predicted", "off", "instead"])


def _usable(frame: pd.DataFrame) -> pd.DataFrame:
    """Right rows that measure something, with their time as `ms` and their column's name as `head`."""
    rows = frame[(frame["workload"] == WORKLOAD.name) & (frame["status"] == "ok")]
    rows = rows[~rows["interpreted"].fillna(False).astype(bool)].sort_values("started_at").copy()
    if rows.empty:
        return rows
    rows["ms"] = rows["device_ms"].fillna(rows["time_ms"]).astype(float)
    rows["hardware"] = rows["gpu_name"].fillna(rows["cpu_model"]).fillna("unknown")
    rows["density"] = rows["density"].astype(float).round(4)
    rows["graph"] = rows["graph"].fillna(False).astype(bool)
    rows["software"] = [
        " ".join(f"{label} {row[name]}" for name, label in SOFTWARE.items() if not pd.isna(row[name]))
        for row in rows.to_dict("records")
    ]
    named = [
        [row["variant"], *(f"{name}={row[name]}".lower() for name, plain in OPTIONS.items() if row[name] != plain)]
        for row in rows.to_dict("records")
    ]
    rows["head"] = [" ".join(each) for each in named]
    return rows.drop_duplicates([*TOGETHER, "head", "density"], keep="last")


def markdown(frame: pd.DataFrame) -> str:
    """Both as Markdown: a table of speed-ups for each machine and table, or what is missing for one; then the
    crossovers."""
    found = speedups(frame)
    parts = []
    for key, group in found.groupby(TOGETHER):
        facts = zip(TOGETHER, key, strict=True)
        parts.append(", ".join(f"{name} {value}" for name, value in facts if value not in (0.0, "early", "")))
        if group["dense_ms"].isna().all():
            lone = ", ".join(sorted(set(group["head"])))
            parts.append(f"No row of {DENSE} was measured there: there is nothing to compare {lone} with.")
            continue
        grid = group.pivot_table(index="density", columns="head", values="speedup")
        times = grid.map(lambda ratio: "-" if pd.isna(ratio) else f"{ratio:.2f}x")
        parts.append(_table([f"{100 * at:.3g}%" for at in grid.index], "density", times))
    ends = crossovers(found)
    if len(ends):
        parts.append(f"density at which {DENSE} becomes faster")
        several = found["software"].nunique() > 1
        heads = [
            "{head}, width {width}, {dp_size} ranks, {distribution}".format(**end) + _besides(end, several)
            for end in ({str(name): value for name, value in each.items()} for each in ends.to_dict("records"))
        ]
        table = ends[["measured", "predicted", "off"]].astype(float).map(lambda share: f"{100 * share:.3g}%")
        table["measured"] = ends["instead"].fillna(table["measured"])
        parts.append(_table(heads, "variant", table.replace("nan%", "-")))
    return "\n\n".join(parts) + "\n"


def _besides(facts: Mapping[str, Any], several: bool) -> str:
    """What the exchange had beside it, as the end of a name; and the software, where there are several."""
    beside = ", overlap_ms={overlap_ms:g}, transfers={transfers}".format(**facts) if facts["overlap_ms"] else ""
    return beside + (f", {facts['software'] or 'unknown software'}" if several else "")


def _table(names: Sequence[str], title: str, grid: pd.DataFrame) -> str:
    lines = [f"| {title} | {' | '.join(map(str, grid.columns))} |", "| --- |" + " --- |" * len(grid.columns)]
    lines += [f"| {name} | {' | '.join(values)} |" for name, values in zip(names, grid.to_numpy(), strict=True)]
    return "\n".join(lines)


def draw(frame: pd.DataFrame) -> Figure | None:
    """Speed-up by density, a panel for each table, world size and distribution, with the crossovers as vertical lines.

    Where there are exchanges alone, those beside a stand-in, whose time is nearly all the stand-in's, are left out.
    """
    from tpbench.report.plots import style

    found = speedups(frame).dropna(subset=["speedup"])
    if found.empty:
        return None
    if (found["overlap_ms"] == 0).any():
        found = found[found["overlap_ms"] == 0]
    ends = crossovers(found)
    several = found["software"].nunique() > 1
    groups = [each for each in found.groupby(TOGETHER) if each[1]["density"].nunique() > 1] or list(
        found.groupby(TOGETHER)
    )
    found = pd.concat(group for _, group in groups)
    heads = sorted(set(found["head"]))
    across = min(PANELS, len(groups))
    down = -(-len(groups) // across)
    figure = style.new_figure(max(5.2, 3.6 * across), 3.4 * down + 0.2 * -(-len(heads) // 3))
    panels = list(figure.subplots(down, across, sharey=True, squeeze=False).flat)
    for axes in panels[len(groups) :]:
        axes.remove()
    panels = panels[: len(groups)]
    for axes, (key, group) in zip(panels, groups, strict=True):
        for head, line in group.groupby("head"):
            index = heads.index(str(head))
            look: dict[str, Any] = {"color": style.colour(index), "marker": style.marker(index)}
            axes.plot(100 * line["density"], line["speedup"], label=head, **look)
        here = ends[(ends[TOGETHER] == pd.Series(dict(zip(TOGETHER, key, strict=True)))).all(axis=1)]
        for end in here.to_dict("records"):
            colour = style.colour(heads.index(end["head"]))
            for name, dashes in (("measured", "-"), ("predicted", ":")):
                if not pd.isna(end[name]):
                    axes.axvline(100 * end[name], color=colour, linestyle=dashes, linewidth=1)
        named = dict(zip(TOGETHER, key, strict=True))
        axes.axhline(1, color=style.ink(), linewidth=1)
        size = f"{named['table_rows']} x {named['width']}, {named['dp_size']} ranks, {named['distribution']}"
        axes.set_title(size + _besides(named, several))
        axes.set_xlabel("rows touched (%)")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    for axes in panels[::across]:
        axes.set_ylabel(f"speed-up over {DENSE}")
    handles = {text: handle for axes in panels for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=style.legend_columns(heads, figure.get_figwidth()),
    )
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; exits 2 for what cannot be answered."""
    parser = argparse.ArgumentParser(prog="embedding_grad.report", description="Sparse over dense, by density.")
    parser.add_argument("where", nargs="*", default=["outputs"], help="folders, files or globs of rows (outputs)")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw it (.png, .svg): crossovers as lines, dotted where predicted"
    )
    asked = parser.parse_args(arguments)
    try:
        from tpbench.report.rows import read_rows

        frame = read_rows(asked.where)
        if speedups(frame).empty:
            raise JobError(f"no row of {WORKLOAD.name} beside {DENSE} was measured there")
        if asked.picture:
            _picture(frame, asked.picture)
        else:
            print(markdown(frame), end="")
    except (JobError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


def _picture(frame: pd.DataFrame, file: Path) -> None:
    from tpbench.report.plots import style

    style.require()
    if file.suffix not in (".png", ".svg"):
        raise JobError(f"--picture {file} must end in .png or .svg")
    with style.drawing("crossover"):
        figure = draw(frame)
        if figure is None:
            raise JobError(f"there is no {DENSE} row to compare with")
        file.write_bytes(style.png(figure) if file.suffix == ".png" else style.svg(figure))


if __name__ == "__main__":
    sys.exit(main())
