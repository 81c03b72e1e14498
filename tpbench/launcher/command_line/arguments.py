"""The command line before Hydra parses it: what is wrong with it, and the rewrites that Hydra has no setting for.

The names of fields are checked where jobs are made of them (`tpbench.job.parse_job`).
"""

import math
import re
import shlex
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn, get_type_hints

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from hydra.errors import OverrideParseException

from tpbench.job import Job
from tpbench.launcher.command_line.outside_choices import command_line_variants, name_in_rows
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
    read_choice,
)
from tpbench.measure.session import MeasureSettings
from tpbench.outside import source
from tpbench.settings import JobError, is_text, user_path
from tpbench.suggestions import SYNONYMS, nearest, printable
from tpbench.workloads import workloads
from tpbench.workloads.losses import OBJECTIVE_PARAMETERS

typed: list[str] = []
"""The command line as the user typed it. `sys.argv` holds the one that Hydra gets."""

user_files: dict[str, str] = {}
"""The models and losses of user's files that this process's command line has named: the field's value, and what a user
types for it."""

MAX_CELLS = 10_000
"""Most cells of one sweep. Every cell is composed before the first one runs, in about 60 ms each."""

_SEVERAL = re.compile(r"\s+(?=[+~]*[\w./]+=)")
"""White space before another NAME= within one argument."""
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.(env|\$)")
_CHOICE = re.compile(r"""[^,()\[\]{}'"\\]+""")
"""A value among several: what Hydra's grammar separates by commas, brackets and quotation marks."""
_WITH_COMMA = re.compile(r"(/[^'\"]*?,[^'\"]*?\.py):\w+")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})*,0\d\d(?:,\d{3})*")
"""A number with commas. No list of values has one that begins with 0."""
_ELEMENT = re.compile(r"""'[^']*'|"[^"]*"|[^,'"]+""")
"""A text of several, with its quotation marks."""
_PLAIN = re.compile(r"(?!(?:true|false|inf|nan)$)[A-Z_/][A-Z0-9_./:-]*", re.IGNORECASE)
"""A text that Hydra takes as it is: no number, no truth value, nothing with a meaning in Hydra's grammar."""
_OF_HYDRA = re.compile(r"hydra[./]launcher\b|hydra\.(searchpath|mode)$")
"""Settings of Hydra that count here."""


