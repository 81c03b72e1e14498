"""Rewrites of the command line before Hydra parses it. They exist because Hydra has no setting for them."""

from __future__ import annotations

import fnmatch
import importlib.util
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser

import tpbench
from tpbench.job import WORLD_SIZE, Job
from tpbench.launcher.options import GROUPS, SWEEP_OPTION_NAMES, command_line_names, read_choice
from tpbench.measure.session import MeasureSettings
from tpbench.outside.variant import OutsideVariant, from_entry_point, from_file, installed_names, names_in
from tpbench.results.read import LABEL
from tpbench.results.schema import INT, TEXT, common_columns, type_from_hint
from tpbench.settings import JobError, user_path
from tpbench.workloads import cached_until_registered, variants, workloads

CONF = Path(tpbench.__file__).resolve().parent / "conf"
OUTPUT_FOLDERS = ("output_dir", "hydra.run.dir", "hydra.sweep.dir")
"""Fields for the folders of rows and of logs."""

typed: list[str] = []
"""The command line as the user typed it. `sys.argv` holds the one that Hydra gets."""

_GROUP_CHOICE = re.compile(rf"[+~]?(?:{'|'.join(GROUPS)})=")
_NESTED = re.compile(r"""[()\[\]{}'"\\]""")
"""Characters of a value that is more than a list of words."""
_BARE_NUMBER = re.compile(r"(?<![\w'\".])(\d+)(?![\w'\".])")


def quote_numbers(arguments: Sequence[str]) -> list[str]:
    """Quote numbers that name a choice: `block_cap=4096` becomes `block_cap='4096'`.

    Hydra accepts only strings as the name of a choice.
    """
    return [_BARE_NUMBER.sub(r"'\1'", each) if _GROUP_CHOICE.match(each) else each for each in arguments]


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


def flat_names(arguments: Sequence[str]) -> list[str]:
    """Write `train.loss=tpbench` as `train_loss=tpbench`, folders as `model_dir`, 128k as 131072, patterns as lists."""
    flat = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name in ("model", "model_dir", *OUTPUT_FOLDERS):  # Hydra's grammar has no ~
            value = ",".join(str(user_path(path)) if path.startswith("~") else path for path in value.split(","))
        if name in GROUPS:
            value = _listed(name, value, arguments)
        elif name in _whole_numbers():
            if _THOUSANDS.fullmatch(value):
                raise JobError(f"{argument}: a number has no comma: write {name}={value.replace(',', '')}")
            value = _UNITS.sub(lambda match: str(int(match[1]) * 1024 ** " km".index(match[2].lower())), value)
        if name == "model" and ("/" in value or ".py:" in value):
            flat += _model_and_folders(value, arguments)
        elif name.replace(".", "_") in command_line_names():
            flat.append(f"{name.replace('.', '_')}{equals}{value}")
        else:
            flat.append(f"{name}{equals}{value}")
    return flat


def _listed(group: str, value: str, arguments: Sequence[str]) -> str:
    """Return `choice(A,B)`, `glob(PATTERN)` and, of variants, `all` as a list of choices.

    Hydra's sweeper takes numbers among them for no choices. Variants are those of the workloads of the line's shapes,
    without presets. Raises JobError if nothing matches.
    """
    if (choices := re.fullmatch(r"choice\(([^()]*)\)", value)) is not None:
        return choices[1]
    pattern = re.fullmatch(r"glob\(([^(),=\[\]]*)\)", value)
    words = ["all"] if pattern else value.split(",")
    if pattern is None and (group != "variant" or "all" not in words):
        return value
    valid = sorted({file.stem for folder in config_folders(arguments) for file in (folder / group).glob("*.yaml")})
    of_workloads = ""
    if group == "variant":
        owners = {
            values.get("shape_workload") for shape in _shapes(arguments) for values in _read("shape", shape, arguments)
        }
        valid = [name for name, (workload, _) in variants().items() if workload.name in owners]
        of_workloads = f" of {', '.join(sorted(map(str, owners)))}, the workload of the shape,"
    chosen = [name for name in valid if pattern is None or fnmatch.fnmatch(name, pattern[1].strip("'\""))]
    if not chosen:
        raise JobError(f"no {group}{of_workloads} matches {value} (valid: {', '.join(valid)})")
    return ",".join(dict.fromkeys(name for word in words for name in (chosen if word == "all" else [word])))


def _shapes(arguments: Sequence[str]) -> list[str]:
    """Return the shapes of a command line: its own, those of its experiment, or that of its configuration file."""
    values = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    for experiment in _read("experiment", values.get("+experiment", ""), arguments):
        values = {**((experiment.get("hydra") or {}).get("sweeper") or {}).get("params", {}), **values}
    files = _primary((), [CONF]), _primary(arguments, config_folders(arguments))
    defaults = [item for content in files for item in content.get("defaults", ()) if isinstance(item, dict)]
    chosen = {str(key).split()[-1].strip("/"): choice for item in defaults for key, choice in item.items()}
    return _listed("shape", str(values.get("shape", chosen["shape"])), arguments).split(",")


def _read(group: str, name: str, arguments: Sequence[str]) -> list[dict[str, Any]]:
    files = (folder / group / f"{name}.yaml" for folder in config_folders(arguments))
    return [read_choice(file) for file in files if file.is_file()][:1]


