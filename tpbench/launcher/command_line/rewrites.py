"""Rewrites of the command line before Hydra parses it. They exist because Hydra has no setting for them."""

from __future__ import annotations

import fnmatch
import importlib.util
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser

from tpbench.job import WORLD_SIZE, Job
from tpbench.launcher.command_line.checks import OUTPUT_FOLDERS, parse_options
from tpbench.launcher.options import CONF, GROUPS, SWEEP_OPTION_NAMES, command_line_names, read_choice
from tpbench.measure.session import MeasureSettings
from tpbench.outside.variant import OutsideVariant, from_file, names_in
from tpbench.results.read import LABEL
from tpbench.results.schema import INT, TEXT, common_columns, type_from_hint
from tpbench.settings import JobError, user_path
from tpbench.suggestions import unknown
from tpbench.workloads import variants

typed: list[str] = []
"""The command line as the user typed it. `sys.argv` holds the one that Hydra gets."""

_NESTED = re.compile(r"""[()\[\]{}'"\\]""")
"""Characters of a value that is more than a list of words."""
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})*,0\d\d(?:,\d{3})*")
"""A number with commas. No list of values has one that begins with 0."""
_BARE_NUMBER = re.compile(r"(?<![\w'\".])(\d+)(?![\w'\".])")


ALIASES = {
    "impl": "variant",
    "model_name": "model",
    "attn_impl": "attention",
    "gradient_accumulation_steps": "accumulate",
    "use_vocab_parallel": "vocab_parallel",
    "no_vocab_parallel": "vocab_parallel",
    "num_training_steps": "steps",
}
"""Names of an older benchmark of AutoTP and FSDP2, each with the name here. Its steps include those of the warm-up."""
_OLDER_SHAPE = "shape=qwen3_32b_tp4"
"""What a command line with `impl` trains if it names no shape, as the older benchmark does."""


def own_names(arguments: Sequence[str]) -> list[str]:
    """Write `impl=autotp` as `variant=autotp`, and so on for all `ALIASES`.

    Raises JobError with the whole right command line if fields have dashes in front, as in `--impl autotp`.
    """
    plain = _without_dashes(arguments)
    values = dict(argument.split("=", 1) for argument in plain if "=" in argument)
    names = [_own_name(argument, plain) if "=" in argument else argument for argument in plain]
    if "impl" in values and "shape" not in values:
        names.append(_OLDER_SHAPE)
    if plain != list(arguments):
        raise JobError(f"fields have no dashes in front: write python -m tpbench {shlex.join(names)}")
    return names


def _own_name(argument: str, arguments: Sequence[str]) -> str:
    name, _, value = argument.partition("=")
    if name == "no_vocab_parallel":
        value = {"true": "false", "false": "true"}.get(value.lower(), value)
    elif name == "num_training_steps":
        files = [*_read("workload", "train_step", arguments), *_read("shape", _shapes(arguments)[0], arguments)]
        settings = [*files, dict(argument.split("=", 1) for argument in arguments if "=" in argument)]
        steps = str([each["warmup_steps"] for each in settings if "warmup_steps" in each][-1])
        if not (steps.isdecimal() and all(total.isdecimal() and int(total) > int(steps) for total in value.split(","))):
            raise JobError(f"{name}={value} includes warmup_steps={steps}: it must be a larger number")
        value = ",".join(str(int(total) - int(steps)) for total in value.split(","))
    return f"{ALIASES.get(name, name)}={value}"


def _without_dashes(arguments: Sequence[str]) -> list[str]:
    """Write `--impl autotp` as `impl=autotp`, for names of fields; other options are Hydra's."""
    names = command_line_names() | ALIASES.keys() | set(GROUPS)
    words, plain = list(arguments), []
    while words:
        name, equals, value = words.pop(0).partition("=")
        if name.startswith("--") and (field := name.removeprefix("--").replace("-", "_")) in names:
            if not equals:
                value = words.pop(0) if words and not words[0].startswith("-") and "=" not in words[0] else "true"
            name, equals = field, "="
        plain.append(f"{name}{equals}{value}")
    return plain