def for_hydra(arguments: Sequence[str]) -> list[str]:
    """Return the command line as Hydra gets it. Raises JobError with a line for each mistake."""
    if (right := without_dashes(arguments)) != list(arguments):
        raise JobError(f"fields have no dashes in front: write python -m tpbench {shlex.join(right)}")
    arguments = rewritten(options_first(without_aliases(arguments)))
    check_overrides(arguments)
    return [*accepted_by_hydra(arguments), "hydra.mode=MULTIRUN"]  # also for one job


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

    Raises JobError if one has no value, or if two arguments set one field by different names.
    """
    given = {argument.partition("=")[0].lstrip("+"): argument for argument in arguments}
    words: list[str] = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name in aliases() and not value:
            raise JobError(f"{name} has no value: write {name}=VALUE")
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


def options_first(arguments: Sequence[str]) -> list[str]:
    """Return Hydra's options, such as -m, and after them all overrides.

    Hydra's own parser rejects overrides after an option that itself stands after an override.
    """
    parsed, _ = parse_options(arguments)
    options = list(arguments)
    for each in parsed.overrides:
        options.remove(each)
    return [*options, *parsed.overrides]


def rewritten(arguments: Sequence[str]) -> list[str]:
    """Return a command line with the names and numbers that Hydra and its files know.

    A file of a variant becomes its name in rows (which is remembered), a model's id or folder the fields `model` or
    `model_dir`, and a loss of a file the field `objective`. Raises JobError for a value that cannot be used.
    """
    words: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name in ("model", "model_dir", "output_dir"):  # Hydra's grammar has no ~
            value = ",".join(str(user_path(path)) if path.startswith("~") else path for path in value.split(","))
        value = re.sub(r"^choice\(([^()]*)\)$", r"\1", value)
        if name not in GROUPS and _THOUSANDS.fullmatch(value):
            raise JobError(f"{argument}: a number has no comma: write {name}={value.replace(',', '')}")
        if name == "variant":
            value = _WITH_COMMA.sub(lambda path: name_in_rows(path[0]) if Path(path[1]).is_file() else path[0], value)
            value = _CHOICE.sub(lambda choice: name_in_rows(choice[0]), value)
        if name == "model" and "/" in value:
            words += _model_and_folders(value, arguments)
        elif name == "loss" and ".py:" in value:
            words += _losses_and_functions(value)
        else:
            words.append(f"{name}{equals}{value}")
    own = [variant.workload for variant in command_line_variants.values() if variant.definition]
    if own and not any(word.startswith("shape=") for word in words):
        words.append(f"shape={own[0]}")  # the shape of a workload from outside
    return words


def _model_and_folders(value: str, arguments: Sequence[str]) -> list[str]:
    """Return the overrides that `model=VALUE` stands for, if VALUE has an id of Hugging Face or a path to a folder.

    The id `Qwen/Qwen3-8B` becomes `model=qwen3_8b`. A folder, and an id without a file in conf/model, becomes
    a `model_dir`: `NAME,path/to/folder` becomes `model=NAME` and `model_dir=null,path/to/folder`. With several
    names each folder is combined with each name. The resulting equal jobs run once.
    """
    choices = [file_of(choice, arguments) or choice if "/" in choice else choice for choice in value.split(",")]
    names = [choice for choice in choices if "/" not in choice]
    folders = [choice for choice in choices if "/" in choice]
    overrides = [f"model={','.join(names)}"] if names else []
    return [*overrides, f"model_dir={','.join(['null'] * bool(names) + folders)}"] if folders else overrides


def _losses_and_functions(value: str) -> list[str]:
    """Return the overrides that `loss=VALUE` stands for, if VALUE has functions of files, FILE.py:FUNCTION.

    `policy,FILE.py:FUNCTION` becomes `loss=policy` and `objective=null,FILE.py:FUNCTION@VERSION`. An objective replaces
    any other loss, and equal jobs run once.
    """
    names = [choice for choice in value.split(",") if ".py:" not in choice]
    functions = []
    for choice in value.split(","):
        if choice not in names:
            path, _, name = choice.rpartition(":")
            functions.append(source.function(user_path(path, "the file of a loss"), name, OBJECTIVE_PARAMETERS))
            user_files[functions[-1]] = f"loss={functions[-1].rpartition('@')[0]}"
    return [f"loss={','.join(names or ['logprob'])}", f"objective={','.join(['null'] * bool(names) + functions)}"]


def file_of(choice: str, arguments: Sequence[str] = ()) -> str | None:
    """Return the name of the file in a conf/model that has the sizes of a model, given by its id, or None.

    A tuned model has the sizes of its base. A folder of this name takes precedence.
    """
    if Path(choice).is_dir():
        return None
    for file in (file for folder in config_folders(arguments) for file in sorted((folder / "model").glob("*.yaml"))):
        if {choice, choice.removesuffix("-Instruct")} & set(read_choice(file).get("hub_ids", ())):
            return file.stem
    return None


def config_folders(arguments: Sequence[str]) -> list[Path]:
    """Return the folders of configuration files: the package's and that of --config-dir, which must exist."""
    folders = [CONF, *map(Path, filter(None, [parse_options(arguments)[0].config_dir]))]
    if not folders[-1].is_dir():
        raise JobError(f"no such folder of configuration files: {folders[-1]}")
    return folders