def config_folders(arguments: Sequence[str]) -> list[Path]:
    """Return the folders of configuration files: the package's, that of --config-dir and those of hydra.searchpath.

    Raises JobError for a folder that does not exist.
    """
    folders = [CONF, *map(Path, _options(arguments, "--config-dir", "-cd"))]
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


def _primary(arguments: Sequence[str], folders: Sequence[Path]) -> dict[str, Any]:
    """Return the content of the configuration file that --config-name names."""
    name = [*_options(arguments, "--config-name", "-cn"), "config"][0].removesuffix(".yaml")
    files = [file for folder in folders if (file := folder / f"{name}.yaml").is_file()]
    return read_choice(files[0]) if files else {}


def _options(arguments: Sequence[str], long: str, short: str) -> list[str]:
    """Return the values of an option of Hydra."""
    joined = [word.partition("=")[2] for word in arguments if word.startswith(f"{long}=")]
    return [*joined, *(value for word, value in itertools.pairwise(arguments) if word in (long, short))]


@cached_until_registered
def _whole_numbers() -> frozenset[str]:
    """Return the names of the fields of problems that are whole numbers."""
    problems = [workload.problem for workload in workloads().values()]
    return frozenset(field.name for problem in problems for field in fields(problem) if field.type in ("int", int))


_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})*,0\d\d(?:,\d{3})*")
"""A number with commas. No list of values has one that begins with 0."""
_UNITS = re.compile(r"(?<![\w.])(\d+)([kKmM])(?!\w)")


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


def force_fields(arguments: Sequence[str]) -> list[str]:
    """Write `width=64` as `++width=64`, for fields that only some workloads have.

    In a sweep over variants Hydra first composes a job of the default variant, which may not have the field.
    """
    forced = _fields_of_some_workloads() - set(GROUPS)
    return [f"++{each}" if each.partition("=")[0] in forced else each for each in arguments]


def chosen_fields(overrides: Sequence[str]) -> list[str]:
    """Return the names that these overrides of one job set: fields, and groups of only some workloads, such as loss."""
    keys = [each.key_or_group for each in OverridesParser.create().parse_overrides(list(overrides))]
    groups = set(GROUPS) - _fields_of_some_workloads()
    return [key for key in keys if key not in groups and not key.startswith("hydra")]


@cached_until_registered
def _fields_of_some_workloads() -> frozenset[str]:
    shared: set[str] = set.intersection(
        *(command_line_names(each) for each in workloads().values() if not each.definition)
    )
    shared -= {name.name for each in workloads().values() if each.definition for name in fields(each.problem)}
    return frozenset(command_line_names() - shared)


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


_VARIANT = "variant="
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


def replace_file_variants(arguments: Sequence[str]) -> list[str]:
    """Replace each `path/FILE.py:FUNCTION` of `variant=` by its name in rows, FILE.py:FUNCTION, and remember it.

    Names of entry points are remembered, too. Hydra then knows all of them as choices of the group `variant`.

    Raises:
        JobError: with a line for each variant whose file cannot be used.
    """
    _named.clear()
    errors: list[str] = []

    def name_of(match: re.Match[str]) -> str:
        try:
            return _remember(match[0])
        except JobError as error:
            errors.append(str(error))
            return match[0]

    result = [
        _VARIANT + _CHOICE.sub(name_of, argument.removeprefix(_VARIANT)) if argument.startswith(_VARIANT) else argument
        for argument in arguments
    ]
    if errors:
        raise JobError("\n".join(dict.fromkeys(errors)))
    return result


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
    if choice in installed_names():
        return from_entry_point(choice)
    return None


def is_file_name(name: str) -> bool:
    """Return True if rows, tables and command lines can hold this name of a file as it is."""
    return _FILE_NAME.fullmatch(name) is not None


def register_choice(variant: OutsideVariant) -> None:
    """Make the variant a choice of Hydra's group `variant`. A workload from outside is a shape without sizes."""
    node: dict[str, Any] = {"defaults": [f"/workload/{variant.workload}", "_self_"], "variant": variant.name}
    if variant.definition:
        _require_free_names(variant)
        del node["defaults"]
        _store("shape", variant.workload, {"shape_workload": variant.workload, "tp_size": None})
    _store("variant", variant.name, node)


def _store(group: str, name: str, node: dict[str, Any]) -> None:
    ConfigStore.instance().store(group=group, name=name, node=node, package="_global_", provider="tpbench")


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


def shape_of_workload(arguments: Sequence[str]) -> list[str]:
    """Return the shape that a command line without one has, if it names variants of a workload from outside."""
    workloads = [variant.workload for variant in _named.values() if variant.definition]
    given = any(argument.startswith("shape=") for argument in arguments)
    return [f"shape={workloads[0]}"] if workloads and not given else []


def _remember(choice: str) -> str:
    if choice in variants() or (found := find_outside(choice)) is None:
        return choice
    known = _named.setdefault(found.name, found)
    if known != found:
        raise JobError(
            f"{known.path} and {found.path} have the same name in rows, {found.name}: rename one of the files"
        )
    others = [other for other in _named.values() if other.definition and other.workload == found.workload]
    if found.definition and any(other.definition != found.definition for other in others):
        raise JobError(
            f"{others[0].path} and {found.path} declare different workloads called {found.workload}: "
            "write Workload(..., name=...) in one of them"
        )
    register_choice(found)
    return found.name