def rewritten(arguments: Sequence[str]) -> list[str]:
    """Return a command line with the names and numbers that Hydra and its files know.

    A file of a variant becomes its name in rows (which is remembered), `all` a list of variants, and a
    model's id or folder the fields `model` or `model_dir`. Raises JobError with a line for each file of a variant that
    cannot be used.
    """
    _named.clear()
    words: list[str] = []
    errors: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name in ("model", "model_dir", *OUTPUT_FOLDERS):  # Hydra's grammar has no ~
            value = ",".join(str(user_path(path)) if path.startswith("~") else path for path in value.split(","))
        if name in GROUPS:  # Hydra's sweeper takes numbers in choice(...) for no choices
            value = re.sub(r"^choice\(([^()]*)\)$", r"\1", value)
        elif _THOUSANDS.fullmatch(value):
            raise JobError(f"{argument}: a number has no comma: write {name}={value.replace(',', '')}")
        if name == "variant":
            value = _CHOICE.sub(lambda match: _remember(match[0], errors), _all_variants(value, arguments))
        if (flat := name.replace(".", "_")) in command_line_names():  # train.loss
            name = flat
        if name == "model" and ("/" in value or ".py:" in value):
            words += _model_and_folders(value, arguments)
        else:
            words.append(f"{name}{equals}{value}")
    if errors:
        raise JobError("\n".join(dict.fromkeys(errors)))
    own = [variant.workload for variant in _named.values() if variant.definition]
    if own and not any(word.startswith("shape=") for word in words):
        words.append(f"shape={own[0]}")  # the shape of a workload from outside
    return words


def for_hydra(arguments: Sequence[str]) -> list[str]:
    """Return the arguments as Hydra accepts them: `block_cap='4096'` and `++width=64`.

    Names of choices must be strings. Fields are forced, because Hydra first composes a job of the default variant,
    which may not have the field; `parse_job` checks their names.
    """
    words = []
    for argument in arguments:
        if argument.partition("=")[0].lstrip("+~") in GROUPS:
            words.append(_BARE_NUMBER.sub(r"'\1'", argument))
        else:
            words.append(f"++{argument}" if re.match(r"(?!hydra)\w[\w.]*=", argument) else argument)
    return words


def _all_variants(value: str, arguments: Sequence[str]) -> str:
    """Return `all` and `glob(PATTERN)` as a list of the variants of the line's shapes, without presets.

    Raises JobError if nothing matches.
    """
    pattern = re.fullmatch(r"glob\(([^(),=\[\]]*)\)", value)
    words = ["all"] if pattern else value.split(",")
    if "all" not in words:
        return value
    fits = pattern[1].strip("'\"") if pattern else "*"
    shapes = (values for shape in _shapes(arguments) for values in _read("shape", shape, arguments))
    owners = {values.get("shape_workload") for values in shapes}
    valid = [name for name, (workload, _) in variants().items() if workload.name in owners]
    chosen = [name for name in valid if fnmatch.fnmatch(name, fits)]
    if not chosen:
        of_workloads = f"of {', '.join(sorted(map(str, owners)))}, the workload of the shape,"
        raise JobError(f"no variant {of_workloads} matches {value} (valid: {', '.join(valid)})")
    return ",".join(dict.fromkeys(name for word in words for name in (chosen if word == "all" else [word])))


def _shapes(arguments: Sequence[str]) -> list[str]:
    """Return the shapes of a command line: its own, those of its experiment, or that of its configuration file."""
    values = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    for experiment in _read("experiment", values.get("+experiment", ""), arguments):
        values = {**((experiment.get("hydra") or {}).get("sweeper") or {}).get("params", {}), **values}
    files = _primary((), [CONF]), _primary(arguments, config_folders(arguments))
    defaults = [item for content in files for item in content.get("defaults", ()) if isinstance(item, dict)]
    chosen = {str(key).split()[-1].strip("/"): choice for item in defaults for key, choice in item.items()}
    return str(values.get("shape", chosen["shape"])).split(",")


def _read(group: str, name: str, arguments: Sequence[str]) -> list[dict[str, Any]]:
    files = (folder / group / f"{name}.yaml" for folder in config_folders(arguments))
    return [read_choice(file) for file in files if file.is_file()][:1]