def check_overrides(arguments: Sequence[str]) -> None:
    """Raise JobError with a line for each argument that Hydra would not understand, or that must not reach it."""
    for argument in arguments:  # options of Hydra may have line breaks
        rest = "".join(argument.split()) if argument.lstrip("+~").startswith("hydra") else argument
        if not rest.isprintable():
            raise JobError(f"an argument has characters that a terminal does not print: {printable(argument)}")
    parsed, unrecognised = parse_options(arguments)
    if unrecognised:
        raise JobError(
            "\n".join(f"no such option: {each} (python -m tpbench --help lists them)" for each in unrecognised)
        )
    overrides = parse_overrides(parsed.overrides)
    given: dict[str, str] = {}
    for each in overrides:
        if (first := given.setdefault(each.key_or_group, str(each.input_line))) is not each.input_line:
            raise JobError(f"{first} and {each.input_line} both set {each.key_or_group}: leave out one of them")
    # An experiment is a sweep without -m.
    sweeps = parsed.multirun or any(each.key_or_group in ("experiment", "hydra.mode") for each in overrides)
    check_each(overrides, sweeps)
    if (cells := math.prod(map(_count, overrides))) > MAX_CELLS:
        raise JobError(f"this sweep has {cells} cells; one sweep has at most {MAX_CELLS}: divide it into several")


def check_each(overrides: Iterable[Override], sweeps: bool = True) -> None:
    """Raise JobError with a line for each mistake in overrides, of the command line or of a file. See `_errors`."""
    if errors := [error for each in overrides for error in _errors(each, sweeps)]:
        raise JobError("\n".join(dict.fromkeys(errors)))


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """Return the parsed overrides. Raises JobError with one line for each argument that is not an override."""
    parser = OverridesParser.create()
    overrides, errors = [], []
    for argument, accepted in zip(arguments, accepted_by_hydra(arguments), strict=True):
        try:
            overrides += parser.parse_overrides([accepted])
            overrides[-1].input_line = argument
        except OverrideParseException:
            errors.append(_explanation(argument))
    if errors:
        raise JobError("\n".join(dict.fromkeys(errors)))
    return overrides


def _explanation(argument: str) -> str:
    """Return what is wrong with an argument, and an argument that would be right."""
    name, equals, value = argument.partition("=")
    if len(parts := _several(argument)) > 1:
        return f"'{argument}' is one argument, because of quotes: write {len(parts)} arguments, {shlex.join(parts)}"
    if not equals:
        if argument in COMMANDS:
            return f"{argument} is a command: write it first, as python -m tpbench {argument} ..."
        if argument in command_line_names() | set(GROUPS):
            return f"{argument} has no value: write {argument}=VALUE"
        meant, commands = nearest(argument, COMMANDS), ", ".join(COMMANDS)
        several = "write NAME=VALUE, or several values as -m NAME=VALUE1,VALUE2"
        return f"'{argument}' has no value{meant} ({several}; commands: {commands})"
    values = [each.strip() for each in value.lstrip("=").split(",")]
    right = f"{'-m ' * (len(list(filter(None, values))) > 1)}{name.strip()}={','.join(filter(None, values))}"
    if any(values) and right.removeprefix("-m ") != argument:
        return f"{argument}: a value has no space around it, no comma at its end and one equals sign: write {right}"
    value = value.replace("'", r"\'")
    special = "a value with other characters of special meaning is quoted twice"
    return f"{argument}: brackets and quotation marks must match, and {special}: \"{name}='{value}'\""


