"""`python -m tpbench.console.conf_comments`: write the comments of fields in conf/*.yaml from the fields' help."""

from __future__ import annotations

import dataclasses
import re
import typing

from tpbench.console.defaults import SETTINGS_FILES

_LINE = re.compile(r"(\w+): ([^#\n]*?) *(#.*)?")
_COMMENT_COLUMN = 24


def with_comments(text: str, settings: tuple[type, ...]) -> str:
    """Return the YAML text with a comment behind each field of the settings: its help and its choices."""
    helps = {each.name: _help(cls, each) for cls in settings for each in dataclasses.fields(cls)}
    lines = []
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match and match[1] in helps:
            line = f"{f'{match[1]}: {match[2]}':<{_COMMENT_COLUMN - 2}}  # {helps[match[1]]}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _help(cls: type, each: dataclasses.Field[object]) -> str:
    hint = typing.get_type_hints(cls)[each.name]
    text: str = each.metadata["help"]
    choices = [str(choice) for choice in typing.get_args(hint)] if typing.get_origin(hint) is typing.Literal else []
    explained = all(re.search(rf"\b{choice}\b", text) for choice in choices)
    return text if explained else f"{text} [{', '.join(choices)}]"


if __name__ == "__main__":
    for file, settings in SETTINGS_FILES.items():
        file.write_text(with_comments(file.read_text(encoding="utf-8"), settings), encoding="utf-8")