def config_folders(arguments: Sequence[str]) -> list[Path]:
    """Return the folders of configuration files: the package's, that of --config-dir and those of hydra.searchpath.

    Raises JobError for a folder that does not exist.
    """
    folders = [CONF, *map(Path, filter(None, [parse_options(arguments)[0].config_dir]))]
    lists = [word.partition("=")[2].strip("[]") for word in arguments if word.startswith("hydra.searchpath=")]
    places = [place.strip("'\" ") for text in lists for place in text.split(",")]
    for place in [*places, *((_primary(arguments, folders).get("hydra") or {}).get("searchpath") or [])]:
        kind, _, rest = place.rpartition("://")
        if kind == "pkg":
            spec = importlib.util.find_spec(rest.partition("/")[0].partition(".")[0])
            roots = (spec and spec.submodule_search_locations) or []
            folders += [Path(root, *rest.replace("/", ".").split(".")[1:]) for root in roots] or [Path(place)]
        else:
            folders.append(Path(rest))
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        raise JobError(f"no such folder of configuration files: {', '.join(missing)}")
    return folders


def check_defaults(arguments: Sequence[str]) -> None:
    """Raise JobError if no folder has the configuration file that -cn names, or if it does not build on another one."""
    folders, name = config_folders(arguments), parse_options(arguments)[0].config_name
    if name is None:
        return
    files = [file for folder in folders if (file := folder / f"{name.removesuffix('.yaml')}.yaml").is_file()]
    if not files:
        valid = sorted(file.stem for folder in folders for file in folder.glob("*.yaml"))
        raise JobError(unknown("configuration file", name, valid))
    if "_self_" not in (read_choice(files[0]).get("defaults") or ()):
        raise JobError(f"{files[0]} needs a list `defaults:` with `- config`, what it overrides, and `- _self_`")


def _primary(arguments: Sequence[str], folders: Sequence[Path]) -> dict[str, Any]:
    """Return the content of the configuration file that --config-name names."""
    name = (parse_options(arguments)[0].config_name or "config").removesuffix(".yaml")
    files = [file for folder in folders if (file := folder / f"{name}.yaml").is_file()]
    return read_choice(files[0]) if files else {}


_GROUPS_OF_ALL = {"variant", "shape", "experiment"}
"""Groups whose names aren't fields of any workload."""

model_files: set[str] = set()
"""The models of user's files, FILE.py:NAME, that this process's command line has named."""


def _model_and_folders(value: str, arguments: Sequence[str]) -> list[str]:
    """Return the overrides that `model=VALUE` stands for, if VALUE has an id of Hugging Face or a path to a folder.

    The id `Qwen/Qwen3-8B` becomes `model=qwen3_8b`. A folder, FILE.py:NAME, and an id without a file in conf/model,
    becomes a `model_dir`: `NAME,path/to/folder` becomes `model=NAME` and `model_dir=null,path/to/folder`. With several
    names each folder is combined with each name. The resulting equal jobs run once.
    """
    choices = [value] if _NESTED.search(value) else value.split(",")
    choices = [file_of(choice, arguments) or choice if "/" in choice else choice for choice in choices]
    for place, choice in enumerate(choices):
        if builder := re.fullmatch(r"(.+\.py):(\w+)", choice):
            choices[place] = f"{user_path(builder[1]).resolve()}:{builder[2]}"
            model_files.add(choices[place])
    names = [choice for choice in choices if "/" not in choice]
    folders = [choice for choice in choices if "/" in choice]
    overrides = [f"model={','.join(names)}"] if names else []
    return [*overrides, f"model_dir={','.join(['null'] * bool(names) + folders)}"] if folders else overrides


def chosen_fields(overrides: Sequence[str]) -> list[str]:
    """Return the names that these overrides of one job set: fields, and groups of only some workloads, such as loss."""
    keys = [each.key_or_group for each in OverridesParser.create().parse_overrides(list(overrides))]
    return [key for key in keys if key not in _GROUPS_OF_ALL and not key.startswith("hydra")]


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


