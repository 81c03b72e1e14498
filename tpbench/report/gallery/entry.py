"""An entry of the gallery: a folder of rows with one file `gallery.yaml` that says who measured them and on what."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from tpbench.report.gallery.admission import Refusal, refusals
from tpbench.results.printable import printable
from tpbench.results.read import RowWarning, load
from tpbench.settings import JobError
from tpbench.suggestions import unknown

FILE = "gallery.yaml"
FIELDS = {
    "title": "name of the machine, as the site shows it",
    "by": "who measured",
    "kernels_version": "one value or a list: the column kernels_version of the rows",
    "link": "an https address with more about the machine; may be left out",
    "note": "a sentence about the machine; may be left out",
}
"""Fields of the file, with their meaning."""
_REQUIRED = ("title", "by", "kernels_version")
_LONGEST = 65536
"""Most bytes of the file."""


@dataclass(frozen=True)
class Entry:
    """One folder of the gallery."""

    title: str
    by: str
    link: str
    note: str
    frame: pd.DataFrame
    """The admitted rows."""
    refused: tuple[Refusal, ...]
    """Rows that are not shown, with the reasons."""
    faults: tuple[str, ...]
    """Files that could not be read, and other warnings about the rows."""

    @property
    def page(self) -> str:
        """The name of the entry's page."""
        return f"{re.sub(r'[^a-z0-9]+', '-', self.title.lower()).strip('-') or 'entry'}.html"


def read_entry(folder: Path) -> Entry:
    """Return the entry of a folder. Raises JobError if its file or all of its rows are unusable."""
    fields = _fields(folder / FILE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RowWarning)
        try:
            frame = load(folder)
        except FileNotFoundError as error:
            raise JobError(str(error)) from None
    if frame.empty:
        raise JobError(f"{folder} has no rows")
    stated = fields["kernels_version"]
    refused = refusals(frame, [stated] if isinstance(stated, str) else list(stated))
    return Entry(
        title=printable(fields["title"], 60),
        by=printable(fields["by"], 100),
        link=printable(fields.get("link") or "", 300),
        note=printable(fields.get("note") or "", 500),
        frame=frame[~frame["row_id"].isin({each.row_id for each in refused})],
        refused=tuple(refused),
        faults=tuple(printable(str(each.message), 500) for each in caught),
    )


def _fields(file: Path) -> Mapping[str, Any]:
    """Return the fields of the file. Raises JobError with every complaint."""
    if not file.is_file():
        raise JobError(f"{file} is missing: write a line for each of {', '.join(_REQUIRED)}")
    if file.stat().st_size > _LONGEST:
        raise JobError(f"{file} has more than {_LONGEST} bytes")
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise JobError(f"{file} is no YAML: {printable(str(error), 300)}") from None
    if not isinstance(values, dict):
        raise JobError(f"{file} must have a line `name: value` for each of {', '.join(FIELDS)}")
    complaints = [unknown("field", printable(str(name), 60), FIELDS) for name in values if name not in FIELDS]
    complaints += [f"{name} is missing ({FIELDS[name]})" for name in _REQUIRED if not values.get(name)]
    for name, value in values.items():
        parts = value if name == "kernels_version" and isinstance(value, list) else [value]
        if name in FIELDS and not all(isinstance(part, str) for part in parts):
            complaints.append(f"{name} must be text, in quotes if it looks like a number ({FIELDS[name]})")
    if isinstance(link := values.get("link"), str) and not link.startswith("https://"):
        complaints.append("link must begin with https://")
    if complaints:
        raise JobError("\n".join(f"{file}: {complaint}" for complaint in complaints))
    return values
