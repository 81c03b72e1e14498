"""The command line before Hydra parses it: what is wrong with it, and the rewrites that Hydra has no setting for.

The names of fields are checked where jobs are made of them (`tpbench.job.parse_job`).
"""

import re
import shlex
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn, get_type_hints

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.errors import OverrideParseException

from tpbench.job import Job
from tpbench.launcher.command_line.outside_choices import choice_name, command_line_variants, typed_choices
from tpbench.launcher.options import (
    CODE,
    COMMANDS,
    CONF,
    GROUPS,
    SWEEP_OPTION_NAMES,
    SlurmSettings,
    SweepOptions,
    aliases,
    command_line_names,
)
from tpbench.measure.session import MeasureSettings
from tpbench.settings import JobError, is_text, user_path
from tpbench.suggestions import SYNONYMS, nearest, printable
from tpbench.workloads import workloads

typed: list[str] = []
"""The command line as the user typed it. `sys.argv` holds the one that Hydra gets."""

MAX_CELLS = 10_000
"""Most values of a range. Every cell is composed before the first one runs."""

_ENVIRONMENT = re.compile(r"\$\{\s*oc\.(env|\$)")
_QUOTED = re.compile(r"""'[^']*'|"[^"]*\"""")
_ELEMENT = re.compile(rf"""{_QUOTED.pattern}|[^,'"]+""")
"""A text of several, with its quotation marks."""
_VALUE = re.compile(rf"(?:^|,)((?:{_QUOTED.pattern}|[^,])*)")
"""A value of a list: commas in quotation marks belong to it."""
_PLAIN = re.compile(r"(?!(?:true|false|inf|nan)$)[A-Z_/][A-Z0-9_./:-]*", re.IGNORECASE)
"""A text that Hydra takes as it is: no number, no truth value, nothing with a meaning in Hydra's grammar."""
_OF_HYDRA = re.compile(r"\+*(hydra[./]launcher\b|hydra\.searchpath=|hydra\.mode=MULTIRUN$)")


def for_hydra(arguments: Sequence[str]) -> list[str]:
    """Return the command line as Hydra gets it, options first. Raises JobError with a line for each mistake."""
    if (right := without_dashes(arguments)) != list(arguments):
        raise JobError(f"fields have no dashes in front: write python -m tpbench {shlex.join(right)}")
    arguments = without_aliases(arguments)
    options, overrides = parse_options(arguments)
    first = list(arguments)
    for override in overrides:
        first.remove(override)
    folders = [CONF, *map(Path, filter(None, [options.config_dir]))]
    if not folders[-1].is_dir():
        raise JobError(f"no such folder of configuration files: {folders[-1]}")
    overrides = rewritten(overrides, folders)
    given: dict[str, str] = {}
    for override in overrides:
        name = override.partition("=")[0].lstrip("+")
        if (other := given.setdefault(name, override)) is not override:
            raise JobError(f"{other} and {override} both set {name}: leave out one of them")
    check_overrides(overrides, options.multirun)
    return [*first, *accepted_by_hydra(overrides), "hydra.mode=MULTIRUN"]  # also for one job