_CHOICE = re.compile(r"""[^,()\[\]{}'"\\]+""")
"""A value among several: what Hydra's grammar separates by commas, brackets and quotation marks."""
_FILE = re.compile(r"(?P<path>.*\.py)(?::(?P<function>.*))?")
_WITHOUT_ENDING = re.compile(r"(?P<path>[^:]*[^:/]):(?P<function>[A-Za-z_]\w*)")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.py")
"""File names that are written in rows, tables and command lines as they are."""

_named: dict[str, OutsideVariant] = {}


def command_line_variants() -> Mapping[str, OutsideVariant]:
    """Return the variants that this process's command line has named, by their names in rows."""
    return _named


def find_outside(choice: str) -> OutsideVariant | None:
    """Return the variant from outside that a value of `variant=` means, or None. Raises JobError."""
    if match := _FILE.fullmatch(choice.strip()):
        path = user_path(match["path"], "the file of a variant")
        if not is_file_name(path.name):
            raise JobError(f"{path.name}: rename the file; its name may have letters, digits and _ - . of ASCII only")
        if not (function := match["function"]):
            raise JobError(
                f"variant={choice} names no function: write {choice.rstrip(':')}:FUNCTION "
                f"(its functions: {', '.join(names_in(path)) or 'none'})"
            )
        return from_file(path, function)
    if match := _WITHOUT_ENDING.fullmatch(choice.strip()):
        raise JobError(f"variant={choice}: write the file with its ending, as {match['path']}.py:{match['function']}")
    return None


def is_file_name(name: str) -> bool:
    """Return True if rows, tables and command lines can hold this name of a file as it is."""
    return _FILE_NAME.fullmatch(name) is not None


def register_choice(variant: OutsideVariant) -> None:
    """Make the variant a choice of Hydra's group `variant`. A workload from outside is a shape without sizes."""
    nodes: dict[str, dict[str, Any]] = {"variant": {"variant": variant.name}}
    if variant.definition:
        _require_free_names(variant)
        nodes["shape"] = {"shape_workload": variant.workload, "tp_size": None}
    else:
        nodes["variant"]["defaults"] = [f"/workload/{variant.workload}", "_self_"]
    for group, node in nodes.items():
        ConfigStore.instance().store(variant.workload if group == "shape" else variant.name, node, group, "_global_")


def _require_free_names(variant: OutsideVariant) -> None:
    """Raise JobError if a field of the variant's workload has the name of another field, option or column."""
    taken = {each.name for cls in (Job, MeasureSettings) for each in fields(cls)} | SWEEP_OPTION_NAMES | {WORLD_SIZE}
    taken |= {*GROUPS, *ALIASES, LABEL, *common_columns()} - {"seed", *SHARED_COLUMNS}
    for each in fields(variant.of_workload.problem):
        if each.name in taken or type_from_hint(each.type) != SHARED_COLUMNS.get(each.name, type_from_hint(each.type)):
            file = Path(variant.path).name
            raise JobError(
                f"{file}: the field {each.name} of {variant.workload} has a name that tpbench uses: rename it"
            )
    for name in variant.of_workload.columns.keys() & common_columns().keys():
        raise JobError(f"{Path(variant.path).name}: the column {name} of {variant.workload} has a name of tpbench's")


SHARED_COLUMNS = {"tokens": INT, "vocab": INT, "dtype": TEXT}
"""Columns of every row that hold fields of problems, with their types."""


def _remember(choice: str, errors: list[str]) -> str:
    """Return the name in rows of a value of `variant=`, and remember the variant if it is from outside this package.

    Hydra then knows it as a choice of the group `variant`. What is wrong with it is added to `errors`.
    """
    try:
        if choice in variants() or (found := find_outside(choice)) is None:
            return choice
    except JobError as error:
        errors.append(str(error))
        return choice
    known = _named.setdefault(found.name, found)
    others = [other for other in _named.values() if other.definition and other.workload == found.workload]
    if known != found:
        errors.append(
            f"{known.path} and {found.path} have the same name in rows, {found.name}: rename one of the files"
        )
    elif found.definition and any(other.definition != found.definition for other in others):
        errors.append(
            f"{others[0].path} and {found.path} declare different workloads called {found.workload}: "
            "write Workload(..., name=...) in one of them"
        )
    else:
        register_choice(found)
    return found.name