def _errors(override: Override, sweeps: bool) -> list[str]:
    """Return what is wrong with an override. `sweeps`: its command line may have several values of a name."""
    line, key, errors = str(override.input_line), str(override.key_or_group), []
    of_hydra = key.startswith("hydra")
    if of_hydra and not _OF_HYDRA.match(key):
        errors.append(f"{printable(line)} has no effect: hydra/launcher, hydra.launcher.X, hydra.searchpath have one")
    if CODE in line:
        errors.append(f"{printable(line)}: {CODE} names Python code, which the command line may not")
    if _ENVIRONMENT.search(line) and key != "output_dir" and not of_hydra:
        # The value would be in messages and in the rows.
        errors.append(f'{printable(line)} reads a variable of the environment: let the shell do it, {key}="$NAME"')
    if (override.is_sweep_override() or line == "variant=all") and not (sweeps or of_hydra):
        errors.append(f"{line} is a sweep: add -m (python -m tpbench -m ...)")
    if override.is_delete() and not of_hydra:
        errors.append(f"{line} removes what every job needs: write {key}=VALUE")
    if key == "workload":
        errors.append("a workload is chosen by its variant and shape (python -m tpbench list WORKLOAD shows them)")
    value = override.value()
    if key == "experiment" and (override.is_sweep_override() or isinstance(value, list)):
        errors.append(f"{line}: experiments run one after the other, each with a command of its own")
    elif key in GROUPS and isinstance(value, list):
        several = ",".join(map(str, value))
        errors.append(f"{line}: write several values as -m {key}={several} (in an experiment: {key}: {several})")
    elif key in GROUPS and (value is None or isinstance(value, dict)):
        errors.append(f"{line} is no choice (python -m tpbench list shows them)")
    if key == "variant" and isinstance(value, str) and ".py:" in value and value not in command_line_variants:
        errors.append(f"variant={value}: only the command line may name a file, not a configuration file")
    if "." in key and not of_hydra:
        errors.append(f"{line}: no field has a dot in its name: write {key.rpartition('.')[2]}=VALUE")
    if key == "experiment" and not override.is_add():
        errors.append(f"experiments are added, with a plus: +{line.lstrip('+')}")
    if _count(override) == 0:
        errors.append(f"{line} has no values")
    return errors


def _count(override: Override) -> int:
    """Return the number of values of an override, without making them."""
    value = override.value()
    if isinstance(value, RangeSweep):
        return max(0, math.ceil(((value.stop or 0) - (value.start or 0)) / (value.step or 1)))
    return len(value.list) if isinstance(value, ChoiceSweep) else 1


def accepted_by_hydra(arguments: Sequence[str]) -> list[str]:
    """Return the arguments as Hydra accepts them: `block_cap='4096'` and `++width=64`.

    Texts that Hydra would take for numbers, or not at all, are quoted. Fields are forced, because Hydra first composes
    a job of the default variant, which may not have the field; `parse_job` checks their names.
    """
    texts = _text_fields()
    words = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        key = name.lstrip("+")
        if key in texts and not re.search(r"[(\[{\\]", value) and len(_several(argument)) == 1:
            value = _ELEMENT.sub(_quoted, value)
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


def _several(argument: str) -> list[str]:
    """Return the arguments that stand in one, because of quotes around all of them."""
    parts = _SEVERAL.split(argument.strip())
    following = {part.partition("=")[0].lstrip("+~") for part in parts[1:]}
    return [argument] if following.isdisjoint(command_line_names() | set(GROUPS)) else parts


def chosen_fields(overrides: Sequence[str]) -> list[str]:
    """Return the names that these overrides of one job set: fields, and groups of only some workloads, such as loss."""
    keys = [each.key_or_group for each in OverridesParser.create().parse_overrides(list(overrides))]
    return [key for key in keys if key not in ("variant", "shape", "experiment") and not key.startswith("hydra")]


def overrides_of_cell(lines: Sequence[str]) -> str:
    """Return the overrides of one cell as a user types them, for a shell. Options of the whole sweep are left out."""
    words: list[str] = []
    for line in lines:
        name, _, value = line.removeprefix("++").partition("=")
        value = re.sub(r"""^'([^'",\\()\[\]{}]*)'$""", r"\1", value)
        if name == "variant" and value in command_line_variants:
            value = f"{command_line_variants[value].path}:{command_line_variants[value].function}"
        if value in user_files:
            name, _, value = user_files[value].partition("=")
            words = [word for word in words if not word.startswith(f"{name}=")]
        elif name == "model_dir" and value != "null":
            value = str(user_path(value).resolve())
        words += [f"{name}={value}"] if name not in SWEEP_OPTION_NAMES else []
    return shlex.join(words)
