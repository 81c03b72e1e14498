"""`python -m tpbench.console.pages`: write what pages show from the code and from the committed rows.

It writes the reference of the command line, the list of columns, and the tables and pictures of all pages. A table in a
page is a block: a comment with a command, its output, and a closing comment. Here is an example.

    <!-- scripts/report.py outputs/reference --loss cross_entropy --format markdown -->

    | ... |

    <!-- end -->

Each output is replaced by what the command prints today. A new block needs only its first comment. A comment whose
command ends with an .svg file draws a picture of the page, and has no output.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tpbench
from tpbench.console.catalogue import sections
from tpbench.console.fields import choice, names, settings_fields
from tpbench.job import Job
from tpbench.launcher.options import SweepOptions
from tpbench.launcher.slurm.cluster import SlurmSettings
from tpbench.measure.session import MeasureSettings
from tpbench.predict.command import main as predict
from tpbench.report.command import main as report
from tpbench.results import schema
from tpbench.settings import JobError, spelled
from tpbench.workloads import workloads

ROOT = Path(tpbench.__file__).resolve().parents[1]
COMMANDS = {"report": report, "predict": predict}
BLOCK = re.compile(
    r"(?P<head><!-- scripts/(?P<script>report|predict)\.py (?P<arguments>(?:(?!\.svg -->)[^\n])*) -->\n)"
    r"(?:(?:(?!<!--).)*<!-- end -->\n)?",
    flags=re.DOTALL,
)
PICTURE = re.compile(r"<!-- scripts/(?P<script>report|predict)\.py (?P<arguments>[^\n]* (?P<file>[^\s]+\.svg)) -->\n")


def pages() -> list[Path]:
    """Return the pages whose tables and figures come from rows. They exist only in a checkout."""
    guides = sorted({*(ROOT / "tpbench/docs").glob("*.md")} - {ROOT / "tpbench/docs/reference.md"})
    return [ROOT / "README.md", *guides, ROOT / "tpbench/kernels/README.md", ROOT / "outputs/README.md"]


def with_tables(text: str) -> str:
    """Return the text of a page with each block's output as it is today. Raises JobError if a command fails."""
    return BLOCK.sub(
        lambda match: f"{match['head']}\n{_output(match['script'], match['arguments'])}\n<!-- end -->\n", text
    )


def _output(script: str, arguments: str) -> str:
    """Return what a command prints. Output that is not Markdown becomes a code block."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = COMMANDS[script](shlex.split(arguments))
    if code:
        raise JobError(f"scripts/{script}.py {arguments}\n{err.getvalue()}")
    return out.getvalue() if "--format markdown" in arguments else f"```text\n{out.getvalue()}```\n"


_HEAD = """\
# Reference of the command line

Made by `python -m tpbench.console.pages`. [The command line](command_line.md) explains how these are used.
"""
_DEFAULTS = """\
A command line without the field gets the default. With "from `shape=`" the choice of that group sets the field; with
"or from" only some choices do.
"""


def reference() -> str:
    """Return the page of all choices and fields of the command line, as Markdown."""
    parts = [_HEAD, "## Choices\n"]
    for title, entries in sections(gpus=0):
        rows = ((f"`{entry.name}`", entry.summary) for entry in entries)
        parts += [f"### {' '.join(title.split())}\n", _table(("name", "meaning"), rows)]
    parts += ["### block_cap=\n", " ".join(f"`{name}`" for name in names("block_cap")) + "\n"]
    parts += ["### measure=\n", _table(("name", "fields"), _contents("measure"))]
    parts.append("## Fields\n\n" + _DEFAULTS)
    parts += _fields("of every job", Job)
    parts += _fields("of a measurement", MeasureSettings)
    parts += _fields("of a whole sweep", SweepOptions)
    for workload in workloads().values():
        parts += _fields(f"of {workload.name}", workload.problem)
    parts += _fields("of Slurm jobs: hydra.launcher.NAME=VALUE", SlurmSettings)
    return "\n".join(parts)


def _contents(group: str) -> Iterable[tuple[str, str]]:
    """Yield each choice of a group with the fields that it sets."""
    for name in names(group):
        fields = choice(group, name)
        yield f"`{name}`", " ".join(f"`{field}={spelled(value)}`" for field, value in fields.items() if field != group)


def _fields(owner: str, settings: type[Any]) -> list[str]:
    rows = []
    for field in settings_fields(settings):
        default = [f"`{field.default}`" * (field.default is not None), f"from `{field.group}=`" * bool(field.group)]
        values = " ".join(f"`{choice}`" for choice in field.choices) or field.limits
        rows.append((f"`{field.name}`", " or ".join(filter(None, default)), values, field.help))
    return [f"### Fields {owner}\n", _table(("name", "default", "values", "meaning"), rows)]


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [" | ".join(cell.replace("|", "\\|") for cell in cells) for cells in (heads, ["---"] * len(heads), *rows)]
    return "".join(f"| {line} |\n" for line in lines)


def main() -> int:
    """Write the pages and draw their pictures. Return 0."""
    for page in pages():
        for script, arguments, _ in PICTURE.findall(page.read_text(encoding="utf-8")):
            _output(script, arguments)
    written = {page: with_tables(page.read_text(encoding="utf-8")) for page in pages()}
    written |= {ROOT / "tpbench/docs/reference.md": reference(), ROOT / "outputs/SCHEMA.md": schema.page()}
    for page, text in written.items():
        if page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JobError as error:
        sys.exit(f"pages: {error}")