def parse_options(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return Hydra's options and the overrides. Raises JobError for an option that doesn't exist or has no value."""
    parser = get_args_parser()

    def raise_error(message: str) -> NoReturn:
        raise JobError(f"{message} (python -m tpbench --hydra-help lists Hydra's options)")

    setattr(parser, "error", raise_error)  # noqa: B010  mypy forbids an assignment; argparse would print its own usage
    parsed, rest = parser.parse_known_intermixed_args(list(arguments))
    if unknown_options := [word for word in rest if word.startswith("-")]:
        raise_error(f"no such option: {', '.join(unknown_options)}")
    return parsed, list(parsed.overrides)


def without_aliases(arguments: Sequence[str]) -> list[str]:
    """Write other names of fields, which workloads declare, as the names here."""
    given = {argument.partition("=")[0] for argument in arguments}
    words: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals or name not in aliases():
            words.append(argument)
            continue
        for meaning in aliases()[name].split():
            field, _, template = meaning.partition("=")
            if "{}" in template or field not in given:
                values = dict.fromkeys(template.replace("{}", each) for each in value.split(","))
                words.append(f"{field}={','.join(values)}")
    return words


def without_dashes(arguments: Sequence[str]) -> list[str]:
    """Return the command line that is meant if fields have dashes in front, as in `--tokens 64`."""
    names = aliases().keys() | command_line_names() | set(GROUPS)
    words: list[str] = []
    has_dashes = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        field = name.removeprefix("--").replace("-", "_")
        field = SYNONYMS.get(field, field)
        if name.startswith("--") and field in names:
            words.append(f"{field}{equals}{value}")
            has_dashes = True
        elif words and words[-1] in names and not equals and not name.startswith("-"):
            words[-1] += f"={argument}"
        else:
            words.append(argument)
    if not has_dashes:
        return list(arguments)
    words = [f"{word}=true" if word in names else word for word in words]
    several = any("," in word for word in words) and not {"-m", "--multirun"} & {*words}
    return ["-m", *words] if several else words


def rewritten(overrides: Sequence[str], folders: Sequence[Path] = (CONF,)) -> list[str]:
    """Return the overrides with choices that Hydra knows for a user's files, folders and ids. Raises JobError."""
    words: list[str] = []
    for override in overrides:
        name, equals, value = override.partition("=")
        value = re.sub(r"^choice\(([^()]*)\)$", r"\1", value)
        if name in ("variant", "model", "loss"):
            file, _, function = value.rpartition(":")
            is_path = Path(file).is_file() and "," not in function  # a single path may have a comma
            values = [value] if is_path else _VALUE.findall(value)
            value = ",".join(choice_name(name, each.strip(" '\""), folders) or each for each in values)
        elif name in ("model_dir", "output_dir"):  # Hydra's grammar has no ~
            value = ",".join(str(user_path(path)) if path.startswith("~") else path for path in value.split(","))
        words.append(f"{name}{equals}{value}")
    own = [variant.workload for variant in command_line_variants.values() if variant.definition]
    if own and not any(word.startswith("shape=") for word in words):
        words.append(f"shape={own[0]}")  # the shape of a workload from outside
    return words


def check_overrides(arguments: Iterable[str], sweeps: bool = True) -> None:
    """Raise JobError with a line for each override that can mean nothing here. `sweeps`: the command line has -m."""
    overrides = parsed_overrides(arguments)
    sweeps = sweeps or any(override.key_or_group in ("experiment", "hydra.mode") for override in overrides)
    mistakes = [_mistake(override, str(override.input_line), sweeps) for override in overrides]
    if errors := list(filter(None, mistakes)):
        raise JobError("\n".join(dict.fromkeys(errors)))


def parsed_overrides(arguments: Iterable[str]) -> list[Override]:
    """Return the parsed overrides. Raises JobError with one line for each argument that is not an override."""
    parser = OverridesParser.create()
    overrides, errors = [], []
    form = "write NAME=VALUE, or several values as -m NAME=VALUE1,VALUE2"
    advice = f" ({form}; commands come first: {', '.join(COMMANDS)})"
    for argument in arguments:
        name, equals, value = argument.partition("=")
        try:
            overrides += parser.parse_overrides(accepted_by_hydra([argument]))
            overrides[-1].input_line = argument
        except OverrideParseException:
            if equals:
                value = value.replace("'", r"\'")
                errors.append(
                    f"{argument} is not understood: values are separated by single commas without spaces, brackets and "
                    f"quotation marks match, and other special characters are quoted twice: \"{name}='{value}'\""
                )
            else:
                names = {*COMMANDS, *aliases(), *command_line_names(), *GROUPS}
                meant = "" if argument in names else nearest(argument, names)
                errors.append(f"'{argument}' has no value{meant}{advice}")
                advice = ""  # once is enough
    if errors:
        raise JobError("\n".join(dict.fromkeys(errors)))
    return overrides


def _mistake(override: Override, line: str, sweeps: bool) -> str | None:
    """Return why an override that Hydra understands can mean nothing here, or None. `sweeps`: several values may."""
    key, value, is_sweep = str(override.key_or_group), override.value(), override.is_sweep_override()
    of_hydra = key.startswith("hydra")
    if of_hydra and not _OF_HYDRA.match(line):
        return f"{printable(line)} has no effect: hydra/launcher, hydra.launcher.X, hydra.searchpath have one"
    if CODE in line:
        return f"{printable(line)}: {CODE} names Python code, which isn't allowed"
    if _ENVIRONMENT.search(line) and key != "output_dir" and not of_hydra:
        # The value would be in messages and in the rows.
        return f'{printable(line)} reads a variable of the environment: let the shell do it, {key}="$NAME"'
    if (is_sweep or line == "variant=all") and not (sweeps or of_hydra):
        return f"{line} is a sweep: add -m (python -m tpbench -m ...)"
    if "." in key and not of_hydra:
        return f"{line}: no field has a dot in its name: write {key.rpartition('.')[2]}=VALUE"
    if key == "workload":
        return "a workload is chosen by its variant and shape (python -m tpbench list WORKLOAD shows them)"
    if isinstance(value, RangeSweep) and abs((value.stop or 0) - (value.start or 0)) > MAX_CELLS * abs(value.step):
        return f"{line} has more than {MAX_CELLS} values"
    if key == "experiment" and (is_sweep or isinstance(value, list)):
        return f"{line}: experiments run one after the other, each with a command of its own"
    if key in GROUPS and (value is None or isinstance(value, (list, dict))):
        return f"{line} is not one choice: write several as -m {key}=A,B (python -m tpbench list shows them)"
    return None


def accepted_by_hydra(arguments: Iterable[str]) -> list[str]:
    """Return overrides as Hydra accepts them: `block_cap='4096'` and `++width=64`."""
    texts = _text_fields()
    words = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        key = name.lstrip("+")
        if key in texts and not re.search(r"[(\[{\\]", _QUOTED.sub("", value)):
            value = _ELEMENT.sub(_quoted, value)
        # Fields are forced: Hydra first composes a job of the default variant, which may lack the field.
        is_field = re.fullmatch(r"(?!hydra)\w[\w.]*", key) and key not in GROUPS
        words.append(f"{f'++{key}' if is_field and equals else name}{equals}{value}")
    return words


def _quoted(text: re.Match[str]) -> str:
    """Return a text in quotation marks, unless it has them or needs none."""
    plain = text[0].strip()
    return text[0] if not plain or plain[0] in "'\"" or _PLAIN.fullmatch(plain) else f"'{plain}'"


def _text_fields() -> set[str]:
    """Return the names whose values are text, such as choices and paths."""
    problems = [workload.problem for workload in workloads().values()]
    problems += [variant.of_workload.problem for variant in command_line_variants.values()]
    hints = [hint for cls in (Job, MeasureSettings, SweepOptions, *problems) for hint in get_type_hints(cls).items()]
    hints += [(f"hydra.launcher.{name}", hint) for name, hint in get_type_hints(SlurmSettings).items()]
    return {name for name, _ in hints} - {name for name, hint in hints if not is_text(hint)} | {*GROUPS}


def chosen_fields(overrides: Sequence[str]) -> list[str]:
    """Return the names that these overrides of one job set: fields, and groups of only some workloads, such as loss."""
    keys = [override.lstrip("+").partition("=")[0] for override in overrides]
    return [key for key in keys if key not in ("variant", "shape", "experiment") and not key.startswith("hydra")]


def overrides_of_cell(lines: Sequence[str]) -> str:
    """Return the overrides of one cell as a user types them, for a shell. Options of the whole sweep are left out."""
    words: list[str] = []
    for line in lines:
        name, _, value = line.removeprefix("++").partition("=")
        value = re.sub(r"""^'([^'",\\()\[\]{}]*)'$""", r"\1", value)
        value = typed_choices.get((name, value), value)
        if name == "model_dir" and value != "null":
            value = str(user_path(value).resolve())
        words += [f"{name}={value}"] if name not in SWEEP_OPTION_NAMES else []
    return shlex.join(words)
