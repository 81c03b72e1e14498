"""The commands of README, CONTRIBUTING and the pages, as a reader finds them.

A command is a line of a block of bash, or code in a sentence that begins with the name of a program. The comment behind
a line may contain a marker: this command needs more than a laptop, or more than seconds.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.support.command import ROOT

PAGES = (
    "README.md", "CONTRIBUTING.md", "outputs/README.md", "tpbench/kernels/README.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "tpbench/docs").glob("*.md"))),
)  # fmt: skip
MARKER = re.compile(r"\b(needs (a GPU|\d+ GPUs|Slurm|root)|takes minutes)\b")
_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"(?:^|\s)#\s(.*)$")
_PROGRAM = re.compile(r"(?:(?:python|pip|torchrun|tpbench|eval|bash) |(?:scripts|tests|\.ci)/[\w./]+ )(?!/)")


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    page: str
    """The path of the page from the root of the repository."""
    text: str
    """The command without its comment. A continued line is one line."""
    comment: str = ""

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)

    @property
    def is_marked(self) -> bool:
        return MARKER.search(self.comment) is not None

    @property
    def is_sweep(self) -> bool:
        return self.words[:3] == ["python", "-m", "tpbench"] and self.words[3:4] not in (["list"], ["doctor"], ["new"])


def commands(pages: tuple[str, ...] = PAGES) -> list[Command]:
    """Return the commands of the pages, in their order."""
    return [command for page in pages for command in commands_of(page, (ROOT / page).read_text())]


def commands_of(page: str, text: str) -> list[Command]:
    """Return the commands in the text of a page."""
    blocks = [block for language, block in _BLOCK.findall(text) if language == "bash"]
    lines = [line.strip() for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    found = [Command(page, _COMMENT.sub("", line).strip(), "".join(_COMMENT.findall(line))) for line in lines]
    sentences = re.sub(r"<!--.*?-->", "", _BLOCK.sub("", text), flags=re.DOTALL)
    for code in re.findall(r"`([^`]+)`", sentences):
        flat = " ".join(code.split())
        if _PROGRAM.match(flat) and not flat.endswith(" ARGS"):
            found.append(Command(page, flat))
    return [each for each in found if each.text]


def documented(words: str) -> list[str]:
    """Return the arguments of the only documented sweep that contains these words. Tests run it with more arguments."""
    (text,) = {each.text for each in commands() if each.is_sweep and words in each.text}
    return shlex.split(text)[3:]


def missing_file(command: Command) -> Path | None:
    """Return the first file or folder of the repository that the command names and that does not exist."""
    named = [Path(word) for word in command.words if re.match(r"(scripts|tests|conf|tpbench|\.ci)/", word)]
    return next((path for path in named if not (ROOT / path).exists()), None)
