"""The names on a command line: Hydra's options, other names of fields, and fields with dashes in front of them."""

import shlex
from argparse import Namespace
from collections.abc import Sequence
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from tpbench.launcher.options import GROUPS, aliases, command_line_names
from tpbench.settings import JobError


def parse_options(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return Hydra's options with the overrides, and unknown options. Raises JobError for a wrong value of one."""
    parser = get_args_parser()

    def raise_error(message: str) -> NoReturn:
        raise JobError(f"{message} (python -m tpbench --hydra-help lists Hydra's options)")

    setattr(parser, "error", raise_error)  # noqa: B010  mypy forbids an assignment; argparse would print its own usage
    parsed, rest = parser.parse_known_intermixed_args(list(arguments))
    return parsed, [each for each in rest if each.startswith("-")]


def without_aliases(arguments: Sequence[str]) -> list[str]:
    """Write other names of fields, which workloads declare, as the names here.

    Raises JobError if two arguments set one field by different names.
    """
    given = {argument.partition("=")[0].lstrip("+"): argument for argument in arguments}
    words: list[str] = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        for meaning in aliases().get(name, "").split():
            field, _, template = meaning.partition("=")
            if field not in given:
                given[field] = argument
                values = dict.fromkeys(template.replace("{}", each) for each in value.split(","))
                words.append(f"{field}={','.join(values)}")
            elif "{}" in template:
                raise JobError(f"{given[field]} and {argument} both set {field}: leave out one of them")
        words += [] if name in aliases() else [argument]
    return words


def refuse_dashes(arguments: Sequence[str]) -> None:
    """Raise JobError with the right command line if fields have dashes in front, as in `--tokens 64`.

    That line leaves out options that do not exist here, and the message names them.
    """
    names = aliases().keys() | command_line_names() | set(GROUPS)
    unknown = {option.partition("=")[0] for option in parse_options(arguments)[1]}
    plain, left_out, words, has_dashes = [], [], list(arguments), False
    while words:
        name, equals, value = words.pop(0).partition("=")
        field = name.removeprefix("--").replace("-", "_")
        is_field = name.startswith("--") and field in names
        if not is_field and name not in unknown:
            plain.append(f"{name}{equals}{value}")
            continue
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("-") and "=" not in words[0] else "true"
        has_dashes |= is_field
        if is_field:
            plain.append(f"{field}={value}")
        else:
            left_out.append(f"left out: {name} has no counterpart here")
    if not has_dashes:
        return
    if any("," in word for word in plain) and not {"-m", "--multirun"} & set(plain):
        plain.insert(0, "-m")
    right = f"fields have no dashes in front: write python -m tpbench {shlex.join(plain)}"
    raise JobError("\n".join((right, *left_out)))
