"""Parts that all report commands share: their options, the rows that these select, and the file of the output."""

import argparse
import io
import sys
from collections.abc import Callable, Mapping, Sequence

import pandas as pd
from rich.console import Console

from tpbench import tables
from tpbench.report.analysis.row_values import METRICS, Metric, metric, metrics_of_all
from tpbench.report.plots import render
from tpbench.results.read import load, plain_rows
from tpbench.results.schema import COLUMN_LIST
from tpbench.settings import JobError, spelled, user_path
from tpbench.suggestions import unknown
from tpbench.tables import Document, value_text
from tpbench.workloads.study_data import Picture

FILTERS = ("workload", "variant", "label", "loss", "dtype", "device", "gpu_name")
TABLES: dict[str, Callable[[Document], str]] = {
    "text": lambda document: f"{tables.as_text(document).plain}\n",
    "markdown": tables.as_markdown,
    "csv": tables.as_csv,
    "json": tables.as_json,
}
"""Formats of tables, with their renderers."""
SUFFIXES = {".txt": "text", ".md": "markdown", ".csv": "csv", ".html": "html", ".svg": "svg", ".json": "json"}


class ReportParser(argparse.ArgumentParser):
    """Parser of a command that writes one of these formats: of its options, and of those that all commands share."""

    def __init__(self, command: str, formats: Sequence[str], **texts: str) -> None:
        super().__init__(f"tpbench {command}", **texts)  # type: ignore[arg-type]
        self.formats = formats
        if formats:
            self.add_argument("--format", choices=formats, help="(that of the suffix of -o, else text)")
            self.add_argument("-o", "--output", type=user_path, metavar="FILE", help="write there")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the options, with the format that the suffix of the output file means. Raises JobError for another."""
        options = self.parse_args(arguments)
        if self.formats and not options.format:
            suffix = options.output.suffix.lower() if options.output else ""
            options.format = SUFFIXES.get(suffix, "text" if not suffix else "")
            if options.format not in self.formats:
                valid = ", ".join(known for known, name in SUFFIXES.items() if name in self.formats)
                raise JobError(f"-o {options.output}: use one of the suffixes {valid}, or name a --format")
        return options

    def add_filters(self) -> None:
        """Add the places of the rows and the filters."""
        add, only = self.add_argument, "only rows with one of these in"
        add("where", nargs="*", default=["outputs"], help="folders, files or globs of rows (outputs)")
        for name in FILTERS:
            add(f"--{name.replace('_', '-')}", metavar="A,B", help=f"{only} the column {name}")
        add("--only", nargs="+", default=[], metavar="NAME=A,B", help=f"{only} a column")

    def add_test(self, threshold: float) -> None:
        """Add the metric that is tested and the smallest change that counts."""
        usual = "device_ms where all rows have it, else time_ms"
        self.add_argument("--metric", metavar="NAME", help=f"one of: {', '.join(METRICS)} ({usual})")
        smallest = f"smallest change that counts ({threshold})"
        self.add_argument("--threshold", type=share, default=threshold, metavar="SHARE", help=smallest)


def share(text: str) -> float:
    """Return the share that an option has as text. argparse names this function if the text isn't a number."""
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a share from 0 to 1, say 0.03 or 3%")
    return value


def tested_metric(options: argparse.Namespace, sides: Mapping[str, pd.DataFrame]) -> Metric:
    """Return the metric by which rows are compared: that of the device, which scatters least, if all rows have it.

    `sides` are rows by their place. Raises JobError if no correct row of a side has the metric.
    """
    on_device = pd.concat([frame.loc[frame["status"] == "ok", "device_ms"] for frame in sides.values()]).notna()
    shown = metric(options.metric or ("device_ms" if len(on_device) and on_device.all() else "time_ms"))
    for place, frame in sides.items():
        require_values(frame, shown.name, place)
    return shown


def read_rows(places: Sequence[str]) -> pd.DataFrame:
    """Return the rows in folders, files or globs. Raises JobError if there are none. Warnings go to stderr."""
    try:
        frame = load(places)
    except FileNotFoundError as error:
        raise JobError(f"{error}: run `python -m tpbench ...` first, or name the folder") from None
    if frame.empty:
        how = "run `python -m tpbench ...` first, or name its output_dir, and --only sweep_id=ID for one sweep"
        raise JobError(f"no rows in {', '.join(places)}: {how}")
    return frame


def rows_of(place: str) -> str:
    """Return where the rows of a sweep's output folder are: its own ones, or without any the reference beside them."""
    own, reference = (user_path(place, "a place of rows") / name for name in ("rows", "reference"))
    if any(own.rglob("*.parquet")):
        return str(own)
    if not any(reference.rglob("*.parquet")):
        return place
    print(f"tpbench: {place} has no rows of your own, so these are the reference rows in {reference}", file=sys.stderr)
    return str(reference)


def selected_rows(options: argparse.Namespace, frame: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return the rows that pass all filters, of `frame` or else of the options' places. Raises JobError without any."""
    frame = read_rows([rows_of(place) for place in options.where]) if frame is None else frame
    filters = [f"{name}={getattr(options, name)}" for name in FILTERS if getattr(options, name) is not None]
    for condition in [*filters, *options.only]:
        name, equals, value = condition.partition("=")
        if not equals:
            raise JobError(f"--only {condition}: the equals sign is missing: write --only {condition}=VALUE")
        if name not in frame:
            raise JobError(f"in these rows, {unknown('column', name, frame.columns, COLUMN_LIST)}")
        values = [row[name] for row in plain_rows(frame[[name]])]
        spellings = [{value_text(value), spelled(value), str(value)} for value in values]
        known = set().union(*spellings)
        wanted = {value} if value in known else set(value.split(","))  # a value may contain a comma
        for text in sorted(wanted - known):
            present = {value_text(value) for value in values if value is not None}
            place = f"--columns {name}" if len(present) > 60 else ""  # a list of sizes may fill the screen
            raise JobError(f"in these rows, {unknown(name, text, present, place)}")
        frame = frame[[not wanted.isdisjoint(texts) for texts in spellings]]
    return frame


def require_values(frame: pd.DataFrame, name: str, where: str = "") -> None:
    """Raise JobError if no correct row has the metric. If no row is correct, a report shows the failures."""
    measured = frame[frame["status"] == "ok"]
    present = [other for other in metrics_of_all() if other in measured and measured[other].notna().any()]
    doc, place = metric(name).doc, where and f" of {where}"
    if not measured.empty and name not in present:
        raise JobError(f"no row{place} has {name} ({doc}); they have: {', '.join(present)}")


def write(content: Document | Picture | str, options: argparse.Namespace, name: str = "") -> None:
    """Print a document, a picture of that name or a text, or write it to a file. Warnings go to stderr."""
    form, output = options.format, options.output
    if isinstance(content, Picture):
        content = render(content, name)
    elif isinstance(content, Document):
        on_screen = output is None and form in ("text", "markdown") and sys.stdout.isatty() and sys.stderr.isatty()
        for warning in () if on_screen else content.warnings:
            print(f"tpbench: warning: {warning}", file=sys.stderr)
        if form == "text" and output is None:
            console = Console()  # detects a terminal and its colours
            with console.capture() as capture:  # rich itself would end the process if the pipe is closed
                console.print(tables.as_text(content), soft_wrap=True)
            content = capture.get()
        else:
            content = TABLES[form](content)
    if output is not None:
        output.write_text(content, encoding="utf-8", newline="")
        print(f"tpbench: wrote {output}", file=sys.stderr)
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for characters that the terminal cannot show
    sys.stdout.write(content)
    sys.stdout.flush()
