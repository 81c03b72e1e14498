"""`python -m tpbench.console.pages`: write tables and pictures of the pages from the committed rows, and check figures.

A table in a page is a block: a comment with a command, its output, and a closing comment. Here is an example.

    <!-- scripts/report.py outputs/reference --loss cross_entropy --format markdown -->

    | ... |

    <!-- end -->

This command replaces each output by what the command prints today. A new block needs only its first comment. A comment
whose command ends with an .svg file draws a picture of the page, and has no output.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
from pathlib import Path

import tpbench
from tpbench.console.page_figures import unprinted_figures
from tpbench.predict.command import main as predict
from tpbench.report.command import main as report
from tpbench.settings import JobError

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


def name(page: Path) -> str:
    """Return the path of a page as messages show it."""
    return os.path.relpath(page, ROOT)


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


def main() -> int:
    """Rewrite the pages and draw their pictures.

    Return 1 if the running text of a page has a figure that none of its tables prints.
    """
    wrong = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for script, arguments, _ in PICTURE.findall(text):
            _output(script, arguments)
        written = with_tables(text)
        if written != text:
            page.write_text(written, encoding="utf-8")
            print(f"wrote {name(page)}")
        wrong += [f"{name(page)}:{figure}" for figure in unprinted_figures(written)]
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JobError as error:
        sys.exit(f"pages: {error}")
